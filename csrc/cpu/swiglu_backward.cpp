// swiglu_backward: both halves of dx in one read of grad and x.
#include "gradients.hpp"
#include "kernels.hpp"
#include "slopes.hpp"

namespace vitkern::VITKERN_ISA {

void swiglu_backward(const swiglu_backward_args& a) {
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.M);
    for (int64_t m = rows.begin; m < rows.end; ++m)
      for (int64_t i = 0; i < a.F; i += Vec::kLanes) {
        const int64_t at = m * a.x_stride + i, to = m * 2 * a.F + i, left = a.F - i;
        const Vec grad = load_as(a.dtype, a.grad, m * a.F + i, left);
        const Vec value = load_as(a.dtype, a.x, at + a.F, left);
        const auto [gate, slope] = silu_with_slope(load_as(a.dtype, a.x, at, left));
        store_as(a.dtype, a.dx, to, grad * value * slope, left);
        store_as(a.dtype, a.dx, to + a.F, grad * gate, left);
      }
  });
}

}  // namespace vitkern::VITKERN_ISA
