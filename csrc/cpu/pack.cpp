// pack: a weight (N, K) into the panels that the GEMM reads, [N / kNR][K][kNR], in fp32 or bf16;
// once per weight.
#include "gemm.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void pack(const pack_args& a) {
  const int64_t panels = ceil_div(a.N, kNR);
  *a.bytes = static_cast<size_t>(panels * a.K * kNR) * (a.to == DType::f32 ? 4 : 2);
  if (!a.panels) return;
  const Weights w{a.from, a.weight, a.N, a.K, false};
  float block[kKC * kNR];
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t k0 = 0; k0 < a.K; k0 += kKC) {
      const int64_t K = min(kKC, a.K - k0);
      panel_block(w, panel, k0, K, block);
      for (int64_t i = 0; i < K * kNR; i += Vec::kLanes)
        store_as(a.to, a.panels, (panel * a.K + k0) * kNR + i, Vec::load(block + i), Vec::kLanes);
    }
}

}  // namespace vitkern::VITKERN_ISA
