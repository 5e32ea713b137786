// What happens to a row of a GEMM's result on its way to memory.
#pragma once
#include <type_traits>

#include "math.hpp"
#include "parallel.hpp"
#include "philox.hpp"
#include "scratch.hpp"

namespace {

// Where an epilogue touches memory, it asks for the row so many below: the hardware sees no stream
// in a panel's rows, which are a whole row of the matrix from each other.
constexpr int64_t kRowsAhead = 6;

// Rows of a run-time dtype, where an epilogue stores what a caller sees. Left (gemm.hpp) is the
// other target: what the next GEMM reads.
struct Plain {
  DType dtype;
  void* data;
  int64_t stride;
  void store(int64_t m, int64_t k, Vec v, int64_t n) const {
    store_as(dtype, data, m * stride + k, v, n);
  }
#if defined(VITKERN_AMX)
  // Columns k .. k + 32 of the rows m and m + 1.
  [[gnu::always_inline]] void store_two(int64_t m, int64_t k, const Vec (&v)[2][2]) const {
    for (int64_t r = 0; r < 2; ++r) {
      void* const to = const_cast<void*>(at(m + r, k));
      if (dtype == DType::bf16) {
        _mm512_storeu_si512(to, bf16_pair(v[r][0], v[r][1]));
      } else {
        v[r][0].store(static_cast<float*>(to));
        v[r][1].store(static_cast<float*>(to) + Vec::kLanes);
      }
    }
  }
  void expect(int64_t m, int64_t k) const {
    __builtin_prefetch(at(m, k), 1);
    if (dtype == DType::f32) __builtin_prefetch(at(m, k + kLine), 1);
  }
#endif
  const void* at(int64_t m, int64_t k) const { return offset(dtype, data, m * stride + k); }
};

// y = dropout(activation(c + bias)), and c + bias itself when a backward wants it. Rows of y count
// from m, those of pre (and the dropout's element index, row * N + column) from first_row + m.
template <class Target>
struct StoreEpilogue {
  const float* bias;
  Activation activation;
  Target y;
  DType pre_dtype = DType::f32;
  void* pre = nullptr;  // (rows, N)
  int64_t N = 0, first_row = 0, first_column = 0;
  Dropout dropout = {};

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t element = (first_row + m) * N + first_column + n0;
    for (int64_t i = 0; i < n; i += kLine) {
      if (pre) __builtin_prefetch(offset(pre_dtype, pre, element + kRowsAhead * N + i), 1);
      if constexpr (std::is_same_v<Target, Plain>)
        __builtin_prefetch(y.at(m + kRowsAhead, n0 + i), 1);
    }
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      Vec v = Vec::load(c + i, n - i);
      if (bias) v = v + Vec::load(bias + n0 + i, n - i);
      if (pre) store_as(pre_dtype, pre, element + i, v, n - i);
      v = activate(activation, v);
      if (dropout.threshold)
        v.store(c + i, n - i);
      else
        y.store(m, n0 + i, v, n - i);
    }
    if (!dropout.threshold) return;
    drop(dropout, kHidden, static_cast<uint64_t>(element), c, n);
    for (int64_t i = 0; i < n; i += Vec::kLanes) y.store(m, n0 + i, Vec::load(c + i, n - i), n - i);
  }

  // What happens to nearly all rows: whole vectors, column by column, without masks. Returns false
  // where that cannot be done.
  template <int64_t kNR>
  bool rows(Range rows, int64_t n0, int64_t n, const float* c) const {
    if (dropout.threshold || n != kNR) return false;
    const Target to = y;
    const int64_t element = first_row * N + first_column + n0;      // of row 0
    for (int64_t m = rows.end; m < 2 * rows.end - rows.begin; ++m)  // the tile below
      for (int64_t i = 0; i < kNR; i += kLine) {
        if (pre) __builtin_prefetch(offset(pre_dtype, pre, element + m * N + i), 1);
        if constexpr (std::is_same_v<Target, Plain>) __builtin_prefetch(to.at(m, n0 + i), 1);
      }
    with_activation(activation, [&](const auto& activated) {
#pragma GCC unroll 1
      for (int64_t i = 0; i < kNR; i += Vec::kLanes) {
        const Vec shift = bias ? Vec::load(bias + n0 + i) : Vec::set(0);
        for (int64_t m = rows.begin; m < rows.end; ++m) {
          const Vec v = Vec::load(c + (m - rows.begin) * kNR + i) + shift;
          if (pre) store_as(pre_dtype, pre, element + m * N + i, v, Vec::kLanes);
          to.store(m, n0 + i, activated(v), Vec::kLanes);
        }
      }
    });
    return true;
  }

#if defined(VITKERN_AMX)
  // The rows m and m + 1, m even, of 32 columns: what stands between two steps of the tile unit.
  // Returns false where that cannot be done.
  [[gnu::always_inline]] bool two_rows(int64_t m, int64_t n0, const float* c) const {
    if (dropout.threshold || pre) return false;
    constexpr int64_t L = Vec::kLanes;
    with_activation(activation, [&](const auto& activated) __attribute__((always_inline)) {
      const Vec low = bias ? Vec::load(bias + n0) : Vec::set(0);
      const Vec high = bias ? Vec::load(bias + n0 + L) : Vec::set(0);
      const Vec v[2][2] = {
          {activated(Vec::load(c) + low), activated(Vec::load(c + L) + high)},
          {activated(Vec::load(c + 2 * L) + low), activated(Vec::load(c + 3 * L) + high)}};
      y.store_two(m, n0, v);
    });
    return true;
  }
  // The rows m and m + 1 come next: their memory into L1.
  void expect(int64_t m, int64_t n0) const {
    if constexpr (std::is_same_v<Target, Plain>) y.expect(m, n0), y.expect(m + 1, n0);
  }
#endif
};

// For a GEMM whose K is cut into parts: adds the results up in `sums`.
struct SumEpilogue {
  float* sums;
  int64_t stride;
  bool first;

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    float* const row = sums + m * stride + n0;
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      const Vec v = Vec::load(c + i, n - i);
      (first ? v : Vec::load(row + i, n - i) + v).store(row + i, n - i);
    }
  }
};

// y = residual + path * gamma * dropout(c + bias); y may be the residual itself, which may be null.
struct ResidualEpilogue {
  const float* bias;
  const float* gamma;
  DType dtype;
  const void* residual;
  int64_t residual_stride;
  void* y;
  int64_t y_stride;
  int64_t N;
  Dropout dropout = {}, path = {};
  int64_t S = 1, first_row = 0;  // row first_row + m belongs to sample (first_row + m) / S

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t row = first_row + m;
    for (int64_t i = 0; i < n && residual; i += kLine)
      __builtin_prefetch(offset(dtype, residual, (row + kRowsAhead) * residual_stride + n0 + i));
    if (dropout.threshold) {
      if (bias)
        for (int64_t i = 0; i < n; ++i) c[i] += bias[n0 + i];
      drop(dropout, kElements, static_cast<uint64_t>(row * N + n0), c, n);
    }
    const float factor = path_factor(path, row / S);
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      Vec v = Vec::load(c + i, n - i);
      if (bias && !dropout.threshold) v = v + Vec::load(bias + n0 + i, n - i);
      if (gamma) v = v * Vec::load(gamma + n0 + i, n - i);
      if (factor == 0)
        v = Vec::set(0);  // a dropped branch is gone even where it is not finite
      else if (factor != 1)
        v = v * Vec::set(factor);
      if (residual) v = load_as(dtype, residual, row * residual_stride + n0 + i, n - i) + v;
      store_as(dtype, y, row * y_stride + n0 + i, v, n - i);
    }
  }

  // As StoreEpilogue's.
  template <int64_t kNR>
  bool rows(Range rows, int64_t n0, int64_t n, const float* c) const {
    if (n != kNR || !is_plain_sum()) return false;
    const auto* const from = static_cast<const float*>(residual) + first_row * residual_stride + n0;
    float* const to = static_cast<float*>(y) + first_row * y_stride + n0;
    for (int64_t m = rows.end; m < 2 * rows.end - rows.begin; ++m)
      for (int64_t i = 0; i < kNR; i += kLine) __builtin_prefetch(from + m * residual_stride + i);
#pragma GCC unroll 1
    for (int64_t i = 0; i < kNR; i += Vec::kLanes) {
      const Vec shift = bias ? Vec::load(bias + n0 + i) : Vec::set(0);
      const Vec factor = gamma ? Vec::load(gamma + n0 + i) : Vec::set(1);
      for (int64_t m = rows.begin; m < rows.end; ++m) {
        const Vec v = (Vec::load(c + (m - rows.begin) * kNR + i) + shift) * factor;
        (Vec::load(from + m * residual_stride + i) + v).store(to + m * y_stride + i);
      }
    }
    return true;
  }

#if defined(VITKERN_AMX)
  // As StoreEpilogue's.
  [[gnu::always_inline]] bool two_rows(int64_t m, int64_t n0, const float* c) const {
    if (!is_plain_sum()) return false;
    constexpr int64_t L = Vec::kLanes;
    const float* from = static_cast<const float*>(residual) + (first_row + m) * residual_stride;
    float* to = static_cast<float*>(y) + (first_row + m) * y_stride;
    for (int64_t i = n0; i < n0 + 2 * L; i += L, c += L) {
      const Vec shift = bias ? Vec::load(bias + i) : Vec::set(0);
      const Vec factor = gamma ? Vec::load(gamma + i) : Vec::set(1);
      const Vec first = (Vec::load(c) + shift) * factor;
      const Vec second = (Vec::load(c + 2 * L) + shift) * factor;
      (Vec::load(from + i) + first).store(to + i);
      (Vec::load(from + residual_stride + i) + second).store(to + y_stride + i);
    }
    return true;
  }
  void expect(int64_t m, int64_t n0) const {
    if (!residual) return;
    for (int64_t row = first_row + m; row < first_row + m + 2; ++row)
      for (int64_t i = 0; i < 2 * kLine; i += kLine)
        __builtin_prefetch(offset(dtype, residual, row * residual_stride + n0 + i));
  }
#endif

 private:
  bool is_plain_sum() const {
    return residual && dtype == DType::f32 && !dropout.threshold && !path.threshold;
  }
};

}  // namespace
