// Floats as 16-bit integers times a scale, for tiles_int16.hpp and flash_int16.hpp.
//
// A block of elements, of a row or of a column, has one scale, so chosen that the integers'
// Euclidean norm is at most 46340. By Cauchy and Schwarz the sum of products of two blocks is then
// at most 46340^2 < 2^31 and exact in 32 bits, whatever the data.
//
// A block that holds NaN or infinity has the scale NaN.
#pragma once
#include "loops.hpp"
#include "parallel.hpp"

namespace {
namespace int16_tiles {

#if defined(__AVX512F__)
inline void store_nearest(Vec v, int16_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v.v)));
}
// The nearest integers of a and b, lane by lane a pair.
inline void store_pairs(Vec a, Vec b, int32_t* out) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(a.v), high));
}
inline Vec square_root(Vec v) { return {_mm512_sqrt_ps(v.v)}; }
#else
inline void store_nearest(Vec v, int16_t* out) {
  const __m256i q = _mm256_cvtps_epi32(v.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)));
}
inline void store_pairs(Vec a, Vec b, int32_t* out) {
  const __m256i high = _mm256_slli_epi32(_mm256_cvtps_epi32(b.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_blend_epi16(_mm256_cvtps_epi32(a.v), high, 0xaa));
}
inline Vec square_root(Vec v) { return {_mm256_sqrt_ps(v.v)}; }
#endif

// What n elements may have in units of their scale: a norm that rounding, which moves it by at most
// sqrt(n) / 2, and the rounding of this arithmetic leave below 46340; and each one for itself.
inline float most_norm(int64_t n) { return 46339 - 0.5f * sqrtf(static_cast<float>(n)); }
constexpr float kMostUnits = 32766.5f;
constexpr float kTiny = 1e-30f;  // the inverse of such a scale could overflow: all is zero
// The squares of what is beyond leave the range of fp32.
constexpr float kLeastSquared = 1e-15f, kMostSquared = 1e15f;

// ---- Rows ------------------------------------------------------------------------------

// The vectors load(i, count) of n elements -> integers, and zeros up to a multiple of Vec::kLanes;
// returns their scale.
template <class Load>
inline float quantise_by(const Load& load, int64_t n, int16_t* out) {
  Vec top = Vec::set(0), sum = Vec::set(0);
  each_vector(n, [&](int64_t i, auto count) {
    const Vec v = load(i, count);
    sum = fma(v, v, sum);
    top = greater(magnitude(v), top);  // a NaN loses here, and is in the sum
  });
  const float largest = top.largest();
  float squares = sum.sum();
  const bool finite = squares == squares && largest < INFINITY;
  float inverse = 0;
  if (finite && largest > kTiny) {
    if (largest > kLeastSquared && largest < kMostSquared) {
      squares /= largest * largest;
    } else {
      const Vec by = Vec::set(1 / largest);
      sum = Vec::set(0);
      each_vector(n, [&](int64_t i, auto count) {
        const Vec v = load(i, count) * by;
        sum = fma(v, v, sum);
      });
      squares = sum.sum();
    }
    const float units = most_norm(n) / sqrtf(squares);  // that the largest element would have
    inverse = (units < kMostUnits ? units : kMostUnits) / largest;
  }
  each_vector(n, [&](int64_t i, auto count) {
    store_nearest(finite ? load(i, count) * Vec::set(inverse) : Vec::set(0), out + i);
  });
  return finite ? (inverse ? 1 / inverse : 0) : NAN;
}

// Elements `first` onwards of an array, of which n count.
inline float quantise(DType dtype, const void* x, int64_t first, int64_t n, int16_t* out) {
  float scale = 0;
  with_type(dtype, [&](auto type) {
    scale = quantise_by([&](int64_t i, auto count) { return load_as(type, x, first + i, count); },
                        n, out);
  });
  return scale;
}

// ---- Columns ---------------------------------------------------------------------------

// The unit of integers, lane by lane: its inverse, to multiply by, and itself.
struct Units {
  Vec inverse, unit;

  // For n elements whose largest is `largest` and whose squares, divided by its own, add up to
  // `squares`: as many units as the bounds above allow.
  static Units of(Vec largest, Vec squares, int64_t n) {
    const Vec most = lesser(Vec::set(most_norm(n)) / square_root(squares), Vec::set(kMostUnits));
    const Vec none = Vec::set(0), tiny = Vec::set(kTiny);
    return {select_less(tiny, largest, most / largest, none),
            select_less(tiny, largest, largest / most, none)};
  }
};

// Of N columns of vectors: row(j, v) is vector v of step j < n. A lane with an element that is not
// finite has the unit NaN. The columns' sums do not wait for each other.
template <int N, class Row>
inline void find_units(const Row& row, int64_t n, Units (&units)[N]) {
  const Vec none = Vec::set(0), least = Vec::set(kLeastSquared), most = Vec::set(kMostSquared);
  Vec top[N], sum[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) top[v] = sum[v] = none;
  for (int64_t j = 0; j < n; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const Vec x = row(j, v);
      top[v] = greater(magnitude(x), top[v]);  // a NaN loses here, and is in the sum
      sum[v] = fma(x, x, sum[v]);
    }
  for (int v = 0; v < N; ++v) {
    const Vec divisor = greater(top[v], least);
    Vec squares = sum[v] / (divisor * divisor);
    const Vec small = select_less(top[v], least, top[v], none);
    if (select_less(top[v], most, small, Vec::set(1)).largest() > 0) {  // their squares leave fp32
      const Vec by = Vec::set(1) / greater(top[v], Vec::set(kTiny));
      squares = none;
      for (int64_t j = 0; j < n; ++j) squares = fma(row(j, v) * by, row(j, v) * by, squares);
    }
    units[v] = Units::of(top[v], squares, n);
    units[v].unit = fma(squares, none, units[v].unit);
  }
}

// N vectors of columns of n steps -> pairs of steps: pair i of vector v to to(v) + i * stride, its
// scales to scales(v). The second of an odd number's last pair is zero.
template <int N, class Row, class To, class Scales>
inline void quantise_columns(const Row& row, int64_t n, const To& to, int64_t stride,
                             const Scales& scales) {
  Units units[N];
  find_units<N>(row, n, units);
  for (int v = 0; v < N; ++v) units[v].unit.store(scales(v));
  int64_t j = 0;
  for (; j + 1 < n; j += 2)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v)
      store_pairs(row(j, v) * units[v].inverse, row(j + 1, v) * units[v].inverse,
                  to(v) + j / 2 * stride);
  if (j < n)
    for (int v = 0; v < N; ++v)
      store_pairs(row(j, v) * units[v].inverse, Vec::set(0), to(v) + j / 2 * stride);
}

// The same of an array's columns, any number of them: column e, a multiple of Vec::kLanes, to to(e)
// and scales(e). Wide parts first: narrow ones touch a page of memory for a line of it, twice.
template <int N, class To, class Scales>
inline void quantise_steps(const Rows& steps, int64_t n, Range columns, const To& to,
                           int64_t stride, const Scales& scales) {
  constexpr int64_t L = Vec::kLanes;
  int64_t e = columns.begin;
  with_type(steps.dtype, [&](auto type) {
    const auto part = [&](auto count) {  // of the last vector
      quantise_columns<N>(
          [&](int64_t j, int v) {
            return load_as(type, steps.data, j * steps.stride + e + v * L, count);
          },
          n, [&](int v) { return to(e + v * L); }, stride,
          [&](int v) { return scales(e + v * L); });
    };
    for (; e + N * L <= columns.end; e += N * L) part(Count<L>{});
    if constexpr (N == 1)
      if (e < columns.end) part(columns.end - e);
  });
  if constexpr (N > 1) quantise_steps<N / 2>(steps, n, {e, columns.end}, to, stride, scales);
}
constexpr int kWidest = Vec::kLanes == 16 ? 8 : 4;  // vectors: two accumulators for each

}  // namespace int16_tiles
}  // namespace
