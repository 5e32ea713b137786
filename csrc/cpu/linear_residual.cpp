// linear_residual: y = residual + drop_path(gamma * dropout(x weight^T + bias))
// Everything after the product happens to accumulators on their way out: x and residual are read
// once.
#include "arena.hpp"
#include "epilogue.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {

void linear_residual(const linear_residual_args& a) {
  const int64_t rows_total = a.B * a.S, chunk = min(rows_total, kChunkRows),
                h_stride = row_stride(a.K);
  // The GEMM reads fp32 rows in place, unless their distance is one that row_stride() avoids.
  const bool direct = a.x_dtype == DType::f32 && a.x_stride % kAliasing != 0;
  const int64_t copy = direct ? 0 : chunk * h_stride;
  const int64_t per_thread = gemm_scratch(chunk);
  const Lease lease((copy + a.threads * per_thread) * sizeof(float));
  const Weights w{a.w_dtype, a.weight, a.N, a.K, false};
  run_team(a.threads, [&](const Team& team) {
    float* const h = lease.floats();
    float* const scratch = h + copy + team.rank * per_thread;
    for (int64_t m0 = 0; m0 < rows_total; m0 += chunk) {
      const int64_t M = min(chunk, rows_total - m0);
      if (!direct) {
        const Range rows = team.share(M);
        for (int64_t m = rows.begin; m < rows.end; ++m)
          widen_row(a.x_dtype, offset(a.x_dtype, a.x, (m0 + m) * a.x_stride), h + m * h_stride,
                    a.K);
        team.sync();
      }
      const float* A = direct ? static_cast<const float*>(a.x) + m0 * a.x_stride : h;
      gemm(team, A, direct ? a.x_stride : h_stride, M, w, scratch,
           ResidualEpilogue{.bias = a.bias,
                            .gamma = a.gamma,
                            .dtype = a.y_dtype,
                            .residual = a.residual,
                            .residual_stride = a.residual_stride,
                            .y = a.y,
                            .y_stride = a.N,
                            .N = a.N,
                            .dropout = a.dropout,
                            .path = a.path,
                            .S = a.S,
                            .first_row = m0});
      team.sync();
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
