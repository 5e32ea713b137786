// mlp: y = x + drop_path(gamma * dropout(fc2(dropout(activation(fc1(layernorm(x)))))))
// A chunk of rows goes through both products while its F-wide hidden rows are in cache: they never
// reach memory.
#include "arena.hpp"
#include "epilogue.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {

void mlp(const mlp_args& a) {
  const int64_t M_total = a.B * a.S, h_stride = row_stride(a.D), hidden_stride = row_stride(a.F);
  const int64_t fit = kHiddenBytes * a.threads / (max(hidden_stride, 1) * 4) / kMR * kMR;
  const int64_t chunk = min(M_total, max(8 * kMR, fit));
  const int64_t shared = chunk * (h_stride + hidden_stride);
  const int64_t per_thread = gemm_scratch(chunk);
  const Lease lease((shared + a.threads * per_thread) * sizeof(float));
  float* const h = lease.floats();             // (chunk, D)
  float* const hidden = h + chunk * h_stride;  // (chunk, F)
  const Weights fc1{a.w_dtype, a.fc1_weight, a.F, a.D, false},
      fc2{a.w_dtype, a.fc2_weight, a.D, a.F, false};
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = h + shared + team.rank * per_thread;
    for (int64_t m0 = 0; m0 < M_total; m0 += chunk) {
      const int64_t M = min(chunk, M_total - m0);
      const Range rows = team.share(M);
      for (int64_t m = rows.begin; m < rows.end; ++m)
        normalise_row(a.x_dtype, offset(a.x_dtype, a.x, (m0 + m) * a.x_stride), a.norm_weight,
                      a.norm_bias, DType::f32, h + m * h_stride,
                      a.stats ? a.stats + 2 * (m0 + m) : nullptr, a.D, a.eps);
      team.sync();
      gemm(team, h, h_stride, M, fc1, scratch,
           StoreEpilogue{.bias = a.fc1_bias,
                         .activation = a.activation,
                         .y_dtype = DType::f32,
                         .y = hidden,
                         .y_stride = hidden_stride,
                         .pre_dtype = a.w_dtype,
                         .pre = a.pre,
                         .N = a.F,
                         .first_row = m0,
                         .dropout = a.dropout});
      team.sync();
      gemm(team, hidden, hidden_stride, M, fc2, scratch,
           ResidualEpilogue{.bias = a.fc2_bias,
                            .gamma = a.gamma,
                            .dtype = a.x_dtype,
                            .residual = a.x,
                            .residual_stride = a.x_stride,
                            .y = a.y,
                            .y_stride = a.D,
                            .N = a.D,
                            .dropout = a.dropout,
                            .path = a.path,
                            .S = a.S,
                            .first_row = m0});
      team.sync();
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
