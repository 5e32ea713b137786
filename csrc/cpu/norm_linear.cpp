// norm_linear: y = activation(layernorm(x) weight^T + bias)
// The normalised rows are made once per chunk, in scratch that the GEMM reads; bias and activation
// are applied to accumulators on their way out. x is read once, y written once.
#include "chunks.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "rows.hpp"

namespace vitkern::VITKERN_ISA {

void norm_linear(const norm_linear_args& a) {
  const Weights w = operand_weights(a.w_dtype, a.weight, a.N, a.K, a.packed);
  const Norm norm{.x = {a.x_dtype, a.x, a.x_stride},
                  .weight = a.norm_weight,
                  .bias = a.norm_bias,
                  .D = a.K,
                  .eps = a.eps,
                  .stats = a.stats};
  const ChunkedGemm chunks(a.threads, a.M, w);
  run_team(a.threads, [&](const Team& team) {
    chunks.multiply(
        team, [&](int64_t m, float* row) { norm.row(m, DType::f32, row); },
        [&](int64_t m0) {
          void* const y = const_cast<void*>(offset(a.w_dtype, a.y, m0 * a.N));
          return StoreEpilogue<Plain>{.bias = a.bias,
                                      .activation = a.activation,
                                      .y = {a.w_dtype, y, a.N},
                                      .pre_dtype = a.w_dtype,
                                      .pre = a.pre,
                                      .N = a.N,
                                      .first_row = m0};
        });
  });
}

}  // namespace vitkern::VITKERN_ISA
