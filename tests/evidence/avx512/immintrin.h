// AVX-512 for a CPU that has AVX2 only: SIMDe's functions under Intel's names, so that the kernels'
// own source is compiled and its results are checked on every x86 machine. In the place of the
// compiler's header of this name (-DVITKERN_EMULATE_AVX512=ON).
#pragma once
#include_next <immintrin.h>
#include <math.h>
#include <string.h>

#include <cstdint>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define __m512 simde__m512
#define __m512i simde__m512i
#define __mmask16 simde__mmask16

// What SIMDe 0.7 does not have, lane by lane.
namespace emulated {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
struct Lanes {
  T x[16];
};

// f(lane) of every lane.
template <class To, class From, class F>
inline Lanes<To> each(const Lanes<From>& from, const F& f) {
  Lanes<To> to;
  for (int i = 0; i < 16; ++i) to.x[i] = f(from.x[i]);
  return to;
}

template <class T>
inline Lanes<T> load(uint16_t mask, const void* p) {
  Lanes<T> r = {};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) memcpy(&r.x[i], static_cast<const T*>(p) + i, sizeof(T));
  return r;
}

template <class T>
inline void store(void* p, uint16_t mask, const Lanes<T>& v) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) memcpy(static_cast<T*>(p) + i, &v.x[i], sizeof(T));
}

inline int32_t to_int(float x) {  // an integer already; out of range as the CPU says it
  return x >= -0x1p31f && x < 0x1p31f ? static_cast<int32_t>(x) : INT32_MIN;
}
inline int32_t nearest(float x) { return to_int(rintf(x)); }
inline int32_t truncated(float x) { return to_int(truncf(x)); }

inline __m512 maskz_loadu_ps(uint16_t mask, const void* p) {
  return bits<__m512>(load<float>(mask, p));
}
inline __m256i maskz_loadu_epi16(uint16_t mask, const void* p) {
  return bits<__m256i>(load<int16_t>(mask, p));
}
inline void mask_storeu_ps(void* p, uint16_t mask, __m512 v) {
  store(p, mask, bits<Lanes<float>>(v));
}
inline void mask_storeu_epi16(void* p, uint16_t mask, __m256i v) {
  store(p, mask, bits<Lanes<int16_t>>(v));
}
inline __m512i cvtepu16_epi32(__m256i v) {
  return bits<__m512i>(each<int32_t>(bits<Lanes<uint16_t>>(v), [](uint16_t x) { return x; }));
}
inline __m256i cvtepi32_epi16(__m512i v) {
  return bits<__m256i>(each<int16_t>(bits<Lanes<int32_t>>(v), [](int32_t x) { return x; }));
}
inline __m128i cvtepi32_epi8(__m512i v) {
  return bits<__m128i>(each<int8_t>(bits<Lanes<int32_t>>(v), [](int32_t x) { return x; }));
}
inline __m512i cvtps_epi32(__m512 v) {
  return bits<__m512i>(each<int32_t>(bits<Lanes<float>>(v), nearest));
}
inline __m512i cvttps_epi32(__m512 v) {
  return bits<__m512i>(each<int32_t>(bits<Lanes<float>>(v), truncated));
}
inline __m512 cvtepi32_ps(__m512i v) {
  return bits<__m512>(each<float>(bits<Lanes<int32_t>>(v), [](int32_t x) { return float(x); }));
}
inline float reduce_add_ps(__m512 v) {  // halves, as compilers do
  Lanes<float> r = bits<Lanes<float>>(v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) r.x[i] += r.x[i + n];
  return r.x[0];
}
inline float reduce_max_ps(__m512 v) {
  const Lanes<float> r = bits<Lanes<float>>(v);
  float most = r.x[0];
  for (const float x : r.x) most = x > most ? x : most;
  return most;
}

}  // namespace emulated

#undef _mm512_madd_epi16  // whose alias there takes four arguments
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_shuffle_f32x4 simde_mm512_shuffle_f32x4  // which has no alias there
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvttps_epi32 emulated::cvttps_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps

#define __AVX512F__ 1
