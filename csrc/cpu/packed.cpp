#include "packed.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace vitkern {
namespace {

constexpr uintptr_t kLine = 64;

size_t panel_bytes(const Layout& layout, DType dtype, const void* weight, int64_t N, int64_t K,
                   const float* scales) {
  size_t bytes = 0;
  Precision alike{};
  PanelForm form{};
  pack(layout.isa, {layout.precision, dtype, weight, scales, nullptr, N, K, &bytes, &alike, &form});
  return bytes;
}

}  // namespace

Layout engine_layout(Isa isa, Precision precision) {
  size_t bytes = 0;
  PanelForm form{};
  Layout layout{engine_isa(isa, precision), precision};
  const DType plain = precision == Precision::int8 ? DType::i8 : DType::f32;
  pack(layout.isa,
       {precision, plain, nullptr, nullptr, nullptr, 0, 0, &bytes, &layout.precision, &form});
  return layout;
}

PanelForm form_of(const Layout& layout) {
  size_t bytes = 0;
  Precision alike{};
  PanelForm form{};
  const DType plain = layout.precision == Precision::int8 ? DType::i8 : DType::f32;
  pack(layout.isa,
       {layout.precision, plain, nullptr, nullptr, nullptr, 0, 0, &bytes, &alike, &form});
  return form;
}

Layout operator_layout(Isa isa, DType weight) {
  const Precision precision = weight == DType::f32 ? Precision::fp32 : Precision::bf16;
  return engine_layout(operators_isa(isa, weight), precision);
}

Packed::Packed(const Layout& layout, DType dtype, const void* weight, int64_t N, int64_t K,
               const float* scales)
    : layout_(layout),
      precision_(packed_precision(layout.precision, dtype)),
      N_(N),
      K_(K),
      bytes_(panel_bytes(layout, dtype, weight, N, K, scales)) {
  const auto memory = std::make_shared<Pages>(bytes_);
  panels_ = memory->data();
  size_t bytes = 0;
  Precision alike{};
  PanelForm form{};
  pack(layout.isa,
       {layout.precision, dtype, weight, scales, memory->data(), N, K, &bytes, &alike, &form});
  owner_ = memory;
}

Packed::Packed(const Layout& layout, const void* panels, size_t bytes, int64_t N, int64_t K,
               std::shared_ptr<void> owner)
    : layout_(layout),
      precision_(layout.precision),
      N_(N),
      K_(K),
      // Any address will do: the weight is not read.
      bytes_(panel_bytes(layout, DType::f32, panels, N, K, nullptr)),
      owner_(std::move(owner)),
      panels_(panels) {
  if (bytes != bytes_)
    throw std::invalid_argument("vitkern: the panels of a weight (" + std::to_string(N) + ", " +
                                std::to_string(K) + ") have " + std::to_string(bytes_) +
                                " bytes, not " + std::to_string(bytes));
  if (reinterpret_cast<uintptr_t>(panels) % kLine)
    throw std::invalid_argument("vitkern: panels begin at a multiple of 64 bytes");
}

bool Packed::unpack(DType dtype, void* weight) const {
  bool known = false;
  vitkern::unpack(layout_.isa, {layout_.precision, dtype, panels(), weight, N_, K_, &known});
  return known;
}

}  // namespace vitkern
