// mlp_backward: the branch's gradient through fc2, the activation, fc1 and the norm. The hidden
// rows are computed again from `pre` in the epilogue that turns their gradient into that of `pre`.
#include "branch_gradients.hpp"
#include "kernels.hpp"
#include "norm_gradients.hpp"
#include "slopes.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

// c is the gradient of the hidden rows, after their dropout.
struct HiddenEpilogue {
  const mlp_backward_args& a;
  Plain dpre;              // (M, F)
  const StepRows* hidden;  // (M, F) or null
  int64_t first_row;

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t row = first_row + m, element = row * a.F + n0;
    for (int64_t i = 0; i < n; i += kLine) {
      __builtin_prefetch(offset(a.w_dtype, a.pre, element + kRowsAhead * a.F + i), 0);
      __builtin_prefetch(dpre.at(row + kRowsAhead, n0 + i), 1);
      if (hidden) __builtin_prefetch(hidden->at(row + kRowsAhead, n0 + i), 1);
    }
    drop(a.dropout, kHidden, static_cast<uint64_t>(element), c, n);
    with_slope(a.activation, [&](const auto& activated) {
      with_type(a.w_dtype, [&](auto type) {
        each_vector(n, [&](int64_t i, auto count) {
          const auto [value, slope] = activated(load_as(type, a.pre, element + i, count));
          store_as(kFactorDtype, dpre.data, row * dpre.stride + n0 + i,
                   Vec::load(c + i, count) * slope, count);
          if (hidden && !a.dropout.threshold)
            hidden->store(row, n0 + i, value, count);
          else
            value.store(c + i, count);
        });
      });
    });
    if (!hidden || !a.dropout.threshold) return;
    drop(a.dropout, kHidden, static_cast<uint64_t>(element), c, n);
    each_vector(n, [&](int64_t i, auto count) {
      hidden->store(row, n0 + i, Vec::load(c + i, count), count);
    });
  }
};

}  // namespace

void mlp_backward(const mlp_backward_args& a) {
  const int64_t M = a.B * a.S, stride = row_stride(a.F),
                bytes = M * stride * bytes_of(kFactorDtype);
  const Rows grad{a.x_dtype, a.grad, a.D}, fc2{a.w_dtype, a.fc2_weight, a.F};
  const BranchGradients of_fc2{a.dfc2_weight, a.dfc2_bias, a.dgamma};
  const NormLinearGradients of_fc1{a.dx, a.dnorm_weight, a.dnorm_bias, a.dfc1_weight, a.dfc1_bias};
  const bool through = of_fc1.of_input() || of_fc1.dweight || of_fc1.dbias;
  const bool back = through || of_fc2.of_weight();  // the hidden rows are wanted, or their gradient
  const Lease dpre_rows(back ? bytes : 0);
  const Plain dpre{kFactorDtype, dpre_rows.floats(), stride};
  const StepRows hidden(precision_of(a.w_dtype), of_fc2.of_weight() ? M : 0, a.F);

  const BranchBackward branch(a.threads, {grad, a.D, a.S, a.dropout, a.path},
                              {fc2, a.fc2_bias, a.gamma, M, a.D, a.F}, hidden.factor(), of_fc2);
  const InputGradient to_hidden(a.threads, branch.scaled(), back ? M : 0, fc2, a.D, a.F);
  const NormGradient norm{{a.x_dtype, a.x, a.x_stride}, a.stats, a.norm_weight, a.D};
  const NormLinearBackward first_half(a.threads, {dpre.dtype, dpre.data, stride}, norm, a.norm_bias,
                                      {a.w_dtype, a.fc1_weight, a.D}, M, a.F, &grad, of_fc1);
  run_team(a.threads, [&](const Team& team) {
    branch.prepare(team);
    to_hidden.run(team, [&](int64_t m0) {
      return HiddenEpilogue{a, dpre, of_fc2.of_weight() ? &hidden : nullptr, m0};
    });
    branch.run_weight(team);
    if (through) first_half.run(team);
  });
}

}  // namespace vitkern::VITKERN_ISA
