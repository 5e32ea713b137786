// The tile unit's inner loops: 32 rows of A times a panel of W, over all steps of K, two by two
// tiles at once (tiles_amx.hpp draws them). Terms are multiplied pair by pair.
#pragma once
#include "between_amx.hpp"
#include "terms_amx.hpp"

namespace {
namespace amx_tiles {

// C += A[i] B[j] for one tile of steps and one pair of terms (i, j). `rows` is 1 or 2: tiles of
// rows. A factor that is the same as for the pair before is not loaded again. All loads come before
// the multiplications: a GEMM is a tenth slower with each load just before its first use.
template <int rows, bool load_a, bool load_b, bool halves = false>
inline void multiply_term(const char* a, const char* b) {
  if constexpr (load_b) tile_stream<6>(b), tile_stream<7>(b + kTileBytes);
  if constexpr (load_a) tile_load<4>(a);
  if constexpr (load_a && rows == 2) tile_load<5>(a + kTileBytes);
  tile_dot<halves, 0, 4, 6>(), tile_dot<halves, 1, 4, 7>();
  if constexpr (rows == 2) tile_dot<halves, 2, 5, 6>(), tile_dot<halves, 3, 5, 7>();
}

// The three pairs of two terms of fp16 that matter. A factor is loaded as soon as its tile is free:
// 6 % faster than before its first use.
template <int rows>
inline void multiply_halves(const char* a, const char* b) {
  constexpr int64_t lo = kPairBytes;
  constexpr bool below = rows == 2;
  tile_load<6>(b), tile_load<4>(a + lo), tile_load<7>(b + kTileBytes);
  if constexpr (below) tile_load<5>(a + lo + kTileBytes);
  tile_dot<true, 0, 4, 6>(), tile_dot<true, 1, 4, 7>();
  tile_load<4>(a);
  if constexpr (below) tile_dot<true, 2, 5, 6>(), tile_dot<true, 3, 5, 7>();
  if constexpr (below) tile_load<5>(a + kTileBytes);
  tile_dot<true, 0, 4, 6>();
  if constexpr (below) tile_dot<true, 2, 5, 6>();
  tile_stream<6>(b + lo);
  tile_dot<true, 1, 4, 7>();
  if constexpr (below) tile_dot<true, 3, 5, 7>();
  tile_stream<7>(b + lo + kTileBytes);
  tile_dot<true, 0, 4, 6>(), tile_dot<true, 1, 4, 7>();
  if constexpr (below) tile_dot<true, 2, 5, 6>(), tile_dot<true, 3, 5, 7>();
}

template <int rows, Terms terms>
inline void multiply_step(const char* a, const char* b) {
  constexpr int64_t hi = 0, mid = kPairBytes, lo = 2 * kPairBytes;
  if constexpr (terms.count == 1) {
    multiply_term<rows, true, true, terms.halves>(a, b);
  } else if constexpr (terms.halves) {
    multiply_halves<rows>(a, b);
  } else if constexpr (terms.count == 2) {
    multiply_term<rows, true, true>(a + mid, b + hi);
    multiply_term<rows, true, false>(a + hi, b + hi);
    multiply_term<rows, false, true>(a + hi, b + mid);
  } else {
    multiply_term<rows, true, true>(a + lo, b + hi);
    multiply_term<rows, true, false>(a + mid, b + hi);
    multiply_term<rows, false, true>(a + mid, b + mid);
    multiply_term<rows, true, false>(a + hi, b + mid);
    multiply_term<rows, false, true>(a + hi, b + lo);
  }
}

// Tiles of steps of A and of a panel of W, and whether they are walked from the last to the first.
struct Steps {
  const char *a, *b;
  int64_t tiles;
  bool backwards;
};

// The accumulators: zero, or what is in c (32 or 16 rows, 32) already.
template <int rows>
[[gnu::always_inline]] inline void begin_tiles(const Result& from) {
  const int64_t bytes = from.stride * 4, below = 16 * from.stride;
  if (from.add) {
    tile_load<0>(from.c, bytes), tile_load<1>(from.c + 16, bytes);
    if constexpr (rows == 2)
      tile_load<2>(from.c + below, bytes), tile_load<3>(from.c + below + 16, bytes);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (rows == 2) tile_zero<2>(), tile_zero<3>();
  }
}
template <int rows>
[[gnu::always_inline]] inline void store_tiles(const Result& to) {
  const int64_t bytes = to.stride * 4, below = 16 * to.stride;
  tile_store<0>(to.c, bytes), tile_store<1>(to.c + 16, bytes);
  if constexpr (rows == 2)
    tile_store<2>(to.c + below, bytes), tile_store<3>(to.c + below + 16, bytes);
}

// The same, added to what is there.
template <int rows>
[[gnu::noinline]] inline void add_tiles(const Result& to) {
  alignas(64) float part[kTileRows * kNR];
  store_tiles<rows>({part, kNR, false});
  for (int64_t r = 0; r < 16 * rows; ++r)
    for (int64_t i = 0; i < kNR; i += Vec::kLanes) {
      float* const sum = to.c + r * to.stride + i;
      (Vec::load(sum) + Vec::load(part + r * kNR + i)).store(sum);
    }
}
// Of a long K: stores or adds what the accumulators have, and begins them anew.
constexpr int64_t kLongestSum = 64;  // tiles of steps: fp16's error grows with their root
template <int rows>
[[gnu::noinline]] inline void begin_part(const Result& to, bool first) {
  if (first)
    store_tiles<rows>(to);
  else
    add_tiles<rows>(to);
  begin_tiles<rows>({to.c, to.stride, false});
}

// The steps of A times those of a panel, added to what `from` says, to `to`: 32 or 16 rows of 32
// columns. between() runs at each step.
template <int rows, Terms terms, class Between>
inline void multiply_tiles(const Steps& steps, const Result& from, const Result& to,
                           Between& between) {
  const char *a = steps.a, *b = steps.b;
  const int64_t tiles = steps.tiles;
  begin_tiles<rows>(from);
  int64_t step = terms.count * kPairBytes;
  if (steps.backwards && tiles) {
    a += (tiles - 1) * step;
    b += (tiles - 1) * step;
    step = -step;
  }
  for (int64_t k = 0; k < tiles; ++k, a += step, b += step) {
    if constexpr (terms.halves)
      if (k && k % kLongestSum == 0) begin_part<rows>(to, k == kLongestSum);
    multiply_step<rows, terms>(a, b);
    between();
  }
  if constexpr (terms.count == 3)  // hi hi last, and back the way it came
    for (int64_t k = 0; k < tiles; ++k) {
      a -= step;
      b -= step;
      multiply_term<rows, true, true>(a, b);
    }
  if constexpr (terms.halves)
    if (tiles > kLongestSum) return add_tiles<rows>(to);
  store_tiles<rows>(to);
}

template <Terms terms, class Between>
inline void multiply_block(int64_t R, const Steps& steps, const Result& from, const Result& to,
                           Between& between) {
  if (R > 16)
    multiply_tiles<2, terms>(steps, from, to, between);
  else
    multiply_tiles<1, terms>(steps, from, to, between);
}

// The same, not inlined: so all that `work` is has registers. Returns what is left to fetch.
template <Terms terms, class Between>
[[gnu::always_inline]] inline Fetch multiply_between(int64_t R, const Steps& steps,
                                                     const Result& from, const Result& to,
                                                     const Between& work) {
  Between between = work;
  multiply_block<terms>(R, steps, from, to, between);
  between.finish();
  return between.fetch;
}

}  // namespace amx_tiles
}  // namespace
