// What happens to a row of a GEMM's result on its way to memory.
#pragma once
#include <type_traits>

#include "math.hpp"
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
    if (!dropout.threshold && n % Vec::kLanes == 0) return store_whole(m, n0, n, c, element);
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

 private:
  // What happens to nearly all rows: whole vectors, one after another without a mask.
  void store_whole(int64_t m, int64_t n0, int64_t n, const float* c, int64_t element) const {
    const Target to = y;
    const float* const shift = bias ? bias + n0 : nullptr;
    with_activation(activation, [&](const auto& activated) {
      for (int64_t i = 0; i < n; i += Vec::kLanes) {
        const Vec v = shift ? Vec::load(c + i) + Vec::load(shift + i) : Vec::load(c + i);
        if (pre) store_as(pre_dtype, pre, element + i, v, Vec::kLanes);
        to.store(m, n0 + i, activated(v), Vec::kLanes);
      }
    });
  }
};

// For a GEMM whose K is cut into parts: the results of all parts but the last are added up in
// `sums`; the last one's epilogue adds them.
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
  const float* sums = nullptr;   // what SumEpilogue left, or null
  int64_t sums_stride = 0;

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t row = first_row + m;
    for (int64_t i = 0; i < n && residual; i += kLine)
      __builtin_prefetch(offset(dtype, residual, (row + kRowsAhead) * residual_stride + n0 + i));
    if (sums)
      for (int64_t i = 0; i < n; i += Vec::kLanes)
        (Vec::load(sums + m * sums_stride + n0 + i, n - i) + Vec::load(c + i, n - i))
            .store(c + i, n - i);
    if (dropout.threshold) {
      if (bias)
        for (int64_t i = 0; i < n; ++i) c[i] += bias[n0 + i];
      drop(dropout, kElements, static_cast<uint64_t>(row * N + n0), c, n);
    }
    const float factor = path_factor(path, row / S);
    const bool whole = n % Vec::kLanes == 0 && factor == 1 && !dropout.threshold && bias;
    if (whole && dtype == DType::f32 && residual) return add_whole(row, n0, n, c);
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

 private:
  // What an inference does to nearly all rows, without a branch in the loop.
  void add_whole(int64_t row, int64_t n0, int64_t n, const float* c) const {
    const float* const shift = bias + n0;
    const float* const factors = gamma ? gamma + n0 : nullptr;
    const auto* const from = static_cast<const float*>(residual) + row * residual_stride + n0;
    float* const to = static_cast<float*>(y) + row * y_stride + n0;
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      const Vec v = Vec::load(c + i) + Vec::load(shift + i);
      (Vec::load(from + i) + (factors ? v * Vec::load(factors + i) : v)).store(to + i);
    }
  }
};

}  // namespace
