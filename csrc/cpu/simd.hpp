// One fp32 vector, as wide as this translation unit's ISA, and bf16 storage beside it.
//
// Everything is in an unnamed namespace: the file is compiled once per ISA, and the linker must
// never merge an AVX-512 copy of an inline function into AVX2 code. For the same reason no std::
// template is used here.
#pragma once
#include <math.h>
#include <string.h>

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.hpp"

namespace {

using vitkern::DType;

struct bf16 {
  uint16_t bits;
};

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

#if defined(__AVX512F__)

struct Vec {
  static constexpr int64_t kLanes = 16;
  __m512 v;

  static __mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : (1u << n) - 1; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
  static Vec load(const bf16* p, int64_t n) {
    const __m256i half = _mm256_maskz_loadu_epi16(first(n), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, first(n), v); }
#if defined(__AVX512BF16__)  // denormals become zeros
  void store(bf16* p, int64_t n) const {
    _mm256_mask_storeu_epi16(p, first(n), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
#else
  void store(bf16* p, int64_t n) const {  // round to nearest even; a NaN stays one
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i r = _mm512_mask_mov_epi32(even, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
  }
#endif
  Vec keep_first(int64_t n, float rest) const {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(rest), first(n), v)};
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float largest() const { return _mm512_reduce_max_ps(v); }

  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  // The second operand where either is NaN.
  friend Vec lesser(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Vec greater(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  // To an integer, ties to even.
  friend Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, 8)}; }
  friend Vec magnitude(Vec a) { return {_mm512_abs_ps(a.v)}; }
  // Of each 128 bits: a0 b0 a1 b1, or a2 b2 a3 b3.
  friend Vec interleave_low(Vec a, Vec b) { return {_mm512_unpacklo_ps(a.v, b.v)}; }
  friend Vec interleave_high(Vec a, Vec b) { return {_mm512_unpackhi_ps(a.v, b.v)}; }
  // a * 2^n
  friend Vec scaled(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  // 2^(b - 127), b being the lowest bits of a.
  friend Vec low_bits_as_exponent(Vec a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
  }
  friend Vec with_sign(Vec a, Vec sign) {  // |a| with the sign of `sign`
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN),
                                                          _mm512_castps_si512(sign.v),
                                                          _mm512_castps_si512(a.v), 0xca))};
  }
  friend Vec select_less(Vec a, Vec b, Vec yes, Vec no) {  // a < b ? yes : no
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
};

#if defined(__AVX512BF16__)
// 32 elements in bf16: the first sixteen from a, then from b.
inline __m512i bf16_pair(Vec a, Vec b) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
}
#endif

#elif defined(__AVX2__)

struct Vec {
  static constexpr int64_t kLanes = 8;
  __m256 v;

  static __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n < kLanes ? n : kLanes)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const float* p, int64_t n) {
    return n >= kLanes ? load(p) : Vec{_mm256_maskload_ps(p, first(n))};
  }
  static Vec load(const bf16* p, int64_t n) {
    __m128i half;
    if (n >= kLanes) {
      half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    } else {
      uint16_t t[kLanes] = {};
      memcpy(t, p, n * sizeof(bf16));
      half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(t));
    }
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(float* p, int64_t n) const {
    if (n >= kLanes)
      store(p);
    else
      _mm256_maskstore_ps(p, first(n), v);
  }
  void store(bf16* p, int64_t n) const {  // round to nearest even; a NaN stays one
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i r =
        _mm256_srli_epi32(_mm256_blendv_epi8(even, _mm256_set1_epi32(0x7fc00000), nan), 16);
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    uint16_t t[kLanes];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(t), _mm256_castsi256_si128(pairs));
    memcpy(p, t, (n < kLanes ? n : kLanes) * sizeof(bf16));
  }
  Vec keep_first(int64_t n, float rest) const {
    return {_mm256_blendv_ps(_mm256_set1_ps(rest), v, _mm256_castsi256_ps(first(n)))};
  }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  float largest() const {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend Vec lesser(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  friend Vec greater(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  friend Vec nearest(Vec a) { return {_mm256_round_ps(a.v, 8)}; }
  friend Vec magnitude(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  friend Vec interleave_low(Vec a, Vec b) { return {_mm256_unpacklo_ps(a.v, b.v)}; }
  friend Vec interleave_high(Vec a, Vec b) { return {_mm256_unpackhi_ps(a.v, b.v)}; }
  friend Vec scaled(Vec a, Vec n) {  // in two steps: 2^n itself may be out of range
    const __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1);
    return {_mm256_mul_ps(_mm256_mul_ps(a.v, power(half)), power(_mm256_sub_epi32(whole, half)))};
  }
  friend Vec low_bits_as_exponent(Vec a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 23))};
  }
  friend Vec with_sign(Vec a, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, a.v), _mm256_and_ps(bit, sign.v))};
  }
  friend Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }

 private:
  static __m256 power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

#else  // any CPU: GCC's vector extension, four floats (SSE2, NEON, or scalars)

struct Vec {
  static constexpr int64_t kLanes = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  F v;

  static Vec set(float x) { return {F{x, x, x, x}}; }
  static Vec load(const float* p) { return load(p, kLanes); }
  static Vec load(const float* p, int64_t n) {
    Vec r = set(0);
    memcpy(&r.v, p, (n < kLanes ? n : kLanes) * sizeof(float));
    return r;
  }
  static Vec load(const bf16* p, int64_t n) {
    uint32_t t[kLanes] = {};
    for (int64_t i = 0; i < n && i < kLanes; ++i) t[i] = static_cast<uint32_t>(p[i].bits) << 16;
    Vec r;
    memcpy(&r.v, t, sizeof(t));
    return r;
  }
  void store(float* p) const { store(p, kLanes); }
  void store(float* p, int64_t n) const {
    memcpy(p, &v, (n < kLanes ? n : kLanes) * sizeof(float));
  }
  void store(bf16* p, int64_t n) const {  // round to nearest even; a NaN stays one
    uint32_t t[kLanes];
    memcpy(t, &v, sizeof(t));
    for (int64_t i = 0; i < n && i < kLanes; ++i) {
      const bool nan = (t[i] & 0x7fffffff) > 0x7f800000;
      p[i].bits = static_cast<uint16_t>(nan ? 0x7fc0 : (t[i] + 0x7fff + ((t[i] >> 16) & 1)) >> 16);
    }
  }
  Vec keep_first(int64_t n, float rest) const {
    Vec r = *this;
    for (int64_t i = n; i < kLanes; ++i) r.v[i] = rest;
    return r;
  }
  float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  float largest() const {
    float m = v[0];
    for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
    return m;
  }

  friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
  friend Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
  friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
  friend Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  friend Vec lesser(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  friend Vec greater(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
  friend Vec nearest(Vec a) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = rintf(a.v[i]);
    return r;
  }
  friend Vec magnitude(Vec a) {
    const I bits = reinterpret_cast<I>(a.v) & 0x7fffffff;
    return {reinterpret_cast<F>(bits)};
  }
  friend Vec scaled(Vec a, Vec n) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = a.v[i] * power(n.v[i], 0) * power(n.v[i], 1);
    return r;
  }
  friend Vec with_sign(Vec a, Vec sign) {
    const I bits =
        (reinterpret_cast<I>(a.v) & 0x7fffffff) | (reinterpret_cast<I>(sign.v) & INT32_MIN);
    return {reinterpret_cast<F>(bits)};
  }
  friend Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return {a.v < b.v ? yes.v : no.v}; }

 private:
  // 2^h for one half h of n: rounded down, or the rest.
  static float power(float n, int rest) {
    if (!(n > -300 && n < 300)) n = 0;  // NaN: the caller's other factor carries it
    const int whole = static_cast<int>(n), half = whole >> 1;
    const uint32_t bits = static_cast<uint32_t>((rest ? whole - half : half) + 127) << 23;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
  }
};

#endif

// Element i onwards of an array whose type is known at run time: at most n of them count.
[[gnu::always_inline]] inline Vec load_as(DType type, const void* p, int64_t i, int64_t n) {
  if (type == DType::f32) return Vec::load(static_cast<const float*>(p) + i, n);
  return Vec::load(static_cast<const bf16*>(p) + i, n);
}
[[gnu::always_inline]] inline void store_as(DType type, void* p, int64_t i, Vec v, int64_t n) {
  if (type == DType::f32)
    v.store(static_cast<float*>(p) + i, n);
  else
    v.store(static_cast<bf16*>(p) + i, n);
}
// The address of element i.
constexpr int64_t bytes_of(DType type) {
  return type == DType::f32 ? 4 : type == DType::bf16 ? 2 : 1;
}
inline const void* offset(DType type, const void* p, int64_t i) {
  return static_cast<const char*>(p) + i * bytes_of(type);
}

// Rows of a run-time dtype.
struct Rows {
  DType dtype;
  const void* data;
  int64_t stride;

  const void* row(int64_t m) const { return offset(dtype, data, m * stride); }
  // The same rows from row m and column k on.
  Rows from(int64_t m, int64_t k = 0) const {
    return {dtype, offset(dtype, data, m * stride + k), stride};
  }
};

}  // namespace
