// layernorm: y[m, :] = (x[m, :] - mean) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)
// One read and one write of x (rows.hpp); rows are shared out evenly.
#include "kernels.hpp"
#include "rows.hpp"

namespace vitkern::VITKERN_ISA {

void layernorm(const layernorm_args& a) {
  const Norm norm{.x = {a.dtype, a.x, a.x_stride},
                  .weight = a.weight,
                  .bias = a.bias,
                  .D = a.D,
                  .eps = a.eps,
                  .stats = a.stats};
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.M);
    for (int64_t m = rows.begin; m < rows.end; ++m)
      norm.row(m, a.dtype, const_cast<void*>(offset(a.dtype, a.y, m * a.D)));
  });
}

}  // namespace vitkern::VITKERN_ISA
