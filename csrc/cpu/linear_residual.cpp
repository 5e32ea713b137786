// linear_residual: y = residual + drop_path(gamma * dropout(x weight^T + bias))
// Everything after the matmul happens to accumulators on their way out: x and residual are read
// once.
#include "chunks.hpp"
#include "epilogue.hpp"
#include "kernels.hpp"
#include "rows.hpp"

namespace vitkern::VITKERN_ISA {

void linear_residual(const linear_residual_args& a) {
  const Weights w = operand_weights(a.w_dtype, a.weight, a.N, a.K, a.packed);
  const Rows x{a.x_dtype, a.x, a.x_stride};
  const bool in_place = Left::reads_in_place(a.x_dtype, a.x_stride);
  const ChunkedGemm chunks(a.threads, a.B * a.S, w, in_place);
  const auto epilogue_at = [&](int64_t m0) {
    return ResidualEpilogue{.bias = a.bias,
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
                            .first_row = m0};
  };
  run_team(a.threads, [&](const Team& team) {
    if (in_place)
      chunks.multiply_in_place(
          team, [&](int64_t m0) { return Left::in_place(x.row(m0), x.stride); }, epilogue_at);
    else
      chunks.multiply(team, [&](int64_t m, float* row) { widen_row(x, m, row, a.K); }, epilogue_at);
  });
}

}  // namespace vitkern::VITKERN_ISA
