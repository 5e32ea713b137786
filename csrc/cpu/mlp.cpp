// mlp: y = x + drop_path(gamma * dropout(fc2(dropout(activation(fc1(layernorm(x)))))))
// One read and one write of x; how the F-wide rows stay in cache is in mlp.hpp.
#include "mlp.hpp"

#include "chunks.hpp"

namespace vitkern::VITKERN_ISA {

void mlp(const mlp_args& a) {
  const MlpScratch n(a.B * a.S, a.D, a.F, precision_of(a.w_dtype), a.threads);
  const CallPanels fc1(operand_weights(a.w_dtype, a.fc1_weight, a.F, a.D, a.packed));
  const CallPanels fc2(operand_weights(a.w_dtype, a.fc2_weight, a.D, a.F, a.packed));
  const Mlp mlp{.a = a, .y_stride = a.D, .fc1 = fc1.weights(), .fc2 = fc2.weights(), .n = n};
  const Lease lease((n.shared + a.threads * n.per_thread) * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    fc1.pack(team);
    fc2.pack(team);
    mlp.run(team, lease.floats(), lease.floats() + n.shared + team.rank * n.per_thread);
  });
}

}  // namespace vitkern::VITKERN_ISA
