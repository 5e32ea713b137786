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
  const Weights w = plain_weights(a.w_dtype, a.weight, a.N, a.K);
  const int64_t rows_total = a.B * a.S, chunk = min(rows_total, kChunkRows);
  const bool direct = Left::reads_in_place(a.x_dtype, a.x_stride);
  const int64_t copy = direct ? 0 : Left::floats(chunk, a.K, w.precision);
  const int64_t for_gemm = gemm_scratch(chunk, a.K, w.precision),
                per_thread = for_gemm + row_stride(a.K);
  const Lease lease((copy + a.threads * per_thread) * sizeof(float));
  const Left h = Left::at(lease.floats(), a.K, w.precision);  // (chunk, K)
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = lease.floats() + copy + team.rank * per_thread;
    for (int64_t m0 = 0; m0 < rows_total; m0 += chunk) {
      const int64_t M = min(chunk, rows_total - m0);
      const auto x = [&](int64_t m) { return offset(a.x_dtype, a.x, (m0 + m) * a.x_stride); };
      if (!direct)
        fill(team, h, M, a.K, scratch + for_gemm,
             [&](int64_t m, float* row) { widen_row(a.x_dtype, x(m), row, a.K); });
      gemm(team, direct ? Left::in_place(x(0), a.x_stride) : h, M, w, scratch,
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
