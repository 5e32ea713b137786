#include "packed.hpp"

namespace vitkern {
namespace {

size_t panel_bytes(const Layout& layout, DType dtype, const void* weight, int64_t N, int64_t K,
                   const float* scales) {
  size_t bytes = 0;
  Precision alike{};
  pack(layout.isa, {layout.precision, dtype, weight, scales, nullptr, N, K, &bytes, &alike});
  return bytes;
}

}  // namespace

Layout engine_layout(Isa isa, Precision precision) {
  size_t bytes = 0;
  Layout layout{engine_isa(isa, precision), precision};
  const DType plain = precision == Precision::int8 ? DType::i8 : DType::f32;
  pack(layout.isa, {precision, plain, nullptr, nullptr, nullptr, 0, 0, &bytes, &layout.precision});
  return layout;
}

Layout operator_layout(Isa isa, DType weight) {
  const Precision precision = weight == DType::f32 ? Precision::fp32 : Precision::bf16;
  return engine_layout(operators_isa(isa), precision);
}

Packed::Packed(const Layout& layout, DType dtype, const void* weight, int64_t N, int64_t K,
               const float* scales)
    : layout_(layout),
      precision_(packed_precision(layout.precision, dtype)),
      N_(N),
      K_(K),
      bytes_(panel_bytes(layout, dtype, weight, N, K, scales)),
      memory_(bytes_) {
  size_t bytes = 0;
  Precision alike{};
  pack(layout.isa, {layout.precision, dtype, weight, scales, memory_.data(), N, K, &bytes, &alike});
}

bool Packed::unpack(DType dtype, void* weight) const {
  bool known = false;
  vitkern::unpack(layout_.isa, {layout_.precision, dtype, panels(), weight, N_, K_, &known});
  return known;
}

}  // namespace vitkern
