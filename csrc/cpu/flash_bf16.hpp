// attend() by bf16 multiply-adds. Included by flash.hpp; the loops are in flash_lanes.hpp.
//
// Queries, keys, values and the weights of a block are rounded to bf16, as PyTorch's are; scores,
// maxima and sums are fp32.
//
//   k  [key]: [pairs of channels]             q  [pair of channels][32 queries][2]
//   v  [block][pair of keys]: [channel][2]    p  [pair of keys][32 queries][2]
#pragma once

namespace {

constexpr int64_t kQueries = bf16_tiles::kNR;  // in a tile
constexpr int64_t kKeys = 128;                 // in a block: 16 KiB of scores

}  // namespace

#include "flash_lanes.hpp"

namespace {

struct Bf16Factors {
  int64_t E, channels, row;  // channels; in whole vectors; bytes of a key
  char *k, *v, *q, *p;

  static int64_t blocks(int64_t n) { return ceil_div(n, kKeys); }
  static int64_t floats(int64_t n, int64_t E) {
    const int64_t channels = round_up(E, 32);
    return (n * channels / 2) + (n / 2 + blocks(n)) * channels + channels / 2 * kQueries +
           kKeys / 2 * kQueries + 4 * kLine;
  }

  Bf16Factors(const Head& h, Range keys, float* scratch)
      : E(h.E), channels(round_up(h.E, 32)), row(channels * 2) {
    const int64_t n = keys.end - keys.begin;
    const auto take = [&](int64_t floats) {
      char* const here = reinterpret_cast<char*>(scratch);
      scratch += round_up(floats, kLine);
      return here;
    };
    k = take(n * channels / 2);
    v = take((n / 2 + blocks(n)) * channels);
    q = take(channels / 2 * kQueries);
    p = take(kKeys / 2 * kQueries);
    const Rows from_k = h.k.from(keys.begin), from_v = h.v.from(keys.begin);
    for (int64_t j = 0; j < n; ++j) {
      prefetch_row(from_k, j, E);
      for (int64_t e = 0; e < E; e += 32)
        _mm512_storeu_si512(
            k + j * row + e * 2,
            bf16_tiles::load_elements(from_k.dtype, from_k.data, j * from_k.stride + e, E - e));
    }
    for (int64_t block = 0; block < blocks(n); ++block)
      lay_out_values(from_v, even_part(n, block, blocks(n)), block);
  }

  // The second of an odd number's last pair is zero.
  void lay_out_values(const Rows& from, Range part, int64_t block) const {
    char* to = values(part, block);
    for (int64_t j = part.begin; j < part.end; j += 2, to += channels * 4) {
      prefetch_row(from, j, E);
      prefetch_row(from, j + 1, E);
      for (int64_t e = 0; e < E; e += Vec::kLanes) {
        const auto load = [&](int64_t key) {
          return key < part.end ? load_as(from.dtype, from.data, key * from.stride + e, E - e)
                                : Vec::set(0);
        };
        _mm512_storeu_si512(to + e * 4, bf16_tiles::paired(load(j), load(j + 1)));
      }
    }
  }
  char* values(Range part, int64_t block) const {
    return v + (part.begin / 2 + block) * channels * 4;
  }

  // Lanes without a query are zero, and nobody reads their scores.
  void take_queries(const Rows& from, int64_t R, float sign) const {
    bf16_tiles::pack_rows(from, R, E, q);
    if (sign > 0) return;
    const __m512i minus = _mm512_set1_epi32(static_cast<int>(0x80008000u));
    for (int64_t at = 0; at < bf16_tiles::panel_bytes(E); at += 64)
      _mm512_storeu_si512(q + at, _mm512_xor_si512(_mm512_loadu_si512(q + at), minus));
  }

  void multiply_keys(Range part, int vectors, float* s) const {
    multiply<false>({.a = k + part.begin * row,
                     .a_stride = row,
                     .b = q,
                     .K = round_up(E, 2),
                     .c = s,
                     .add = false,
                     .ahead = {}},
                    part.end - part.begin, vectors);
  }

  void multiply_values(Range part, int64_t block, int vectors, const RunningSoftmax*,
                       const float* weights, float* o) const {
    const int64_t J = part.end - part.begin;
    for (int64_t j = 0; j < J; j += 2)
      for (int64_t r = 0; r < vectors * Vec::kLanes; r += Vec::kLanes) {
        const float* const w = weights + j * kQueries + r;
        _mm512_storeu_si512(
            p + (j / 2 * kQueries + r) * 4,
            bf16_tiles::paired(Vec::load(w), j + 1 < J ? Vec::load(w + kQueries) : Vec::set(0)));
      }
    multiply<true>({.a = values(part, block),
                    .a_stride = channels * 4,
                    .b = p,
                    .K = J,
                    .c = o,
                    .add = block > 0,
                    .ahead = {}},
                   E, vectors);
  }

  // c (M, kQueries) = or += a (M, K) times a panel, of which so many vectors count.
  template <bool kAcross>
  static void multiply(const bf16_tiles::Tile& all, int64_t M, int vectors) {
    const int64_t tiles = ceil_div(M, bf16_tiles::kTileRows);
    const EvenParts heights(M, tiles);
    for (int64_t t = 0; t < tiles; ++t) {
      const Range rows = heights[t];
      bf16_tiles::Tile tile = all;
      tile.a += rows.begin * (kAcross ? 4 : all.a_stride);
      tile.c += rows.begin * kQueries;
      with_rows<bf16_tiles::kTileRows>(rows.end - rows.begin, [&]<int R>() {
        with_rows<kQueryVectors>(
            vectors, [&]<int kCount>() { bf16_tiles::multiply_rows<R, kCount, kAcross>(tile); });
      });
    }
  }
};

using FlashScratch = LaneScratch<Bf16Factors>;

template <class Out>
inline void attend(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  attend_by<Bf16Factors>(h, queries, keys, scratch, out);
}

}  // namespace
