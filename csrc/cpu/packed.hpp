// A weight in the panels that the GEMM of an instruction set reads: packed once, then shared by the
// engines and the operators that compute with it.
#pragma once
#include <memory>

#include "arena.hpp"
#include "dispatch.hpp"

namespace vitkern {

// Equal layouts are the same panels, bit by bit.
struct Layout {
  Isa isa;              // whose kernels read the panels
  Precision precision;  // the first one of those that read these
  bool operator==(const Layout&) const = default;
};
Layout engine_layout(Isa isa, Precision precision);
Layout operator_layout(Isa isa, DType weight);
PanelForm form_of(const Layout& layout);

class Packed {
 public:
  Packed(const Layout& layout, DType dtype, const void* weight, int64_t N, int64_t K,
         const float* scales = nullptr);  // (N) of i8
  // Panels that another process packed, where they are, such as in a mapped file: `owner` keeps
  // their memory. Not of int8, whose panels no file holds.
  Packed(const Layout& layout, const void* panels, size_t bytes, int64_t N, int64_t K,
         std::shared_ptr<void> owner);
  // Writes (N, K) elements; or nothing, and returns false, where the panels do not hold the values.
  bool unpack(DType dtype, void* weight) const;

  const Layout& layout() const { return layout_; }
  Precision precision() const { return precision_; }  // fp32 for floats among the integers of int8
  const void* panels() const { return panels_; }
  size_t bytes() const { return bytes_; }
  int64_t N() const { return N_; }
  int64_t K() const { return K_; }

 private:
  Layout layout_;
  Precision precision_;
  int64_t N_, K_;
  size_t bytes_;
  std::shared_ptr<void> owner_;  // of the panels' memory
  const void* panels_;
};
using PackedPtr = std::shared_ptr<const Packed>;

}  // namespace vitkern
