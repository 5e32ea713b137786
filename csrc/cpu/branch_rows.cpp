// branch_rows: the ends of a residual branch where torch's GEMM computes its matmul. Forward,
// y = residual + drop_path(gamma * dropout(x + bias)) for x, the rows of the matmul; backward, the
// gradient of y through both masks (raw) and through gamma (scaled). One pass each.
#include "gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void branch_rows(const branch_rows_args& a) {
  const ResidualEpilogue join{.bias = a.bias,
                              .gamma = a.gamma,
                              .dtype = a.dtype,
                              .residual = a.residual,
                              .residual_stride = a.residual_stride,
                              .y = a.y,
                              .y_stride = a.N,
                              .N = a.N,
                              .dropout = a.dropout,
                              .path = a.path,
                              .S = a.S};
  const BranchGradient gradient{{a.dtype, a.grad, a.N}, a.N, a.S, a.dropout, a.path};
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.M);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      float* const x = a.x + m * a.N;
      if (a.y) {
        join(m, 0, a.N, x);
        continue;
      }
      gradient.row(m, x);
      if (!a.scaled) continue;
      for (int64_t i = 0; i < a.N; i += Vec::kLanes)
        (Vec::load(x + i, a.N - i) * Vec::load(a.gamma + i, a.N - i))
            .store(a.scaled + m * a.N + i, a.N - i);
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
