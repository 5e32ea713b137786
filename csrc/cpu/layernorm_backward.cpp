// layernorm_backward: one pass over the rows of grad and x gives dx, both vectors' gradients and,
// where a weight's gradient needs them, the normalised rows again.
#include "kernels.hpp"
#include "norm_gradients.hpp"

namespace vitkern::VITKERN_ISA {

void layernorm_backward(const layernorm_backward_args& a) {
  const NormGradient norm{{a.dtype, a.x, a.x_stride}, a.stats, a.weight, a.D};
  const Rows grad{a.grad_dtype, a.grad, a.D}, onto{a.dtype, a.onto, a.D};
  const Plain y{DType::f32, a.y, a.D};
  const PartialSums sums(a.dweight || a.dbias ? a.M : 0, a.D, 2);
  const int64_t room = row_stride(a.D);
  const Lease lease(a.threads * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const widened = lease.floats() + team.rank * room;
    PartialSums::each_part(team, a.M, [&](int64_t part, Range rows) {
      NormRow<Plain> made{.onto = a.onto ? &onto : nullptr,
                          .dx = a.dx,
                          .dweight = a.dweight ? sums.of(part, 0) : nullptr,
                          .dbias = a.dbias ? sums.of(part, 1) : nullptr,
                          .y = a.y ? &y : nullptr,
                          .bias = a.bias};
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        const float* dy = static_cast<const float*>(grad.row(m));
        if (a.grad_dtype != DType::f32) widen_row(grad, m, widened, a.D), dy = widened;
        made.first = m == rows.begin;
        norm.visit(m, dy, made);
      }
    });
    team.sync();
    if (a.dweight) sums.finish(team, 0, a.dweight);
    if (a.dbias) sums.finish(team, 1, a.dbias);
  });
}

}  // namespace vitkern::VITKERN_ISA
