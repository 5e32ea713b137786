// layernorm_backward: rows of dx by all threads, then the vectors' gradients, columns shared out.
#include "gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void layernorm_backward(const layernorm_backward_args& a) {
  const NormGradient norm{{a.dtype, a.x, a.x_stride}, a.stats, a.weight, a.D};
  const Rows grad{a.dtype, a.grad, a.D};
  const int64_t room = row_stride(a.D);
  const Lease lease(a.threads * room * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const dy = lease.floats() + team.rank * room;
    const Range rows = team.share(a.dx ? a.M : 0);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      widen_row(grad, m, dy, a.D);
      norm.row(m, dy, nullptr, {a.dtype, a.dx, a.D});
    }
    norm.vectors(team, grad, a.M, a.dweight, a.dbias);
  });
}

}  // namespace vitkern::VITKERN_ISA
