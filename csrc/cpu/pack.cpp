// pack: a weight (N, K) into the panels that the GEMM reads; once per weight.
#include "gemm.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

void pack(const pack_args& a) {
  const Precision precision = packed_precision(a.precision, a.dtype);
  *a.bytes = static_cast<size_t>(packed_bytes(a.N, a.K, precision));
  *a.layout = first_alike(precision);
  *a.form = panel_form(precision);
  if (!a.panels) return;
  Weights w{precision, a.dtype, a.weight, a.N, a.K, false};
  w.scales = a.scales;
  for (int64_t panel = 0; panel < ceil_div(a.N, kNR); ++panel) pack_panel(w, panel, a.panels);
}

}  // namespace vitkern::VITKERN_ISA
