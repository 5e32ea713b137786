// swiglu: y[m, :] = silu(x[m, :F]) * x[m, F:], one read of x and one write of y.
#include "kernels.hpp"
#include "math.hpp"
#include "parallel.hpp"

namespace vitkern::VITKERN_ISA {

void swiglu(const swiglu_args& a) {
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.M);
    for (int64_t m = rows.begin; m < rows.end; ++m)
      for (int64_t i = 0; i < a.F; i += Vec::kLanes) {
        const int64_t at = m * a.x_stride + i, left = a.F - i;
        const Vec gate = load_as(a.dtype, a.x, at, left);
        const Vec value = load_as(a.dtype, a.x, at + a.F, left);
        store_as(a.dtype, a.y, m * a.F + i, activate(Activation::silu, gate) * value, left);
      }
  });
}

}  // namespace vitkern::VITKERN_ISA
