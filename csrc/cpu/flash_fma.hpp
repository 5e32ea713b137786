// attend() for fp32 multiply-adds: each lane of a vector is a query. Included by flash.hpp.
//
//   for each tile of kQueries queries: q^T (E, kQueries) is the panel that keys are multiplied by
//     for each block of at most kKeys keys
//       s (keys, kQueries) = k q^T           keys in tiles of kMR rows, as in a GEMM
//       m' = max(m, s);  p = e^((s - m') * scale)
//       l = l * e^((m - m') * scale) + sum p;  o = o * e^((m - m') * scale) + v^T p
//     y = o / l,  lse = m * scale + log l
//
// Keys and values are copied once for each head. Maxima and sums of the softmax run from key to
// key, in every lane for itself: nothing is reduced across lanes, and a row's bits do not depend on
// its lane. The scores of a block (16 KiB) and q^T stay in L1; keys and values come from L2 once
// for 16 queries (AVX2), 4 bytes a cycle.
#pragma once
#include <float.h>

namespace {

constexpr int64_t kQueries = fma_tiles::kNR;  // in a tile
constexpr int64_t kQueryGrain = Vec::kLanes;  // half a tile takes half the time
constexpr int64_t kKeys = kKC;                // in a block
constexpr int kHalves = 2;                    // vectors of queries in a tile

// Where attend() keeps what, in floats of its scratch; n keys at most.
struct FlashScratch {
  int64_t E_padded, stride;  // floats from row to row of y, and of k and v
  int64_t k, v, q, s, o, y;  // offsets
  int64_t total;

  FlashScratch(int64_t n, int64_t E, Precision)
      : E_padded(round_up(E, Vec::kLanes)), stride(row_stride(E)) {
    k = 0;                        // (n, E)
    v = k + n * stride;           // (n, E)
    q = v + n * stride;           // (E, kQueries)
    s = q + E_padded * kQueries;  // (kKeys, kQueries)
    o = s + kKeys * kQueries;     // (E, kQueries)
    y = o + E_padded * kQueries;  // (kQueries, E)
    total = round_up(y + kQueries * E_padded, kLine);
  }
};

// c (M, kQueries) = or += a (M, K) times a panel (K, kQueries), of which kVectors vectors count.
// kAcross: a is (K, M).
template <int kVectors, bool kAcross>
inline void multiply_queries(const float* a, int64_t stride, int64_t M, const float* panel,
                             int64_t K, float* c, bool add) {
  constexpr int kMost = fma_tiles::head_rows(kVectors);
  const int64_t tiles = ceil_div(M, kMost);
  for (int64_t t = 0; t < tiles; ++t) {
    const Range tile = even_part(M, t, tiles);
    with_rows<kMost>(tile.end - tile.begin, [&]<int R>() {
      fma_tiles::multiply_head<R, kVectors, kAcross>(a + tile.begin * (kAcross ? 1 : stride),
                                                     stride, panel, K, c + tile.begin * kQueries,
                                                     add);
    });
  }
}
template <bool kAcross>
inline void multiply_queries(const float* a, int64_t stride, int64_t M, const float* panel,
                             int64_t K, int halves, float* c, bool add) {
  if (halves == 1)
    multiply_queries<1, kAcross>(a, stride, M, panel, K, c, add);
  else
    multiply_queries<2, kAcross>(a, stride, M, panel, K, c, add);
}

// Of the scores of kLanes queries so far: their maximum, and the sum of e^((score - maximum) *
// scale).
struct RunningSoftmax {
  Vec m = Vec::set(-INFINITY), l = Vec::set(0);

  // The next n scores s[i * kQueries] become weights, in place. Returns by what those from before
  // shrink, as their maximum was the old one.
  Vec add(float* s, int64_t n, const SoftmaxPower& power) {
    Vec top0 = m, top1 = m;
    int64_t i = 0;
    for (; i + 1 < n; i += 2) {  // a NaN loses here, and comes out through its power
      top0 = greater(Vec::load(s + i * kQueries), top0);
      top1 = greater(Vec::load(s + (i + 1) * kQueries), top1);
    }
    if (i < n) top0 = greater(Vec::load(s + i * kQueries), top0);
    const Vec now = greater(top0, top1);
    const Vec base = greater(now, Vec::set(-FLT_MAX));  // all masked: -inf - base, not NaN
    Vec sum = Vec::set(0), shrink[1] = {m - base};
    for (i = 0; i + 4 <= n; i += 4) sum = sum + weights<4>(s + i * kQueries, base, power);
    for (; i < n; ++i) sum = sum + weights<1>(s + i * kQueries, base, power);
    power(shrink);
    l = fma(l, shrink[0], sum);
    m = now;
    return shrink[0];
  }

 private:
  // Of N keys, and their sum.
  template <int N>
  static Vec weights(float* s, Vec base, const SoftmaxPower& power) {
    Vec p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p[i] = Vec::load(s + i * kQueries) - base;
    power(p);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p[i].store(s + i * kQueries);
    if constexpr (N == 4) return (p[0] + p[1]) + (p[2] + p[3]);
    return p[0];
  }
};

// Rows of any float dtype to rows of fp32. Those of qkv are far from each other: the hardware sees
// no stream in them.
inline void copy_rows(const Rows& x, int64_t n, int64_t E, float* y, int64_t stride) {
  constexpr int64_t kAhead = 8;  // rows
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t e = 0; e < E; e += kLine)
      __builtin_prefetch(offset(x.dtype, x.data, (j + kAhead) * x.stride + e), 0, 2);
    widen_row(x, j, y + j * stride, E);
  }
}

// q^T, times 1 or -1: out (E, kQueries), E rounded up to whole vectors. The lanes after the R-th
// query repeat it.
inline void pack_queries(const Rows& q, int64_t R, int64_t E, float sign, float* out) {
  constexpr int64_t L = Vec::kLanes;
  for (int64_t r = 0; r < R; r += L)
    for (int64_t e = 0; e < E; e += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i) {
        const int64_t at = min(r + i, R - 1) * q.stride + e;
        rows[i] = load_as(q.dtype, q.data, at, E - e) * Vec::set(sign);
        __builtin_prefetch(offset(q.dtype, q.data, at + kQueries * q.stride), 0, 2);  // next tile
      }
      transpose(rows);
      for (int64_t i = 0; i < L; ++i) rows[i].store(out + (e + i) * kQueries + r);
    }
}

// s (n, kQueries) = s * scale + bias^T; bias: rows of queries, of which R count.
inline void add_bias(float* s, int64_t n, float scale, const float* bias, int64_t stride,
                     int64_t R) {
  constexpr int64_t L = Vec::kLanes;
  for (int64_t r = 0; r < R; r += L)
    for (int64_t j = 0; j < n; j += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i)
        rows[i] = Vec::load(bias + min(r + i, R - 1) * stride + j, n - j);
      transpose(rows);
      for (int64_t i = 0; i < L; ++i) {
        float* const at = s + (j + i) * kQueries + r;
        fma(Vec::load(at), Vec::set(scale), rows[i]).store(at);
      }
    }
}

// Dropout of p (n, kQueries): element (i, r) is first + r * row + i of its stream.
inline void drop_scores(const Dropout& d, uint64_t first, int64_t row, float* p, int64_t n,
                        int64_t R) {
  if (!d.threshold) return;
  float line[kKeys];
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t i = 0; i < n; ++i) line[i] = p[i * kQueries + r];
    drop(d, kElements, first + static_cast<uint64_t>(r * row), line, n);
    for (int64_t i = 0; i < n; ++i) p[i * kQueries + r] = line[i];
  }
}

// Queries [queries) of a head against the keys [keys). out(i, o) takes row i of the result, (E).
template <class Out>
inline void attend(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  constexpr int64_t L = Vec::kLanes;
  const int64_t n = keys.end - keys.begin, blocks = ceil_div(n, kKeys);
  const FlashScratch at(h.S, h.E, h.precision);
  float *const k = scratch + at.k, *const v = scratch + at.v, *const q = scratch + at.q,
               *const s = scratch + at.s, *const o = scratch + at.o, *const y = scratch + at.y;
  // Maxima are those of the scores before their scale, which must not turn them round: q takes its
  // sign. With a bias the scale comes first.
  const float magnitude = fabsf(h.scale), unit = h.bias ? 1.0f : magnitude;
  const SoftmaxPower power(unit);
  copy_rows(h.k.from(keys.begin), n, h.E, k, at.stride);
  copy_rows(h.v.from(keys.begin), n, h.E, v, at.stride);

  for (int64_t i0 = queries.begin; i0 < queries.end; i0 += kQueries) {
    const int64_t R = min(kQueries, queries.end - i0);
    const int halves = static_cast<int>(ceil_div(R, L));
    pack_queries(h.q.from(i0), R, h.E, h.scale < 0 ? -1.0f : 1.0f, q);
    RunningSoftmax running[kHalves];
    for (int64_t block = 0; block < blocks; ++block) {
      const Range part = even_part(n, block, blocks);
      const int64_t J = part.end - part.begin, key = keys.begin + part.begin;
      multiply_queries<false>(k + part.begin * at.stride, at.stride, J, q, h.E, halves, s, false);
      if (h.bias) add_bias(s, J, magnitude, h.bias + i0 * h.bias_stride + key, h.bias_stride, R);
      for (int half = 0; half < halves; ++half) {
        const Vec shrink = running[half].add(s + half * L, J, power);
        if (block > 0)
          for (int64_t e = 0; e < h.E; ++e) {
            float* const to = o + e * kQueries + half * L;
            (Vec::load(to) * shrink).store(to);
          }
      }
      drop_scores(h.dropout, h.first_element + static_cast<uint64_t>(i0 * h.S + key), h.S, s, J, R);
      multiply_queries<true>(v + part.begin * at.stride, at.stride, h.E, s, J, halves, o,
                             block > 0);
    }
    for (int half = 0; half < halves; ++half) {
      const auto [m, l] = running[half];
      const Vec inverse = Vec::set(1) / l;
      for (int64_t e = 0; e < h.E; e += L) {
        Vec rows[L];
        for (int64_t i = 0; i < L; ++i)
          rows[i] = Vec::load(o + (e + i) * kQueries + half * L) * inverse;
        transpose(rows);
        for (int64_t i = 0; i < L; ++i) rows[i].store(y + (half * L + i) * at.E_padded + e);
      }
      if (!h.lse) continue;
      float tops[L], sums[L];
      m.store(tops);
      l.store(sums);
      for (int64_t i = 0; i < min(L, R - half * L); ++i)
        h.lse[i0 + half * L + i] = tops[i] == INFINITY ? tops[i] : tops[i] * unit + logf(sums[i]);
    }
    for (int64_t r = 0; r < R; ++r) out(i0 + r, y + r * at.E_padded);
  }
}

}  // namespace
