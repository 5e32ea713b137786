// What the native tests share: counts, arrays in exact buffers, one case of the matrix.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/dispatch.hpp"

namespace native_test {

using vitkern::DType;
using vitkern::Isa;
using vitkern::Precision;

inline int failures = 0, checks = 0;

inline void expect(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

struct Random {  // a linear congruential generator: the same elements everywhere
  uint32_t state = 1;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
  }
};
inline Random uniform;

inline float to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}

// Elements of a run-time dtype, in a heap block of exactly their size.
struct Array {
  DType dtype;
  std::vector<float> f;
  std::vector<uint16_t> h;

  Array(DType type, int64_t n, bool fill = true) : dtype(type) {
    if (type == DType::f32)
      f.resize(n);
    else
      h.resize(n);
    for (int64_t i = 0; fill && i < n; ++i) {
      const float x = uniform();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (type == DType::f32)
        f[i] = x;
      else
        h[i] = static_cast<uint16_t>(bits >> 16);
    }
    f.shrink_to_fit();
    h.shrink_to_fit();
  }
  void* data() { return dtype == DType::f32 ? static_cast<void*>(f.data()) : h.data(); }
  double operator[](int64_t i) const { return dtype == DType::f32 ? f[i] : to_float(h[i]); }
};

struct Case {
  Isa isa;
  DType dtype;
  int threads;
  Precision precision() const { return dtype == DType::f32 ? Precision::fp32 : Precision::bf16; }
  std::string name(const char* kernel) const {
    return std::string(kernel) + " " + vitkern::isa_name(isa) +
           (dtype == DType::f32 ? " f32" : " bf16");
  }
};

using Doubles = std::vector<double>;

inline void check(const std::string& what, const Array& got, const Doubles& want) {
  // Factors of bf16 rows are rounded to bf16, too, where that is what is multiplied: a result in
  // fp32 shows it.
  const bool rounded = what.find("avx512_bf16 bf16") != std::string::npos;
  const double allowed = rounded ? 4e-2 : got.dtype == DType::f32 ? 2e-5 : 2e-2;
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double miss =
        std::fabs(got[static_cast<int64_t>(i)] - want[i]) / (1 + std::fabs(want[i]));
    worst = !(miss <= worst) ? miss : worst;  // a NaN sticks
  }
  expect(worst <= allowed, what + ": error " + std::to_string(worst));
}

constexpr vitkern::Dropout kOff{0, 0, 1};

// gradients_test.cpp
void test_gradients(const Case& c);

// engine_test.cpp
void test_engine(const Case& c, int64_t B);
void test_mixed_sizes(const Case& c);
void test_schedule();
void test_refusals(const Case& c);
void test_fingerprint();

// int8_test.cpp
void test_int8(const Case& c, int64_t M, int64_t K, int64_t N, bool largest);
void test_int8_refusals(const Case& c);

}  // namespace native_test
