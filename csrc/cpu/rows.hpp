// Row-wise pieces: LayerNorm of a row, and rows of any dtype as fp32.
#pragma once
#include "parallel.hpp"

namespace {

using vitkern::NormKind;

// LayerNorm of rows: (x - mean) * rstd * weight + bias over D elements; the mean of RMSNorm is 0,
// and rows without a norm are copied. Three sweeps over a row
// that stays in L1 (D <= 4096 floats = 16 KiB), so memory is read once, and the variance is taken
// about the mean: no cancellation.
struct Norm {
  Rows x;               // (M, D)
  const float* weight;  // (D) or null
  const float* bias;    // (D) or null
  int64_t D;
  float eps;
  float* stats = nullptr;  // (M, 2): mean, rstd; or null
  NormKind kind = NormKind::layer;

  // Row `at` to y (D), which may be the row itself.
  void row(int64_t at, DType y_dtype, void* y) const {
    // Copies: after a store to y the compiler would read the members again.
    const auto [x, weight, bias, D, eps, stats, kind] = *this;
    const void* const from = x.row(at);
    constexpr int64_t L = Vec::kLanes;
    if (kind == NormKind::none) {
      for (int64_t i = 0; i < D; i += L)
        store_as(y_dtype, y, i, load_as(x.dtype, from, i, D - i), D - i);
      return;
    }
    Vec sum0 = Vec::set(0), sum1 = Vec::set(0);
    for (int64_t i = 0; i < D; i += 2 * L) {
      sum0 = sum0 + load_as(x.dtype, from, i, D - i);
      if (i + L < D) sum1 = sum1 + load_as(x.dtype, from, i + L, D - i - L);
    }
    const float count = static_cast<float>(D);
    const float rough = kind == NormKind::rms ? 0 : (sum0 + sum1).sum() / count;
    const Vec about = Vec::set(rough);
    Vec square0 = Vec::set(0), square1 = Vec::set(0), rest0 = Vec::set(0), rest1 = Vec::set(0);
    for (int64_t i = 0; i < D; i += 2 * L) {
      const Vec c0 = (load_as(x.dtype, from, i, D - i) - about).keep_first(D - i, 0);
      square0 = fma(c0, c0, square0);
      rest0 = rest0 + c0;
      if (i + L < D) {
        const Vec c1 = (load_as(x.dtype, from, i + L, D - i - L) - about).keep_first(D - i - L, 0);
        square1 = fma(c1, c1, square1);
        rest1 = rest1 + c1;
      }
    }
    // The rounding of the first sum: a row of equal elements would see it times 1 / sqrt(eps).
    // Where the row has a spread, it is noise below the rounding of this second sum.
    const float spread = (square0 + square1).sum() / count, rest = (rest0 + rest1).sum() / count;
    const bool narrow = kind == NormKind::layer && rest * rest > 1e-8f * spread;
    const float mean = narrow ? rough + rest : rough;
    const float variance = narrow ? fmaxf(spread - rest * rest, 0) : spread;
    const float rstd = 1 / sqrtf(variance + eps);
    if (stats) {
      stats[2 * at] = mean;
      stats[2 * at + 1] = rstd;
    }
    const Vec m = Vec::set(mean), r = Vec::set(rstd);
    for (int64_t i = 0; i < D; i += L) {
      Vec v = (load_as(x.dtype, from, i, D - i) - m) * r;
      const Vec add = bias ? Vec::load(bias + i, D - i) : Vec::set(0);
      v = weight ? fma(v, Vec::load(weight + i, D - i), add) : v + add;
      store_as(y_dtype, y, i, v, D - i);
    }
  }
};

// Row m of x, n elements of any float dtype -> y (n) fp32
inline void widen_row(const Rows& x, int64_t m, float* y, int64_t n) {
  const void* const row = x.row(m);
  if (x.dtype == DType::f32) return void(memcpy(y, row, n * sizeof(float)));
  for (int64_t i = 0; i < n; i += Vec::kLanes) load_as(x.dtype, row, i, n - i).store(y + i, n - i);
}

// x (n) fp32 -> elements `at` onwards of y, of any float dtype
inline void narrow_row(const float* x, DType type, void* y, int64_t at, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec::kLanes)
    store_as(type, y, at + i, Vec::load(x + i, n - i), n - i);
}

}  // namespace
