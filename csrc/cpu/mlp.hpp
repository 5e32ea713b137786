// The MLP of a block by a team: LayerNorm, fc1, activation, fc2, residual. A chunk of rows goes
// through both matmuls while its hidden rows are in cache: they never reach memory. Where F is
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
  int64_t for_gemm, per_thread;

  MlpScratch(int64_t M, int64_t D, int64_t F, Precision precision, int threads) {
    const int64_t chunks = ceil_div(M, hidden_rows(F, precision, threads));
    chunk = min(M, round_up(ceil_div(M, max(chunks, 1)), kTileRows));  // of even height
    columns = hidden_columns(F);
    h = Left::floats(chunk, D, precision);
    hidden = Left::floats(chunk, columns, precision);
    sums = columns < F ? part_floats(chunk, D) : 0;
    shared = h + hidden + sums;
    for_gemm = gemm_scratch(chunk, max(D, columns), precision);
    per_thread = for_gemm + row_stride(D);
  }
};

// y may be x.
struct Mlp {
  const mlp_args& a;
  int64_t y_stride;  // of rows of y; those of x have a.x_stride
  Weights fc1, fc2;  // (F, D), (D, F)
  const MlpScratch& n;
  NormKind norm = NormKind::layer;
  bool residual = true;  // add x to the result

  // By every thread of a team; `memory` holds n.shared floats for the team, `scratch` n.per_thread
  // for this thread. Ends with a sync.
  void run(const Team& team, float* memory, float* scratch) const {
    const Left h = Left::at(memory, a.D, fc1.precision);  // (chunk, D)
    const Norm rows{.x = {a.x_dtype, a.x, a.x_stride},
                    .weight = a.norm_weight,
                    .bias = a.norm_bias,
                    .D = a.D,
                    .eps = a.eps,
                    .stats = a.stats,
                    .kind = norm};
    for (int64_t m0 = 0; m0 < a.B * a.S; m0 += n.chunk) {
      const int64_t M = min(n.chunk, a.B * a.S - m0);
      fill(team, h, M, a.D, scratch + n.for_gemm,
           [&](int64_t m, float* row) { rows.row(m0 + m, DType::f32, row); });
      int64_t f0 = 0;
      do {  // at least once: F = 0 leaves the bias
        const Range hidden{f0, min(a.F, f0 + n.columns)};
        multiply_part(team, h, {m0, m0 + M}, hidden, memory, scratch);
        f0 = hidden.end;
      } while (f0 < a.F);
    }
  }

 private:
  // No activation makes an element larger. The same for all parts, whose sums are added up. Ends
  // with a sync.
  void expect_hidden(const Team& team, const Left& h, const Left& hidden, int64_t M) const {
    const ProductBound bound(fc1, a.fc1_bias);
    const float kept = a.dropout.threshold ? a.dropout.scale : 1.0f;
    const Range rows = team.share(M);
    for (int64_t m = rows.begin; m < rows.end; ++m) expect(hidden, m, bound(h, m) * kept);
    team.sync();
  }

  // The hidden columns [part) of some rows: fc1 makes them, fc2 adds what they contribute to y.
  void multiply_part(const Team& team, const Left& h, Range rows, Range part, float* memory,
                     float* scratch) const {
    const int64_t M = rows.end - rows.begin, F = part.end - part.begin;
    const bool last = part.end >= a.F;
    const Left hidden = Left::at(memory + n.h, F, fc1.precision);  // (chunk, F)
    float* const sums = memory + n.h + n.hidden;                   // (chunk, D)
    Weights up = fc1.part(part.begin, F, 0, a.D), down = fc2.part(0, a.D, part.begin, F);
    const Weights then = fc1.part(part.end, min(n.columns, a.F - part.end), 0, a.D);
    up.next = &down;
    down.next = last ? fc2.next : &then;
    if (expects(hidden)) expect_hidden(team, h, hidden, M);
    gemm(team, h, M, up, scratch,
         StoreEpilogue<Left>{.bias = a.fc1_bias ? a.fc1_bias + part.begin : nullptr,
                             .activation = a.activation,
                             .y = hidden,
                             .pre_dtype = a.w_dtype,
                             .pre = a.pre,
                             .N = a.F,
                             .first_row = rows.begin,
                             .first_column = part.begin,
                             .dropout = a.dropout});
    team.sync();
    settle(team, hidden, M);
    const ResidualEpilogue join{.bias = a.fc2_bias,
                                .gamma = a.gamma,
                                .dtype = a.x_dtype,
                                .residual = residual ? a.x : nullptr,
                                .residual_stride = a.x_stride,
                                .y = a.y,
                                .y_stride = y_stride,
                                .N = a.D,
                                .dropout = a.dropout,
                                .path = a.path,
                                .S = a.S,
                                .first_row = rows.begin};
    gemm(team, hidden, M, down, scratch,
         part_epilogue(join, fc2.precision, sums, a.D, part.begin == 0, last));
    team.sync();
  }
};

}  // namespace
