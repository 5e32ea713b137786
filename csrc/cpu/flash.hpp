// One head of attention, flash style: keys and values in panels, scores of one tile of queries at a
// time.
//
//   for each tile of kMR queries
//     for each block of kKeys keys     scores (kMR, kKeys) in L1: 14 KiB (AVX-512)
//       s = q k^T * scale + bias;  m' = max(m, s);  p = e^(s - m')
//       l = l * e^(m - m') + sum p;  o = o * e^(m - m') + p v
//     y = o / l,  lse = m + log l
//
// Memory is linear in S. A row's result depends on its own query only, so tiles and threads do not
// show.
#pragma once
#include "gemm.hpp"
#include "math.hpp"
#include "philox.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace {

constexpr int64_t kKeys = 8 * kNR;

struct Head {
  DType dtype;
  const void *q, *k, *v;  // (S, E), rows `stride` apart
  int64_t stride;
  const float* bias;  // (S, S), rows bias_stride apart, or null
  int64_t bias_stride;
  DType y_dtype;
  void* y;  // (S, E), rows y_stride apart
  int64_t y_stride;
  float* lse;  // (S) or null
  int64_t S, E;
  float scale;
  Dropout dropout;
  uint64_t first_element;  // of this head's scores (S, S) in the dropout's stream
};

inline int64_t flash_scratch(int64_t S, int64_t E) {  // floats
  const int64_t E_padded = round_up(E, kNR);
  return round_up(S, kNR) * E + E_padded * S + kMR * (row_stride(E) + kKeys + E_padded);
}

// s (n) -> p = e^(scale * s + bias - m), in place; updates the running maximum m and sum l, returns
// e^(m_old - m_new).
inline float soften(float* s, int64_t n, float scale, const float* bias, float* m, float* l) {
  const float kLowest = -INFINITY;
  const Vec factor = Vec::set(scale);
  Vec top = Vec::set(kLowest);
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    Vec v = Vec::load(s + i, n - i) * factor;
    if (bias) v = v + Vec::load(bias + i, n - i);
    v.store(s + i, n - i);
    // The lanes after the last key repeat -inf; a NaN score loses here and comes out through exp
    // below.
    top = greater(v.keep_first(n - i, kLowest), top);
  }
  const float block_top = top.largest(), old = *m;
  const float now = block_top > old ? block_top : old;
  const float base = now == kLowest ? 0.0f : now;  // all masked so far: e^(-inf) = 0, not NaN
  Vec sum = Vec::set(0);
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const Vec p = exp(Vec::load(s + i, n - i) - Vec::set(base)).keep_first(n - i, 0);
    p.store(s + i, n - i);
    sum = sum + p;
  }
  const float shrink = old == kLowest ? 0.0f : expf(old - base);
  *l = *l * shrink + sum.sum();
  *m = now;
  return shrink;
}

// Queries [queries) of a head against the keys [keys).
inline void attend(const Head& h, Range queries, Range keys, float* scratch) {
  const int64_t n = keys.end - keys.begin, E_padded = round_up(h.E, kNR),
                q_stride = row_stride(h.E);
  float* const k_panels = scratch;                              // [n / kNR][E][kNR]
  float* const v_panels = k_panels + round_up(h.S, kNR) * h.E;  // [E / kNR][n][kNR]
  float* const q = v_panels + E_padded * h.S;                   // (kMR, E)
  float* const s = q + kMR * q_stride;                          // (kMR, kKeys)
  float* const o = s + kMR * kKeys;                             // (kMR, E_padded)

  for (int64_t j = 0; j < n; j += kNR)
    pack_block(h.dtype, offset(h.dtype, h.k, (keys.begin + j) * h.stride), h.stride, n - j, 0, h.E,
               k_panels + j * h.E);
  for (int64_t e = 0; e < E_padded; e += Vec::kLanes) {
    float* const column = v_panels + e / kNR * kNR * n + e % kNR;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = (keys.begin + j) * h.stride + e;
      (e < h.E ? load_as(h.dtype, h.v, at, h.E - e) : Vec::set(0)).store(column + j * kNR);
    }
  }

  for (int64_t i0 = queries.begin; i0 < queries.end; i0 += kMR) {
    const int64_t R = min(kMR, queries.end - i0);
    float m[kMR], l[kMR];
    for (int64_t r = 0; r < R; ++r) {
      m[r] = -INFINITY;
      l[r] = 0;
      widen_row(h.dtype, offset(h.dtype, h.q, (i0 + r) * h.stride), q + r * q_stride, h.E);
    }
    memset(o, 0, R * E_padded * sizeof(float));
    for (int64_t j0 = 0; j0 < n; j0 += kKeys) {
      const int64_t J = min(kKeys, n - j0);
      for (int64_t j = 0; j < J; j += kNR)
        multiply(R, q, q_stride, k_panels + (j0 + j) * h.E, h.E, s + j, kKeys, false,
                 {q, k_panels});
      for (int64_t r = 0; r < R; ++r) {
        float* const row = s + r * kKeys;
        const int64_t key = keys.begin + j0, query = i0 + r;
        const float* bias = h.bias ? h.bias + query * h.bias_stride + key : nullptr;
        const float shrink = soften(row, J, h.scale, bias, &m[r], &l[r]);
        drop(h.dropout, kElements, h.first_element + static_cast<uint64_t>(query * h.S + key), row,
             J);
        if (j0 == 0 || shrink == 1) continue;
        for (int64_t e = 0; e < E_padded; e += Vec::kLanes) {
          float* const p = o + r * E_padded + e;
          (Vec::load(p) * Vec::set(shrink)).store(p);
        }
      }
      for (int64_t e = 0; e < E_padded; e += kNR)
        multiply(R, s, kKeys, v_panels + e * n + j0 * kNR, J, o + e, E_padded, true, {s, v_panels});
    }
    for (int64_t r = 0; r < R; ++r) {
      const Vec inverse = Vec::set(1 / l[r]);
      for (int64_t e = 0; e < h.E; e += Vec::kLanes)
        store_as(h.y_dtype, h.y, (i0 + r) * h.y_stride + e,
                 Vec::load(o + r * E_padded + e) * inverse, h.E - e);
      if (h.lse) h.lse[i0 + r] = m[r] == INFINITY ? m[r] : m[r] + logf(l[r]);
    }
  }
}

}  // namespace
