// layernorm_backward: one pass over the rows of grad and x gives dx, both vectors' gradients and,
// where a weight's gradient needs them, the normalised rows again.
#include "gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void layernorm_backward(const layernorm_backward_args& a) {
  const NormGradient norm{{a.dtype, a.x, a.x_stride}, a.stats, a.weight, a.D};
  const Rows grad{a.grad_dtype, a.grad, a.D}, onto{a.dtype, a.onto, a.D};
  const bool vectors = a.dweight || a.dbias;
  const PartialSums sums(vectors ? a.M : 0, a.D, 2);
  const int64_t room = row_stride(a.D);
  const Lease lease(2 * a.threads * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const widened = lease.floats() + 2 * team.rank * room;
    float* const with = widened + room;  // dy * xhat
    PartialSums::each_part(team, a.M, [&](int64_t part, Range rows) {
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        const float* dy = static_cast<const float*>(grad.row(m));
        if (a.grad_dtype != DType::f32) widen_row(grad, m, widened, a.D), dy = widened;
        if (a.dx) norm.row(m, dy, a.onto ? &onto : nullptr, {a.dtype, a.dx, a.D});
        if (a.dbias) sums.add(part, m == rows.begin, 0, dy);
        if (a.dweight) {
          for (int64_t i = 0; i < a.D; i += Vec::kLanes)
            (Vec::load(dy + i, a.D - i) * norm.normalised(m, i)).store(with + i, a.D - i);
          sums.add(part, m == rows.begin, 1, with);
        }
        if (a.y) norm.output(m, a.bias, Plain{DType::f32, a.y, a.D});  // last: y may be grad
      }
    });
    team.sync();
    if (a.dbias) sums.finish(team, 0, a.dbias);
    if (a.dweight) sums.finish(team, 1, a.dweight);
  });
}

}  // namespace vitkern::VITKERN_ISA
