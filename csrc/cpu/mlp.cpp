// mlp: y = x + drop_path(gamma * dropout(fc2(dropout(activation(fc1(layernorm(x)))))))
// One read and one write of x; how the F-wide rows stay in cache is in mlp.hpp.
#include "mlp.hpp"

#include "arena.hpp"

namespace vitkern::VITKERN_ISA {

void mlp(const mlp_args& a) {
  const MlpScratch n(a.B * a.S, a.D, a.F, precision_of(a.w_dtype), a.threads);
  const Mlp mlp{.a = a,
                .y_stride = a.D,
                .fc1 = operand_weights(a.w_dtype, a.fc1_weight, a.F, a.D, a.packed),
                .fc2 = operand_weights(a.w_dtype, a.fc2_weight, a.D, a.F, a.packed),
                .n = n};
  const Lease lease((n.shared + a.threads * n.per_thread) * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    mlp.run(team, lease.floats(), lease.floats() + n.shared + team.rank * n.per_thread);
  });
}

}  // namespace vitkern::VITKERN_ISA
