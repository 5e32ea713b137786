// norm_linear_backward: the activation's slope turns grad into g, then norm_gradients.hpp.
#include "kernels.hpp"
#include "norm_gradients.hpp"
#include "slopes.hpp"

namespace vitkern::VITKERN_ISA {

void norm_linear_backward(const norm_linear_backward_args& a) {
  const Rows grad{a.w_dtype, a.grad, a.N}, pre{a.w_dtype, a.pre, a.N};
  const bool active = a.activation != Activation::none;
  const int64_t stride = row_stride(a.N);
  const Lease lease(active ? a.M * stride * sizeof(float) : 0);
  const Rows g = active ? as_rows(lease.floats(), stride) : grad;
  const NormGradient norm{{a.x_dtype, a.x, a.x_stride}, a.stats, a.norm_weight, a.K};
  const NormLinearBackward backward(a.threads, g, norm, a.norm_bias, {a.w_dtype, a.weight, a.K},
                                    a.M, a.N, nullptr,
                                    {a.dx, a.dnorm_weight, a.dnorm_bias, a.dweight, a.dbias});
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(active ? a.M : 0);
    for (int64_t m = rows.begin; m < rows.end; ++m)
      with_slope(a.activation, [&](const auto& activated) {
        each_vector(a.N, [&](int64_t i, auto n) {
          const Vec dy = load_as(grad.dtype, grad.data, m * a.N + i, n);
          const Vec slope = activated(load_as(pre.dtype, pre.data, m * a.N + i, n)).slope;
          (dy * slope).store(lease.floats() + m * stride + i, n);
        });
      });
    team.sync();
    backward.run(team);
  });
}

}  // namespace vitkern::VITKERN_ISA
