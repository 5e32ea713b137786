// attend() by fp32 multiply-adds. Included by flash.hpp; the loops are in flash_lanes.hpp.
#pragma once

namespace {

constexpr int64_t kQueries = fma_tiles::kNR;  // in a tile
constexpr int64_t kKeys = kKC;                // in a block

}  // namespace

#include "flash_lanes.hpp"

namespace {

// c (M, kQueries) = or += a (M, K) times a panel (K, kQueries), of which kVectors vectors count.
// kAcross: a is (K, M).
template <int kVectors, bool kAcross>
inline void multiply_queries(const float* a, int64_t stride, int64_t M, const float* panel,
                             int64_t K, float* c, bool add) {
  constexpr int kMost = fma_tiles::head_rows(kVectors);
  const int64_t tiles = ceil_div(M, kMost);
  const EvenParts heights(M, tiles);
  for (int64_t t = 0; t < tiles; ++t) {
    const Range tile = heights[t];
    with_rows<kMost>(tile.end - tile.begin, [&]<int R>() {
      fma_tiles::multiply_head<R, kVectors, kAcross>(a + tile.begin * (kAcross ? 1 : stride),
                                                     stride, panel, K, c + tile.begin * kQueries,
                                                     add);
    });
  }
}
template <bool kAcross>
inline void multiply_queries(const float* a, int64_t stride, int64_t M, const float* panel,
                             int64_t K, int vectors, float* c, bool add) {
  if (vectors == 1)
    multiply_queries<1, kAcross>(a, stride, M, panel, K, c, add);
  else
    multiply_queries<2, kAcross>(a, stride, M, panel, K, c, add);
}

// Rows of any float dtype to rows of fp32.
inline void copy_rows(const Rows& x, int64_t n, int64_t E, float* y, int64_t stride) {
  for (int64_t j = 0; j < n; ++j) {
    prefetch_row(x, j, E);
    widen_row(x, j, y + j * stride, E);
  }
}

struct FloatFactors {
  int64_t E, stride;  // floats from row to row of k and v
  float *k, *v, *q;   // (n, E), (n, E), (E, kQueries)

  static int64_t floats(int64_t n, int64_t E) {
    return 2 * n * row_stride(E) + round_up(E, Vec::kLanes) * kQueries;
  }
  FloatFactors(const Head& h, Range keys, float* scratch) : E(h.E), stride(row_stride(h.E)) {
    const int64_t n = keys.end - keys.begin;
    k = scratch;
    v = k + n * stride;
    q = v + n * stride;
    copy_rows(h.k.from(keys.begin), n, E, k, stride);
    copy_rows(h.v.from(keys.begin), n, E, v, stride);
  }
  void take_queries(const Rows& from, int64_t R, float sign) const {
    pack_queries(from, R, E, sign, q);
  }
  void multiply_keys(Range part, int vectors, float* s) const {
    multiply_queries<false>(k + part.begin * stride, stride, part.end - part.begin, q, E, vectors,
                            s, false);
  }
  void multiply_values(Range part, int64_t block, int vectors, const RunningSoftmax*,
                       const float* p, float* o) const {
    multiply_queries<true>(v + part.begin * stride, stride, E, p, part.end - part.begin, vectors, o,
                           block > 0);
  }
};

using FlashScratch = LaneScratch<FloatFactors>;

template <class Out>
inline void attend(const Head& h, Range queries, Range keys, float* scratch, const Out& out) {
  attend_by<FloatFactors>(h, queries, keys, scratch, out);
}

}  // namespace
