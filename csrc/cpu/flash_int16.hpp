// attend() by 16-bit integer multiply-adds, for the engine's bf16 and int8 and for operators with
// bf16 rows. Included by flash.hpp; the loops are in flash_lanes.hpp.
//
// Queries, keys, values and weights are integers times a scale, so chosen that the norms of what is
// multiplied are at most 46340 and sums are exact (integers.hpp): q and k have one for each row,
// v one for each channel of a block of keys, and p one for each query of a block. The weights of a
// block are at most 1 and add up to l, so that their squares do to no more: p's scale needs no pass
// of its own. (Dropout multiplies those that it keeps by the same factor.)
//
//   k  [key]: [pairs of channels]             q  [pair of channels][32 queries][2]
//   v  [block][pair of keys]: [channel][2]    p  [pair of keys][32 queries][2]
//
// By vpdpwssd alone: vpmaddwd and vpaddd gain no more over fp32 than rounding to integers costs.
//
// Against bf16's 2^-9.5, an element of k or q has an error of 2^-14.3 of its row's rms at E = 64.
#pragma once

namespace {

constexpr int64_t kQueries = int16_tiles::kNR;  // in a tile
constexpr int64_t kKeys = 128;                  // in a block: 16 KiB of scores

}  // namespace

#include "flash_lanes.hpp"

namespace {

struct PairFactors {
  int64_t E, n, pairs;  // channels; keys; pairs of channels
  int64_t channels;     // E in whole vectors
  int32_t *k, *v, *q, *p;
  float *k_scale, *v_scale, *q_scale, *p_scale;
  float* wide;    // (E, kQueries): queries as floats
  float largest;  // weight: 1, or what dropout makes of it

  static int64_t blocks(int64_t n) { return ceil_div(n, kKeys); }
  static int64_t floats(int64_t n, int64_t E) {
    const int64_t channels = round_up(E, Vec::kLanes), pairs = channels / 2;
    return n * pairs + (n / 2 + blocks(n)) * channels + pairs * kQueries + kKeys / 2 * kQueries +
           round_up(n, kLine) + blocks(n) * channels + 2 * kQueries + channels * kQueries +
           8 * kLine;
  }

  PairFactors(const Head& h, Range keys, float* scratch)
      : E(h.E),
        n(keys.end - keys.begin),
        channels(round_up(h.E, Vec::kLanes)),
        largest(h.dropout.threshold ? h.dropout.scale : 1) {
    pairs = channels / 2;
    const auto take = [&](int64_t count) {
      float* const here = scratch;
      scratch += round_up(count, kLine);
      return here;
    };
    const auto take_pairs = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count)); };
    k = take_pairs(n * pairs);
    v = take_pairs((n / 2 + blocks(n)) * channels);
    q = take_pairs(pairs * kQueries);
    p = take_pairs(kKeys / 2 * kQueries);
    k_scale = take(n);
    v_scale = take(blocks(n) * channels);
    q_scale = take(kQueries);
    p_scale = take(kQueries);
    wide = take(channels * kQueries);
    lay_out_keys(h.k.from(keys.begin));
    for (int64_t block = 0; block < blocks(n); ++block)
      lay_out_values(h.v.from(keys.begin), even_part(n, block, blocks(n)), block);
  }

  void lay_out_keys(const Rows& from) const {
    for (int64_t j = 0; j < n; ++j) {
      prefetch_row(from, j, E);
      k_scale[j] = int16_tiles::quantise(from.dtype, from.data, j * from.stride, E,
                                         reinterpret_cast<int16_t*>(k + j * pairs));
    }
  }

  // Lanes are channels.
  void lay_out_values(const Rows& from, Range part, int64_t block) const {
    for (int64_t j = part.begin; j < part.end; ++j) prefetch_row(from, j, E);
    int32_t* const to = v + first_pair(part, block) * channels;
    float* const scales = v_scale + block * channels;
    int16_tiles::quantise_steps<int16_tiles::kWidest>(
        from.from(part.begin), part.end - part.begin, {0, E}, [&](int64_t e) { return to + e; },
        channels, [&](int64_t e) { return scales + e; });
  }
  static int64_t first_pair(Range part, int64_t block) { return part.begin / 2 + block; }

  void take_queries(const Rows& from, int64_t R, float sign) const {
    pack_queries(from, R, E, sign, wide);
    with_rows<kQueryVectors>(ceil_div(R, Vec::kLanes), [&]<int N>() {
      constexpr int64_t L = Vec::kLanes;
      int16_tiles::quantise_columns<N>(
          [&](int64_t e, int vector) { return Vec::load(wide + e * kQueries + vector * L); },
          channels, [&](int vector) { return q + vector * L; }, kQueries,
          [&](int vector) { return q_scale + vector * L; });
    });
  }

  void multiply_keys(Range part, int vectors, float* s) const {
    multiply<false>({.a = k + part.begin * pairs,
                     .a_stride = pairs,
                     .a_scale = k_scale + part.begin,
                     .a_scale_stride = 1,
                     .b = q,
                     .b_scale = q_scale,
                     .pairs = ceil_div(E, 2),
                     .c = s,
                     .add = false,
                     .ahead = {}},
                    part.end - part.begin, vectors);
  }

  void multiply_values(Range part, int64_t block, int vectors, const RunningSoftmax* running,
                       const float* weights, float* o) const {
    constexpr int64_t L = Vec::kLanes;
    const int64_t J = part.end - part.begin;
    for (int vector = 0; vector < vectors; ++vector) {
      const Vec sum = running[vector].newest;
      const auto units = int16_tiles::Units::of(Vec::set(largest), greater(sum, Vec::set(1)), J);
      (units.unit + sum * Vec::set(0)).store(p_scale + vector * L);  // NaN stays NaN
      const float* const w = weights + vector * L;
      int32_t* to = p + vector * L;
      int64_t i = 0;
      for (; i + 1 < J; i += 2, to += kQueries)
        int16_tiles::store_pairs(Vec::load(w + i * kQueries) * units.inverse,
                                 Vec::load(w + (i + 1) * kQueries) * units.inverse, to);
      if (i < J)
        int16_tiles::store_pairs(Vec::load(w + i * kQueries) * units.inverse, Vec::set(0), to);
    }
    multiply<true>({.a = v + first_pair(part, block) * channels,
                    .a_stride = channels,
                    .a_scale = v_scale + block * channels,
                    .a_scale_stride = 1,
                    .b = p,
                    .b_scale = p_scale,
                    .pairs = ceil_div(J, 2),
                    .c = o,
                    .add = block > 0,
                    .ahead = {}},
                   E, vectors);
  }

  // c (M, kQueries) = or += a (M, 2 pairs) times a panel, of which so many vectors count.
  template <bool kAcross>
  static void multiply(const int16_tiles::Tile& all, int64_t M, int vectors) {
    const int64_t tiles = ceil_div(M, int16_tiles::kTileRows);
    const EvenParts heights(M, tiles);
    for (int64_t t = 0; t < tiles; ++t) {
      const Range rows = heights[t];
      // Not a copy of `all` that is changed: one read as a vector waits for what was written to it.
      const int16_tiles::Tile tile{.a = all.a + rows.begin * (kAcross ? 1 : all.a_stride),
                                   .a_stride = all.a_stride,
                                   .a_scale = all.a_scale + rows.begin * all.a_scale_stride,
                                   .a_scale_stride = all.a_scale_stride,
                                   .b = all.b,
                                   .b_scale = all.b_scale,
                                   .pairs = all.pairs,
                                   .c = all.c + rows.begin * kQueries,
                                   .add = all.add,
                                   .ahead = {}};
      with_rows<int16_tiles::kTileRows>(rows.end - rows.begin, [&]<int R>() {
        with_rows<kQueryVectors>(
            vectors, [&]<int kCount>() { int16_tiles::multiply_rows<R, kCount, kAcross>(tile); });
      });
    }
  }
};

using FlashScratch = LaneScratch<PairFactors>;

template <class Out>
inline void attend(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  attend_by<PairFactors>(h, queries, keys, scratch, out);
}

}  // namespace
