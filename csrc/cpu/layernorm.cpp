// layernorm: y[m, :] = (x[m, :] - mean) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)
// One read and one write of x (rows.hpp); rows are shared out evenly.
#include "kernels.hpp"
#include "rows.hpp"

namespace vitkern::VITKERN_ISA {

void layernorm(const layernorm_args& a) {
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.M);
    for (int64_t m = rows.begin; m < rows.end; ++m)
      normalise_row(a.dtype, offset(a.dtype, a.x, m * a.x_stride), a.weight, a.bias, a.dtype,
                    const_cast<void*>(offset(a.dtype, a.y, m * a.D)),
                    a.stats ? a.stats + 2 * m : nullptr, a.D, a.eps);
  });
}

}  // namespace vitkern::VITKERN_ISA
