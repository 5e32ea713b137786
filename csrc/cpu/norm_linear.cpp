// norm_linear: y = activation(layernorm(x) weight^T + bias)
// The normalised rows are made once per chunk, in fp32 scratch that the GEMM reads; bias and
// activation are applied to accumulators on their way out. x is read once, y written once.
#include "arena.hpp"
#include "epilogue.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {

void norm_linear(const norm_linear_args& a) {
  const int64_t chunk = min(a.M, kChunkRows), h_stride = row_stride(a.K);
  const int64_t per_thread = gemm_scratch(chunk);
  const Lease lease((chunk * h_stride + a.threads * per_thread) * sizeof(float));
  float* const h = lease.floats();  // (chunk, K)
  const Weights w{a.w_dtype, a.weight, a.N, a.K, false};
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = h + chunk * h_stride + team.rank * per_thread;
    for (int64_t m0 = 0; m0 < a.M; m0 += chunk) {
      const int64_t M = min(chunk, a.M - m0);
      const Range rows = team.share(M);
      for (int64_t m = rows.begin; m < rows.end; ++m)
        normalise_row(a.x_dtype, offset(a.x_dtype, a.x, (m0 + m) * a.x_stride), a.norm_weight,
                      a.norm_bias, DType::f32, h + m * h_stride,
                      a.stats ? a.stats + 2 * (m0 + m) : nullptr, a.K, a.eps);
      team.sync();
      gemm(team, h, h_stride, M, w, scratch,
           StoreEpilogue{.bias = a.bias,
                         .activation = a.activation,
                         .y_dtype = a.w_dtype,
                         .y = const_cast<void*>(offset(a.w_dtype, a.y, m0 * a.N)),
                         .y_stride = a.N,
                         .pre_dtype = a.w_dtype,
                         .pre = a.pre,
                         .N = a.N,
                         .first_row = m0});
      team.sync();
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
