// Elements as sums of terms, which AMX multiplies: bf16's as they are, fp16's scaled row by row.
//
//   bf16            1 term of bf16
//   tf32, fp32      2 and 3 terms of bf16; where tiles multiply fp16, 1 and 2 terms of fp16
//
// Scales are there with fp16 alone, whose exponents have 5 bits: a row of A or of W is multiplied
// by the power of two that brings its largest element to 2^14 .. 2^15, and sums are multiplied by
// the inverses. Two terms have 22 bits of an element, and all that it has from 2^-39 of the largest
// up.
#pragma once
#include "amx.hpp"
#include "scratch.hpp"

namespace {
namespace amx_tiles {

constexpr int64_t kTileRows = 32;
constexpr int64_t kNR = 32;
constexpr int64_t kSteps = 32;                  // of K in a tile
constexpr int64_t kPairBytes = 2 * kTileBytes;  // two tiles side by side, or one above the other

struct Terms {
  int count;
  bool halves;  // fp16 with scales, else bf16
};
// Of factors inside attention, which need no scales: a weight of 1 gives the value itself.
constexpr Terms head_terms_of(Precision p) {
  return {p == Precision::fp32 ? 3 : p == Precision::tf32 ? 2 : 1, false};
}
constexpr Terms terms_of(Precision p) {  // of GEMMs
#if defined(VITKERN_AMX_FP16)
  if (p == Precision::fp32 || p == Precision::tf32) return {p == Precision::fp32 ? 2 : 1, true};
#endif
  return head_terms_of(p);
}

// Of 32 rows of A, or of 32 columns of W: what they were multiplied by, the inverse, and their
// Euclidean norms before.
struct Scales {
  float scale[32], inverse[32], norm[32];
};
static_assert(sizeof(Scales) % 64 == 0);

// ---- Elements as sums of terms -----------------------------------------------------

inline Vec rounded(Vec x) {  // to bf16, as fp32
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline __mmask16 finite_lanes(Vec x) {
  constexpr int kNotFinite = 0x99;  // NaNs and infinities
  return _knot_mask16(_mm512_fpclass_ps_mask(x.v, kNotFinite));
}

// x = part[0] + part[1] + ..., exactly with three (from 1e-33 up: bf16 flushes its denormals). An
// element that is not finite, or rounds to infinity in bf16, goes into the last part: that one is
// only multiplied by the other factor's first part, and a zero part times infinity would be NaN.
template <int count>
inline void split(Vec x, Vec* part) {
  if constexpr (count == 1) {
    part[0] = x;  // who stores it rounds
  } else {
    part[0] = rounded(x);
    Vec rest = x - part[0];
    const __mmask16 finite = finite_lanes(rest);
    for (int t = 1; t < count; ++t) {
      part[t] = {_mm512_maskz_mov_ps(finite, rounded(rest).v)};
      rest = rest - part[t];
    }
    part[count - 1].v = _mm512_mask_mov_ps(part[0].v, finite, part[count - 1].v);
    part[0].v = _mm512_maskz_mov_ps(finite, part[0].v);
  }
}

// The same in fp16, of a scaled element.
template <int count>
inline void split_halves(Vec x, __m256i* part) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  part[0] = _mm512_cvtps_ph(x.v, kNearest);
  if constexpr (count == 2) {
    const __mmask16 finite = finite_lanes(x);
    const __m256i rest = _mm512_cvtps_ph((x - Vec{_mm512_cvtph_ps(part[0])}).v, kNearest);
    part[1] = _mm256_mask_mov_epi16(part[0], finite, rest);
    part[0] = _mm256_maskz_mov_epi16(finite, part[0]);
  }
}

// Elements of each term: 16, or 32 of which the first sixteen are from a.
template <Terms terms>
inline void split_one(Vec x, __m256i* out) {
  if constexpr (terms.halves) {
    split_halves<terms.count>(x, out);
  } else {
    Vec part[terms.count];
    split<terms.count>(x, part);
    for (int t = 0; t < terms.count; ++t)
      out[t] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(part[t].v));
  }
}
template <Terms terms>
inline void split_pair(Vec a, Vec b, __m512i* out) {
  if constexpr (terms.halves) {
    __m256i first[terms.count], second[terms.count];
    split_halves<terms.count>(a, first);
    split_halves<terms.count>(b, second);
    for (int t = 0; t < terms.count; ++t)
      out[t] = _mm512_inserti64x4(_mm512_castsi256_si512(first[t]), second[t], 1);
  } else {
    Vec first[terms.count], second[terms.count];
    split<terms.count>(a, first);
    split<terms.count>(b, second);
    for (int t = 0; t < terms.count; ++t) out[t] = bf16_pair(first[t], second[t]);
  }
}

// Calls f<terms>() with the terms known to the compiler: those of GEMMs, those of attention, all.
template <class F>
[[gnu::always_inline]] inline void with_head_terms(Terms terms, const F& f) {
  if (terms.count == 3) return f.template operator()<Terms{3, false}>();
  if (terms.count == 2) return f.template operator()<Terms{2, false}>();
  f.template operator()<Terms{1, false}>();
}
#if defined(VITKERN_AMX_FP16)
template <class F>
[[gnu::always_inline]] inline void with_gemm_terms(Terms terms, const F& f) {
  if (!terms.halves) return f.template operator()<Terms{1, false}>();
  if (terms.count == 2) return f.template operator()<Terms{2, true}>();
  f.template operator()<Terms{1, true}>();
}
template <class F>
[[gnu::always_inline]] inline void with_terms(Terms terms, const F& f) {
  if (terms.halves)
    with_gemm_terms(terms, f);
  else
    with_head_terms(terms, f);
}
#else
template <class F>
[[gnu::always_inline]] inline void with_gemm_terms(Terms terms, const F& f) {
  with_head_terms(terms, f);
}
template <class F>
[[gnu::always_inline]] inline void with_terms(Terms terms, const F& f) {
  with_head_terms(terms, f);
}
#endif

// Of 32 columns of W, or 32 rows of A: their tiles, and all.
inline int64_t tile_bytes(int64_t K, Terms terms) {
  return ceil_div(K, kSteps) * terms.count * kPairBytes;
}
inline int64_t panel_bytes(int64_t K, Terms terms) {
  return tile_bytes(K, terms) + (terms.halves ? static_cast<int64_t>(sizeof(Scales)) : 0);
}
inline Scales& scales_of(char* panel, int64_t K, Terms terms) {
  return *reinterpret_cast<Scales*>(panel + tile_bytes(K, terms));
}
inline const Scales& scales_of(const char* panel, int64_t K, Terms terms) {
  return scales_of(const_cast<char*>(panel), K, terms);
}

// A power of two and its inverse, lane by lane: x of at most `largest` becomes at most 2^15.
struct PowersOfTwo {
  Vec scale, inverse;

  explicit PowersOfTwo(Vec largest) {
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(largest.v), 23);
    // 127 + 14 - (exponent - 127), and its inverse is no denormal
    const __m512i up = _mm512_min_epi32(_mm512_sub_epi32(_mm512_set1_epi32(268), exponent),
                                        _mm512_set1_epi32(253));
    const __m512i down = _mm512_sub_epi32(_mm512_set1_epi32(254), up);
    scale.v = _mm512_castsi512_ps(_mm512_slli_epi32(up, 23));
    inverse.v = _mm512_castsi512_ps(_mm512_slli_epi32(down, 23));
  }
  void set(Scales& of, int64_t i) const {
    of.scale[i] = _mm512_cvtss_f32(scale.v);
    of.inverse[i] = _mm512_cvtss_f32(inverse.v);
  }
};
inline Vec finite_magnitude(Vec x) {
  return {_mm512_maskz_mov_ps(finite_lanes(x), magnitude(x).v)};
}
// Of n elements.
inline Vec largest_magnitude(DType type, const void* p, int64_t i, int64_t n) {
  Vec most = Vec::set(0);
  for (int64_t k = 0; k < n; k += 16)
    most = greater(finite_magnitude(load_as(type, p, i + k, n - k)), most);
  return Vec::set(most.largest());
}

inline float largest_magnitude(const float* p, int64_t n) {
  return _mm512_cvtss_f32(largest_magnitude(DType::f32, p, 0, n).v);
}

// Elements i .. i + 32 of an array as terms; those from i + n on are zero. fp16: multiplied by
// `scale`, and their squares added to `squares`.
template <Terms terms>
[[gnu::always_inline]] inline void load_terms(DType type, const void* p, int64_t i, int64_t n,
                                              Vec scale, Vec& squares, __m512i* out) {
  if (terms.count == 1 && !terms.halves && type == DType::bf16) {
    const __mmask32 there = n >= 32 ? 0xffffffff : (1u << n) - 1;
    out[0] = _mm512_maskz_loadu_epi16(there, static_cast<const bf16*>(p) + i);
    return;
  }
  Vec a = load_as(type, p, i, n), b = n > 16 ? load_as(type, p, i + 16, n - 16) : Vec::set(0);
  if constexpr (terms.halves) {
    a = a * scale, b = b * scale;
    squares = fma(a, a, fma(b, b, squares));
  }
  split_pair<terms>(a, b, out);
}

}  // namespace amx_tiles
}  // namespace
