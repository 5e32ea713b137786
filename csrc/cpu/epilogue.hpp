// What happens to a row of a GEMM's result on its way to memory.
#pragma once
#include <type_traits>

#include "math.hpp"
#include "parallel.hpp"
#include "philox.hpp"
#include "scratch.hpp"
#if defined(VITKERN_AMX)
#include "between_amx.hpp"
#endif

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
  // Rows from m on, of the columns k .. k + 32, two at a time (between_amx.hpp).
  template <auto, class Work>
  [[gnu::always_inline]] bool with_rows(int64_t m, int64_t k, const Work& work) const {
    char* const to = static_cast<char*>(const_cast<void*>(at(m, k)));
    if (dtype == DType::f32)
      work(amx_tiles::FloatRows{to, stride * 4});
    else
      work(amx_tiles::Bf16Rows{to, stride * 2});
    return true;
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
      with_activated([&](const auto& activated) { v = activated(v); });
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
    with_activated([&](const auto& activated) {
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
  // Calls work(pairs), where pairs(sums) takes the next two rows from m on, of the columns
  // n0 .. n0 + 32: what stands between two steps of the tile unit. Returns false where that cannot
  // be done. Of a left factor as the next GEMM reads it, kTerms are the terms that it may have.
  template <auto kTerms, class Work>
  [[gnu::always_inline]] bool with_pairs(int64_t m, int64_t n0, const Work& work) const {
    if (dropout.threshold || (activation != Activation::none && activation != Activation::gelu))
      return false;
    constexpr int64_t L = Vec::kLanes;
    const Vec low = bias ? Vec::load(bias + n0) : Vec::set(0);
    const Vec high = bias ? Vec::load(bias + n0 + L) : Vec::set(0);
    const int64_t element = (first_row + m) * N + first_column + n0;
    const amx_tiles::SavedRows saved{pre_dtype, pre ? offset(pre_dtype, pre, element) : nullptr, N};
    return y.template with_rows<kTerms>(m, n0, [&](const auto& to) {
      const auto run = [&](const auto& activated) {
        work([=, to = to, saved = saved](auto& sums) mutable __attribute__((always_inline)) {
          auto rows = sums();
          for (auto& row : rows.v) row[0] = row[0] + low, row[1] = row[1] + high;
          saved(rows);
          for (auto& row : rows.v) row[0] = activated(row[0]), row[1] = activated(row[1]);
          to(rows);
        });
      };
      if (activation == Activation::none)
        return run([](Vec x) __attribute__((always_inline)) { return x; });
      if constexpr (requires { y.has_few_bits(); })
        if (y.has_few_bits())
          return run([](Vec x) __attribute__((always_inline)) { return short_gelu(x); });
      run([](Vec x) __attribute__((always_inline)) { return gelu(x); });
    });
  }
#endif

 private:
  // As with_activation; what a target rounds to a few bits is no more exact than it needs to be.
  template <class Work>
  [[gnu::always_inline]] void with_activated(const Work& work) const {
#if defined(__AVX512F__)
    if constexpr (requires { y.has_few_bits(); })
      if (activation == Activation::gelu && y.has_few_bits())
        return work([](Vec x) __attribute__((always_inline)) { return short_gelu(x); });
#endif
    with_activation(activation, work);
  }
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
  template <auto, class Work>
  [[gnu::always_inline]] bool with_pairs(int64_t m, int64_t n0, const Work& work) const {
    if (!is_plain_sum()) return false;
    constexpr int64_t L = Vec::kLanes;
    const float* from =
        static_cast<const float*>(residual) + (first_row + m) * residual_stride + n0;
    float* to = static_cast<float*>(y) + (first_row + m) * y_stride + n0;
    const Vec one = Vec::set(1), zero = Vec::set(0);
    const Vec shift[2] = {bias ? Vec::load(bias + n0) : zero,
                          bias ? Vec::load(bias + n0 + L) : zero};
    const Vec factor[2] = {gamma ? Vec::load(gamma + n0) : one,
                           gamma ? Vec::load(gamma + n0 + L) : one};
    const int64_t from_stride = residual_stride, to_stride = y_stride;
    work([=](auto& sums) mutable __attribute__((always_inline)) {
      const auto rows = sums();
      for (const auto& row : rows.v) {
        for (int64_t i = 0; i < 2; ++i) {
          const Vec v = (row[i] + shift[i]) * factor[i];
          (Vec::load(from + i * L) + v).store(to + i * L);
        }
        from += from_stride;
        to += to_stride;
      }
    });
    return true;
  }
#endif

 private:
  bool is_plain_sum() const {
    return residual && dtype == DType::f32 && !dropout.threshold && !path.threshold;
  }
};

}  // namespace
