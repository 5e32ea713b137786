// pack: a weight (N, K) into the panels that the GEMM reads, [N / kNR][K][kNR], in fp32 or bf16;
// once per weight.
#include "arena.hpp"
#include "gemm.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void pack(const pack_args& a) {
  const int64_t panels = ceil_div(a.N, kNR);
  *a.bytes = static_cast<size_t>(panels * a.K * kNR) * (a.to == DType::f32 ? 4 : 2);
  if (!a.panels) return;
  const Weights w{a.from, a.weight, a.N, a.K, false};
  const Lease lease(static_cast<size_t>(a.K * kNR) * sizeof(float));
  for (int64_t panel = 0; panel < panels; ++panel) {
    convert_panel(w, panel, {0, a.K}, lease.floats());
    for (int64_t i = 0; i < a.K * kNR; i += Vec::kLanes)
      store_as(a.to, a.panels, panel * a.K * kNR + i, Vec::load(lease.floats() + i), Vec::kLanes);
  }
}

}  // namespace vitkern::VITKERN_ISA
