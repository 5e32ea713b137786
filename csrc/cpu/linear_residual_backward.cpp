// linear_residual_backward: one matmul for x, one for the weight and LayerScale together.
#include "branch_gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void linear_residual_backward(const linear_residual_backward_args& a) {
  const int64_t M = a.B * a.S;
  const Rows weight{a.w_dtype, a.weight, a.K};
  const Weights x = plain_factor(precision_of(a.w_dtype), {a.x_dtype, a.x, a.x_stride}, a.K, M);
  const BranchBackward branch(a.threads, {{a.y_dtype, a.grad, a.N}, a.N, a.S, a.dropout, a.path},
                              {weight, a.bias, a.gamma, M, a.N, a.K}, x,
                              {a.dweight, a.dbias, a.dgamma});
  const InputGradient input(a.threads, branch.scaled(), a.dx ? M : 0, weight, a.N, a.K);
  run_team(a.threads, [&](const Team& team) {
    branch.prepare(team);
    input.run(team, [&](int64_t m0) { return StoreRows{{a.x_dtype, a.dx, a.K}, m0}; });
    branch.run_weight(team);
  });
}

}  // namespace vitkern::VITKERN_ISA
