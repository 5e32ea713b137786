// attend() for AMX: tiles of queries times panels of keys. Included by flash.hpp.
//
//   for each tile of kQueries queries
//     for each block of kKeys keys     scores (kQueries, kKeys): 32 KiB
//       s = q k^T * scale + bias;  m' = max(m, s);  p = e^(s - m')
//       l = l * e^(m - m') + sum p;  o = o * e^(m - m') + p v
//     y = o / l,  lse = m + log l
//
// In bf16 most rows are computed by flash_amx_bf16.hpp instead.
#pragma once

namespace {

using HeadLeft = amx_tiles::Left;
constexpr int64_t kQueries = amx_tiles::kTileRows;  // in a tile
constexpr int64_t kQueryGrain = kQueries / 2;       // half a tile takes half the time
constexpr int64_t kUnitQueries = kQueryGrain;       // of flash_amx_bf16.hpp
constexpr int64_t kColumns = amx_tiles::kNR;        // of a panel: keys, or columns of the values
constexpr int64_t kKeys = 8 * kColumns;
constexpr int64_t kScoreStride = kKeys + kLine;  // rows of scores in different sets of L1

// Where attend() keeps what, in floats of its scratch; n keys at most. Of queries, scores and
// weights there is room for two units (flash_amx_bf16.hpp).
struct FlashScratch {
  int64_t k_panel, v_panel;              // floats of one panel
  int64_t q_floats, s_floats, p_floats;  // of one unit
  int64_t o_stride;                      // floats of a row
  int64_t k, v, q, s, p, o, unsafe;      // offsets
  int64_t total;

  FlashScratch(int64_t n, int64_t E, Precision precision)
      : FlashScratch(n, E, amx_tiles::head_terms_of(precision)) {}
  FlashScratch(int64_t n, int64_t E, amx_tiles::Terms terms)
      : k_panel(amx_tiles::panel_bytes(E, terms) / 4),
        v_panel(amx_tiles::panel_bytes(n, terms) / 4),
        q_floats(HeadLeft::floats(kQueries, E, terms)),
        s_floats(kQueries * kScoreStride),
        p_floats(HeadLeft::floats(kQueries, kKeys, terms)),
        o_stride(round_up(E, kColumns)) {
    k = 0;
    v = k + round_up(ceil_div(n, kColumns) * k_panel, kLine);
    q = v + round_up(ceil_div(E, kColumns) * v_panel, kLine);
    s = q + 2 * q_floats;
    p = s + 2 * s_floats;
    // Of weights in bf16 at most those of all keys and 16 queries, and a few more.
    o = p + max(2 * p_floats, (ceil_div(n, kColumns) + 4) * kTileBytes / 4);
    unsafe = o + kQueries * o_stride;
    total = unsafe + round_up(ceil_div(n, kUnitQueries) + 1, kLine);
  }
};

constexpr float kLowest = -INFINITY;

// Of a row of scores so far: their maximum, and the sum of e^(score - maximum).
struct RunningSoftmax {
  float m = kLowest, l = 0;
};

// Online softmax of the next n scores: s -> p = e^(scale * s + bias - m), in place. Returns
// e^(m_old - m_new), by which what was summed up with the old maximum shrinks.
inline float online_softmax(float* s, int64_t n, float scale, const float* bias,
                            RunningSoftmax* running) {
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
  const float block_top = top.largest(), old = running->m;
  const float now = block_top > old ? block_top : old;
  const float base = now == kLowest ? 0.0f : now;  // all masked so far: e^(-inf) = 0, not NaN
  Vec sum = Vec::set(0);
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const Vec p = exp(Vec::load(s + i, n - i) - Vec::set(base)).keep_first(n - i, 0);
    p.store(s + i, n - i);
    sum = sum + p;
  }
  const float shrink = old == kLowest ? 0.0f : expf(old - base);
  running->l = running->l * shrink + sum.sum();
  running->m = now;
  return shrink;
}

// The rows of a tile of queries whose bits are set, against the keys [keys), whose panels and those
// of their values are in scratch.
template <class Out>
inline void attend_tile(const Head& h, Range queries, uint32_t rows, Range keys,
                        const FlashScratch& at, float* scratch, const Out& out) {
  const int64_t n = keys.end - keys.begin, R = queries.end - queries.begin;
  float* const s = scratch + at.s;  // (kQueries, kKeys)
  float* const o = scratch + at.o;  // (kQueries, E)
  const amx_tiles::Terms terms = amx_tiles::head_terms_of(h.precision);
  const HeadLeft q = HeadLeft::at(scratch + at.q, h.E, terms);
  const HeadLeft p = HeadLeft::at(scratch + at.p, kKeys, terms);
  RunningSoftmax running[kQueries];
  for (int64_t r = 0; r < R; ++r) q.copy(r, h.q.from(queries.begin + r));
  for (int64_t j0 = 0; j0 < n; j0 += kKeys) {
    const int64_t J = min(kKeys, n - j0);
    for (int64_t j = 0; j < J; j += kColumns)
      amx_tiles::multiply_panel(q, R, scratch + at.k + (j0 + j) / kColumns * at.k_panel, {0, h.E},
                                {s + j, kScoreStride, false});
    for (int64_t r = 0; r < R; ++r) {
      if (!(rows >> r & 1)) continue;
      float* const row = s + r * kScoreStride;
      const int64_t key = keys.begin + j0, query = queries.begin + r;
      const float* bias = h.bias ? h.bias + query * h.bias_stride + key : nullptr;
      const float shrink = online_softmax(row, J, h.scale, bias, &running[r]);
      drop(h.dropout, kElements, h.first_element + static_cast<uint64_t>(query * h.S + key), row,
           J);
      p.close(r, row, J);
      if (j0 == 0 || shrink == 1) continue;
      for (int64_t e = 0; e < at.o_stride; e += Vec::kLanes) {
        float* const to = o + r * at.o_stride + e;
        (Vec::load(to) * Vec::set(shrink)).store(to);
      }
    }
    for (int64_t e = 0; e < h.E; e += kColumns) {
      const bool apart = j0 > 0 && terms.count == 3;
      // fp32 adds its small pairs of terms to nothing larger: not to the sum over earlier blocks.
      const Result to = apart ? Result{s, kScoreStride, false} : Result{o + e, at.o_stride, j0 > 0};
      amx_tiles::multiply_panel(p, R, scratch + at.v + e / kColumns * at.v_panel, {j0, j0 + J}, to);
      if (!apart) continue;
      for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0; i < kColumns; i += Vec::kLanes) {
          float* const sum = o + r * at.o_stride + e + i;
          (Vec::load(sum) + Vec::load(s + r * kScoreStride + i)).store(sum);
        }
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    if (!(rows >> r & 1)) continue;
    float* const row = o + r * at.o_stride;
    const auto [m, l] = running[r];
    const Vec inverse = Vec::set(1 / l);
    for (int64_t e = 0; e < at.o_stride; e += Vec::kLanes)
      (Vec::load(row + e) * inverse).store(row + e);
    out(queries.begin + r, row);
    if (h.lse) h.lse[queries.begin + r] = m == INFINITY ? m : m + logf(l);
  }
}

}  // namespace

#include "flash_amx_bf16.hpp"

namespace {

// Queries [queries) of a head against the keys [keys). out(i, o) takes row i of the result, (E).
template <class Out>
inline void attend(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  const int64_t n = keys.end - keys.begin;
  const FlashScratch at(h.S, h.E, h.precision);
  for (int64_t j = 0; j < n; j += kColumns)
    amx_tiles::pack_keys(h.k.from(keys.begin + j), n - j, h.E, h.precision,
                         scratch + at.k + j / kColumns * at.k_panel);
  for (int64_t e = 0; e < h.E; e += kColumns)
    amx_tiles::pack_values(h.v.from(keys.begin, e), n, h.E - e, h.precision,
                           scratch + at.v + e / kColumns * at.v_panel);
  const auto by_tile = [&](Range tile, uint32_t rows) {
    attend_tile(h, tile, rows, keys, at, scratch, out);
  };
  if (amx_tiles::head_terms_of(h.precision).count == 1 && !h.dropout.threshold) {
    Bf16Units units(h, queries, keys, at, scratch, out);
    units.run();
    for (int64_t t = 0; t < units.tiles(); ++t)
      if (units.unsafe(t)) by_tile(units.tile(t), units.unsafe(t));
    return;
  }
  const int64_t count = queries.end - queries.begin;
  for (int64_t t = 0; t < ceil_div(count, kQueries); ++t) {
    const Range tile = amx_tiles::query_tile(count, t);
    by_tile({queries.begin + tile.begin, queries.begin + tile.end}, UINT32_MAX);
  }
}

}  // namespace
