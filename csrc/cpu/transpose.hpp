// As many vectors as a vector has lanes, transposed: rows[i] lane j <-> rows[j] lane i.
#pragma once
#include "simd.hpp"

namespace {

#if defined(__AVX2__)
// The first step: t[i] and t[i + 1] are rows i and i + 1 interleaved, for even i.
inline void interleave_pairs(const Vec* rows, Vec* t) {
#pragma GCC unroll 8
  for (int i = 0; i < Vec::kLanes; i += 2) {
    t[i] = interleave_low(rows[i], rows[i + 1]);
    t[i + 1] = interleave_high(rows[i], rows[i + 1]);
  }
}
#endif

#if defined(__AVX512F__)

inline void transpose(Vec* rows) {
  Vec t[16];
  __m512 u[16];
  interleave_pairs(rows, t);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(t[i].v), b = _mm512_castps_pd(t[i + 2].v);
    const __m512d c = _mm512_castps_pd(t[i + 1].v), d = _mm512_castps_pd(t[i + 3].v);
    u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  }
  // u[4g + j]: 128-bit part q holds column 4q + j of rows 4g .. 4g+3
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88),
                 b = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd),
                 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    rows[j].v = _mm512_shuffle_f32x4(a, b, 0x88);
    rows[8 + j].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    rows[4 + j].v = _mm512_shuffle_f32x4(c, d, 0x88);
    rows[12 + j].v = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

#elif defined(__AVX2__)

inline void transpose(Vec* rows) {
  Vec t[8];
  __m256 u[8];
  interleave_pairs(rows, t);
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i].v, t[i + 2].v, 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i].v, t[i + 2].v, 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1].v, t[i + 3].v, 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1].v, t[i + 3].v, 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    rows[4 + j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}

#else

inline void transpose(Vec* rows) {
  for (int i = 0; i < Vec::kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const float t = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = t;
    }
}

#endif

}  // namespace
