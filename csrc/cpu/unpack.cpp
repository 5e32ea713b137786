// unpack: the weight (N, K) of which pack made panels, panel by panel.
#include "gemm.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void unpack(const unpack_args& a) {
  *a.known = kUnpacks;
  if constexpr (kUnpacks) {
    const Weights w{a.precision, a.dtype, a.panels, a.N, a.K, true};
    for (int64_t panel = 0; panel < ceil_div(a.N, kNR); ++panel) unpack_panel(w, panel, a.weight);
  }
}

}  // namespace vitkern::VITKERN_ISA
