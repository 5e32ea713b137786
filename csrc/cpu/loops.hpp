// Loops over vectors without masks: a number of elements, or a dtype, that the compiler knows in a
// loop that is written once, so that a vector needs neither a mask nor a branch by dtype.
#pragma once
#include "simd.hpp"

namespace {

template <int64_t kValue>
struct Count {
  constexpr operator int64_t() const { return kValue; }
};
template <DType kValue>
struct Type {
  constexpr operator DType() const { return kValue; }
};

// work(type): a Type.
template <class Work>
inline void with_type(DType dtype, const Work& work) {
  dtype == DType::f32 ? work(Type<DType::f32>{}) : work(Type<DType::bf16>{});
}

// work(i, count) for the vectors of n elements: count is a Count of all lanes but in the last one.
template <class Work>
inline void each_vector(int64_t n, const Work& work) {
  constexpr int64_t L = Vec::kLanes;
  int64_t i = 0;
  for (; i + L <= n; i += L) work(i, Count<L>{});
  if (i < n) work(i, n - i);
}

}  // namespace
