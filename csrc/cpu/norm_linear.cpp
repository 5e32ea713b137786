// norm_linear: y = activation(layernorm(x) weight^T + bias)
// The normalised rows are made once per chunk, in scratch that the GEMM reads; bias and activation
// are applied to accumulators on their way out. x is read once, y written once.
#include "arena.hpp"
#include "epilogue.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {

void norm_linear(const norm_linear_args& a) {
  const Weights w = plain_weights(a.w_dtype, a.weight, a.N, a.K);
  const int64_t chunk = min(a.M, kChunkRows), shared = Left::floats(chunk, a.K, w.precision);
  const int64_t for_gemm = gemm_scratch(chunk, a.K, w.precision),
                per_thread = for_gemm + row_stride(a.K);
  const Lease lease((shared + a.threads * per_thread) * sizeof(float));
  const Left h = Left::at(lease.floats(), a.K, w.precision);  // (chunk, K)
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = lease.floats() + shared + team.rank * per_thread;
    for (int64_t m0 = 0; m0 < a.M; m0 += chunk) {
      const int64_t M = min(chunk, a.M - m0);
      fill(team, h, M, a.K, scratch + for_gemm, [&](int64_t m, float* row) {
        normalise_row(a.x_dtype, offset(a.x_dtype, a.x, (m0 + m) * a.x_stride), a.norm_weight,
                      a.norm_bias, DType::f32, row, a.stats ? a.stats + 2 * (m0 + m) : nullptr, a.K,
                      a.eps);
      });
      void* const y = const_cast<void*>(offset(a.w_dtype, a.y, m0 * a.N));
      gemm(team, h, M, w, scratch,
           StoreEpilogue<Plain>{.bias = a.bias,
                                .activation = a.activation,
                                .y = {a.w_dtype, y, a.N},
                                .pre_dtype = a.w_dtype,
                                .pre = a.pre,
                                .N = a.N,
                                .first_row = m0});
      team.sync();
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
