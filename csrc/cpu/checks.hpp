// What a kernel may rely on, checked at every call in a few nanoseconds: no negative size, no count
// or offset that overflows, no null where there is something to read or write, no unknown enum
// value. Whether the memory behind an address is as large as the sizes say, only the caller knows.
#pragma once
#include <initializer_list>
#include <string>

#include "kernels.hpp"

namespace vitkern {

struct Axis {
  int64_t size, stride;
};

// Throws std::invalid_argument, or std::overflow_error for what no machine can hold.
class Check {
 public:
  explicit Check(const char* kernel) : kernel_(kernel) {}

  void threads(int n) const;
  void size(const char* name, int64_t n, int64_t least = 0) const;
  void multiple(const char* name, int64_t n, const char* of, int64_t unit) const;
  // The elements of an array of these sizes.
  int64_t count(const char* name, std::initializer_list<int64_t> sizes) const;
  void array(const char* name, const void* data, int64_t element, const Axis* axes,
             size_t count) const;
  // (sizes) contiguous, or by strides; null only if it is empty.
  void array(const char* name, const void* data, int64_t element,
             std::initializer_list<Axis> axes) const {
    array(name, data, element, axes.begin(), axes.size());
  }
  void array(const char* name, const void* data, int64_t element,
             std::initializer_list<int64_t> sizes) const;
  template <class Axes = std::initializer_list<int64_t>>
  void optional(const char* name, const void* data, int64_t element, Axes axes) const {
    if (data) array(name, data, element, axes);
  }

  void dtype(const char* name, DType value) const { choice(name, value, DType::bf16); }
  void image_dtype(DType value) const { choice("image_dtype", value, DType::u8); }
  void activation(Activation value) const { choice("activation", value, Activation::tanh); }
  void precision(Precision value) const { choice("precision", value, Precision::int8); }
  void norm(NormKind value) const { choice("norm", value, NormKind::rms); }
  void order(Order value) const { choice("order", value, Order::parallel); }
  void pool(Pool value) const { choice("pool", value, Pool::mean); }
  void pixels(const float* mean, const float* std, int64_t channels) const;

  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void too_large(const std::string& what) const;

 private:
  template <class Enum>
  void choice(const char* name, Enum value, Enum last) const {
    if (value < Enum{} || value > last) unknown(name, static_cast<int64_t>(value));
  }
  [[noreturn]] void unknown(const char* name, int64_t value) const;

  const char* kernel_;
};

constexpr int64_t bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::bf16 ? 2 : 1;
}

#define VITKERN_KERNEL(kernel) void check(const kernel##_args& a);
#include "kernels.inc"

}  // namespace vitkern
