// attend() where each lane of a vector is a query, by factors of fp32 or of 16-bit integers.
//
//   for each tile of kQueries queries: q^T (E, kQueries) is the panel that keys are multiplied by
//     for each block of at most kKeys keys
//       s (keys, kQueries) = k q^T           keys in tiles of rows, as in a GEMM
//       m' = max(m, s);  p = e^((s - m') * scale)
//       l = l * e^((m - m') * scale) + sum p;  o = o * e^((m - m') * scale) + v^T p
//     y = o / l,  lse = m * scale + log l
//
// Keys and values are laid out once for each head. Maxima and sums of the softmax run from key to
// key, in every lane for itself: nothing is reduced across lanes, and a row's bits do not depend on
// its lane. The scores of a block (16 KiB) and q^T stay in L1; keys and values come from L2 once
// for a tile of queries.
//
// Included by the header that defines kQueries, kKeys and then its Factors, which have
//
//   Factors(head, keys, scratch)         lays out keys and values; floats(n, E): its scratch
//   take_queries(q, R, sign)             lays out a tile of queries, times 1 or -1
//   multiply_keys(part, vectors, s)      s = k q^T of a part of the keys
//   multiply_values(part, block, vectors, running, s, o)   o = or += v^T p; s holds p
#pragma once
#include <float.h>

namespace {

constexpr int64_t kQueryGrain = Vec::kLanes;  // a part of a tile takes its part of the time
constexpr int kQueryVectors = kQueries / Vec::kLanes;

// Where attend() keeps what, in floats of its scratch; n keys at most.
template <class Factors>
struct LaneScratch {
  int64_t E_padded;          // floats from row to row of y
  int64_t s, o, y, factors;  // offsets
  int64_t total;

  LaneScratch(int64_t n, int64_t E, Precision) : E_padded(round_up(E, Vec::kLanes)) {
    s = 0;                        // (kKeys, kQueries)
    o = s + kKeys * kQueries;     // (E, kQueries)
    y = o + E_padded * kQueries;  // (kQueries, E)
    factors = round_up(y + kQueries * E_padded, kLine);
    total = round_up(factors + Factors::floats(n, E), kLine);
  }
};

// Of the scores of kLanes queries so far: their maximum, and the sum of e^((score - maximum) *
// scale).
struct RunningSoftmax {
  Vec m = Vec::set(-INFINITY), l = Vec::set(0);
  Vec newest = Vec::set(0);  // the sum of the weights that came last, each at most 1

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
    newest = sum;
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

// What follows row j of keys or values, into L2. Those of qkv are far from each other: the hardware
// sees no stream in them.
inline void prefetch_row(const Rows& x, int64_t j, int64_t E) {
  constexpr int64_t kAhead = 8;  // rows
  for (int64_t e = 0; e < E; e += kLine)
    __builtin_prefetch(offset(x.dtype, x.data, (j + kAhead) * x.stride + e), 0, 2);
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
template <class Factors, class Out>
inline void attend_by(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  constexpr int64_t L = Vec::kLanes;
  const int64_t n = keys.end - keys.begin, blocks = ceil_div(n, kKeys);
  const LaneScratch<Factors> at(h.S, h.E, h.precision);
  float *const s = scratch + at.s, *const o = scratch + at.o, *const y = scratch + at.y;
  // Maxima are those of the scores before their scale, which must not turn them round: q takes its
  // sign. With a bias the scale comes first.
  const float magnitude = fabsf(h.scale), unit = h.bias ? 1.0f : magnitude;
  const SoftmaxPower power(unit);
  const Factors factors(h, keys, scratch + at.factors);

  for (int64_t i0 = queries.begin; i0 < queries.end; i0 += kQueries) {
    const int64_t R = min(kQueries, queries.end - i0);
    const int vectors = static_cast<int>(ceil_div(R, L));
    factors.take_queries(h.q.from(i0), R, h.scale < 0 ? -1.0f : 1.0f);
    RunningSoftmax running[kQueryVectors];
    for (int64_t block = 0; block < blocks; ++block) {
      const Range part = even_part(n, block, blocks);
      const int64_t J = part.end - part.begin, key = keys.begin + part.begin;
      factors.multiply_keys(part, vectors, s);
      if (h.bias) add_bias(s, J, magnitude, h.bias + i0 * h.bias_stride + key, h.bias_stride, R);
      for (int vector = 0; vector < vectors; ++vector) {
        const Vec shrink = running[vector].add(s + vector * L, J, power);
        if (block > 0)
          for (int64_t e = 0; e < h.E; ++e) {
            float* const to = o + e * kQueries + vector * L;
            (Vec::load(to) * shrink).store(to);
          }
      }
      drop_scores(h.dropout, h.first_element + static_cast<uint64_t>(i0 * h.S + key), h.S, s, J, R);
      factors.multiply_values(part, block, vectors, running, s, o);
    }
    for (int vector = 0; vector < vectors; ++vector) {
      const auto [m, l, newest] = running[vector];
      const Vec inverse = Vec::set(1) / l;
      for (int64_t e = 0; e < h.E; e += L) {
        Vec rows[L];
        for (int64_t i = 0; i < L; ++i)
          rows[i] = Vec::load(o + (e + i) * kQueries + vector * L) * inverse;
        transpose(rows);
        for (int64_t i = 0; i < L; ++i) rows[i].store(y + (vector * L + i) * at.E_padded + e);
      }
      if (!h.lse) continue;
      float tops[L], sums[L];
      m.store(tops);
      l.store(sums);
      for (int64_t i = 0; i < min(L, R - vector * L); ++i)
        h.lse[i0 + vector * L + i] = tops[i] == INFINITY ? tops[i] : tops[i] * unit + logf(sums[i]);
    }
    for (int64_t r = 0; r < R; ++r) out(i0 + r, y + r * at.E_padded);
  }
}

}  // namespace
