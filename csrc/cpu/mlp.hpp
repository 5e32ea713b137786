// The MLP of a block by a team: LayerNorm, fc1, activation, fc2, residual. A chunk of rows goes
// through both products while its hidden rows are in cache: they never reach memory. Where F is
// wide for the cache (hidden_columns), fc1 makes a part of the hidden columns at a time and fc2
// adds up what each contributes.
#pragma once
#include "epilogue.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace {

using vitkern::mlp_args;

struct MlpScratch {
  int64_t chunk, columns;           // rows and hidden columns at a time
  int64_t h, hidden, sums, shared;  // floats, in this order
  int64_t sums_stride;
  int64_t for_gemm, per_thread;

  MlpScratch(int64_t M, int64_t D, int64_t F, Precision precision, int threads) {
    const int64_t chunks = ceil_div(M, hidden_rows(F, precision, threads));
    chunk = min(M, round_up(ceil_div(M, max(chunks, 1)), kTileRows));  // of even height
    columns = hidden_columns(F);
    sums_stride = row_stride(D);
    h = Left::floats(chunk, D, precision);
    hidden = Left::floats(chunk, columns, precision);
    sums = columns < F ? chunk * sums_stride : 0;
    shared = h + hidden + sums;
    for_gemm = gemm_scratch(chunk, max(D, columns), precision);
    per_thread = for_gemm + row_stride(D);
  }
};

// Rows of x and y (which may be x) are a.x_stride and y_stride apart; `memory` holds n.shared
// floats for the team, `scratch` n.per_thread for this thread. Ends with a sync.
inline void mlp_by(const Team& team, const mlp_args& a, int64_t y_stride, const Weights& fc1,
                   const Weights& fc2, const MlpScratch& n, float* memory, float* scratch) {
  const int64_t M_total = a.B * a.S;
  const Left h = Left::at(memory, a.D, fc1.precision);  // (chunk, D)
  float* const sums = memory + n.h + n.hidden;          // (chunk, D)
  for (int64_t m0 = 0; m0 < M_total; m0 += n.chunk) {
    const int64_t M = min(n.chunk, M_total - m0);
    fill(team, h, M, a.D, scratch + n.for_gemm, [&](int64_t m, float* row) {
      normalise_row(a.x_dtype, offset(a.x_dtype, a.x, (m0 + m) * a.x_stride), a.norm_weight,
                    a.norm_bias, DType::f32, row, a.stats ? a.stats + 2 * (m0 + m) : nullptr, a.D,
                    a.eps);
    });
    int64_t f0 = 0;
    do {  // at least once: F = 0 leaves the bias
      const int64_t F = min(n.columns, a.F - f0), f1 = f0 + F;
      const Left hidden = Left::at(memory + n.h, F, fc1.precision);  // (chunk, F)
      Weights up = fc1.part(f0, F, 0, a.D), down = fc2.part(0, a.D, f0, F);
      const Weights then = fc1.part(f1, min(n.columns, a.F - f1), 0, a.D);
      up.next = &down;
      down.next = f1 < a.F ? &then : fc2.next;
      gemm(team, h, M, up, scratch,
           StoreEpilogue<Left>{.bias = a.fc1_bias ? a.fc1_bias + f0 : nullptr,
                               .activation = a.activation,
                               .y = hidden,
                               .pre_dtype = a.w_dtype,
                               .pre = a.pre,
                               .N = a.F,
                               .first_row = m0,
                               .first_column = f0,
                               .dropout = a.dropout});
      team.sync();
      settle(team, hidden, M);
      if (f1 < a.F)
        gemm(team, hidden, M, down, scratch, SumEpilogue{sums, n.sums_stride, f0 == 0});
      else
        gemm(team, hidden, M, down, scratch,
             ResidualEpilogue{.bias = a.fc2_bias,
                              .gamma = a.gamma,
                              .dtype = a.x_dtype,
                              .residual = a.x,
                              .residual_stride = a.x_stride,
                              .y = a.y,
                              .y_stride = y_stride,
                              .N = a.D,
                              .dropout = a.dropout,
                              .path = a.path,
                              .S = a.S,
                              .first_row = m0,
                              .sums = f0 > 0 ? sums : nullptr,
                              .sums_stride = n.sums_stride});
      team.sync();
      f0 = f1;
    } while (f0 < a.F);
  }
}

}  // namespace
