// attend() in bf16 for AMX: the tile unit multiplies while the vector units make weights of scores.
// Included by flash_amx.hpp, whose panels and buffers it uses.
//
// A step is 16 queries, one tile of rows, against 32 keys. While the scores of step i become
// weights, the tile unit works for its neighbours:
//
//   tile unit      tmm0..3  o += weights(i - 2) v      64 columns, for all keys of the queries
//                  tmm4, 5  scores(i + 2) = q k^T      tmm6 and 7 for what is loaded
//   vector units   scores(i) -> weights(i), sums of a query's weights in a register each
//
// Scores (2 KiB a step) and weights (1 KiB) live in rings of a few steps, so that they stay in L1
// while keys and values pass by; with those of all keys of 32 queries a head took 30 us, not 24.
//
// A weight is 2^x, x = s * scale * log2(e) + bias * log2(e), with no maximum subtracted: that is
// exact enough while the sum of a row's weights is within 2^64 of 1, bf16 having fp32's exponents.
// Other rows are left to attend_tile, row by row, so that a row's result does not depend on the
// rows beside it.
#pragma once

namespace {

constexpr float kSafeSum = 0x1p64f;

// 2^x for weights that are rounded to bf16: a cubic of the fraction (7.5e-5).
[[gnu::always_inline]] inline Vec power_of_two(Vec x) {
  const Vec f{_mm512_reduce_ps(x.v, 0x01)};  // x - floor(x)
  Vec p = fma(Vec::set(0.07802403f), f, Vec::set(0.22606707f));
  p = fma(p, f, Vec::set(0.69583399f));
  p = fma(p, f, Vec::set(0.99992513f));
  return scaled(p, x);  // which rounds x down
}

template <class Out>
class Bf16Units {
 public:
  // out(i, o): row i of the result.
  Bf16Units(const Head& h, Range queries, Range keys, const FlashScratch& at, float* scratch,
            const Out& out)
      : h_(h),
        at_(at),
        scratch_(scratch),
        out_(out),
        queries_(queries),
        first_key_(keys.begin),
        n_(keys.end - keys.begin),
        tiles_(ceil_div(queries.end - queries.begin, kUnitQueries)),
        groups_(ceil_div(n_, kColumns)),
        pairs_(ceil_div(h.E, 2 * kColumns)) {}

  void run() {
    if (h_.bias)
      run<true>();
    else
      run<false>();
  }

  int64_t tiles() const { return tiles_; }
  Range tile(int64_t t) const {
    const int64_t begin = queries_.begin + t * kUnitQueries;
    return {begin, min(queries_.end, begin + kUnitQueries)};
  }
  // The rows of tile t, as bits, that are left to attend_tile.
  uint32_t& unsafe(int64_t t) const {
    return reinterpret_cast<uint32_t*>(scratch_ + at_.unsafe)[t];
  }

 private:
  template <bool has_bias>
  void run() {
    if (!groups_) {
      for (int64_t t = 0; t < tiles_; ++t) unsafe(t) = UINT32_MAX;
      return;
    }
    const int64_t steps = tiles_ * groups_;
    Place keys, values;
    const auto next_keys = [&] {
      if (keys.step == steps) return;
      if (keys.group == 0) take_queries(keys.tile);
      multiply_keys(keys);
      keys.advance(groups_);
    };
    const auto next_values = [&] {  // true: the last of a tile's
      multiply_values(values, 0);
      values.advance(groups_);
      return values.group == 0;
    };
    for (int64_t i = 0; i < kAhead; ++i) next_keys();
    Vec sum[kUnitQueries];
    for (Place now; now.step < steps; now.advance(groups_)) {
      if (now.group == 0)
#pragma GCC unroll 16
        for (int64_t r = 0; r < kUnitQueries; ++r) sum[r] = Vec::set(0);
      const bool complete = now.step >= kAhead && next_values();
      make_weights<has_bias, 0>(now, sum);
      next_keys();
      make_weights<has_bias, kUnitQueries / 2>(now, sum);
      if (complete) finish(values.tile - 1);
      if (now.group + 1 == groups_)
#pragma GCC unroll 16
        for (int64_t r = 0; r < kUnitQueries; ++r) sums_[now.tile % kRing][r] = sum[r];
    }
    while (values.step < steps)
      if (next_values()) finish(values.tile - 1);
  }

  // A step: the keys of a group against the queries of a tile.
  struct Place {
    int64_t step = 0, tile = 0, group = 0;
    void advance(int64_t groups) {
      ++step;
      if (++group == groups) group = 0, ++tile;
    }
  };

  HeadLeft queries_of(int64_t t) const {
    return HeadLeft::at(scratch_ + at_.q + t % 2 * at_.q_floats, h_.E,
                        amx_tiles::head_terms_of(h_.precision));
  }
  void take_queries(int64_t t) const {
    const HeadLeft q = queries_of(t);
    const Range some = tile(t);
    for (int64_t r = 0; r < kUnitQueries; ++r)  // the last one again where there are no more
      q.copy(r, h_.q.from(min(some.begin + r, some.end - 1)));
  }

  float* scores(int64_t step) const { return scratch_ + at_.s + step % kRing * kStepFloats; }
  // Weights of all keys of a tile are kept where there are more columns than o has accumulators.
  char* weights(int64_t step) const {
    const int64_t slot = pairs_ > 1 ? step % (groups_ + kRing) : step % kRing;
    return reinterpret_cast<char*>(scratch_ + at_.p) + slot * kTileBytes;
  }

  void multiply_keys(const Place& at) const {
    const char* a = queries_of(at.tile).data;
    const char* b = reinterpret_cast<const char*>(scratch_ + at_.k + at.group * at_.k_panel);
    tile_zero<4>(), tile_zero<5>();
    for (int64_t k = ceil_div(h_.E, amx_tiles::kSteps); k > 0; --k) {
      tile_load<6>(a);
      tile_stream<7>(b);
      tile_dot<false, 4, 6, 7>();
      tile_stream<7>(b + kTileBytes);
      tile_dot<false, 5, 6, 7>();
      a += amx_tiles::kPairBytes, b += amx_tiles::kPairBytes;
    }
    float* const to = scores(at.step);
    tile_store<4>(to, 4 * kColumns), tile_store<5>(to + 16, 4 * kColumns);
  }

  // What a step's keys add to 64 columns of o, or to the 32 that are left.
  void multiply_values(const Place& at, int64_t pair) const {
    const bool two = h_.E - pair * 2 * kColumns > kColumns;
    const auto* const v = reinterpret_cast<const char*>(scratch_ + at_.v + pair * 2 * at_.v_panel) +
                          at.group * amx_tiles::kPairBytes;
    if (at.group == 0) {
      tile_zero<0>(), tile_zero<1>();
      if (two) tile_zero<2>(), tile_zero<3>();
    }
    tile_load<6>(weights(at.step));
    tile_stream<7>(v);
    tile_dot<false, 0, 6, 7>();
    tile_stream<7>(v + kTileBytes);
    tile_dot<false, 1, 6, 7>();
    if (two) {
      const char* const next = v + at_.v_panel * 4;
      tile_stream<7>(next);
      tile_dot<false, 2, 6, 7>();
      tile_stream<7>(next + kTileBytes);
      tile_dot<false, 3, 6, 7>();
    }
    if (at.group + 1 < groups_) return;
    float* const o = scratch_ + at_.o + pair * 2 * kColumns;
    const int64_t stride = 4 * at_.o_stride;
    tile_store<0>(o, stride), tile_store<1>(o + 16, stride);
    if (two) tile_store<2>(o + 32, stride), tile_store<3>(o + 48, stride);
  }

  // Half of a step's rows, from `first` on: scores to weights in bf16.
  template <bool has_bias, int64_t first>
  [[gnu::always_inline]] void make_weights(const Place& at, Vec* sum) const {
    if (n_ - at.group * kColumns >= kColumns)
      make_weights<has_bias, first, false>(at, sum);
    else
      make_weights<has_bias, first, true>(at, sum);
  }
  template <bool has_bias, int64_t first, bool partial>
  [[gnu::always_inline]] void make_weights(const Place& at, Vec* sum) const {
    constexpr float kLog2e = 1.44269504f;
    const int64_t key = at.group * kColumns, left = n_ - key;
    const Range some = tile(at.tile);
    const Vec factor = Vec::set(h_.scale * kLog2e), log2e = Vec::set(kLog2e);
    const float* const from = scores(at.step);
    char* const to = weights(at.step);
#pragma GCC unroll 8
    for (int64_t r = first; r < first + kUnitQueries / 2; ++r) {
      const int64_t query = min(some.begin + r, some.end - 1);
      Vec x[2];
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        x[i] = Vec::load(from + r * kColumns + i * 16) * factor;
        if constexpr (has_bias) {
          const float* const bias = h_.bias + query * h_.bias_stride + first_key_ + key + i * 16;
          if (!partial)
            x[i] = fma(Vec::load(bias), log2e, x[i]);
          else if (left > i * 16)
            x[i] = fma(Vec::load(bias, left - i * 16), log2e, x[i]);
        }
        x[i] = power_of_two(x[i]);
        if constexpr (partial)  // zeros beyond the last key
          x[i].v = _mm512_maskz_mov_ps(left > i * 16 ? Vec::first(left - i * 16) : 0, x[i].v);
      }
      sum[r] = sum[r] + (x[0] + x[1]);
      _mm512_store_si512(to + r * kTileStride, bf16_pair(x[0], x[1]));
    }
  }

  // Tile t, whose first columns of o are complete.
  void finish(int64_t t) const {
    for (int64_t pair = 1; pair < pairs_; ++pair)
      for (int64_t g = 0; g < groups_; ++g) multiply_values({t * groups_ + g, t, g}, pair);
    const Range some = tile(t);
    uint32_t left = 0;
    for (int64_t r = 0; r < some.end - some.begin; ++r) {
      const float l = sums_[t % kRing][r].sum();
      if (!(l > 1 / kSafeSum && l < kSafeSum)) {
        left |= 1u << r;
        continue;
      }
      float* const row = scratch_ + at_.o + r * at_.o_stride;
      const Vec inverse = Vec::set(1 / l);
      for (int64_t e = 0; e < at_.o_stride; e += Vec::kLanes)
        (Vec::load(row + e) * inverse).store(row + e);
      out_(some.begin + r, row);
      if (h_.lse) h_.lse[some.begin + r] = logf(l);
    }
    unsafe(t) = left;
  }

  static constexpr int64_t kAhead = 2, kRing = 4;  // steps
  static constexpr int64_t kStepFloats = kUnitQueries * kColumns;
  const Head& h_;
  const FlashScratch& at_;
  float* const scratch_;
  const Out& out_;
  const Range queries_;
  const int64_t first_key_, n_, tiles_, groups_, pairs_;  // pairs of panels of values
  Vec sums_[kRing][kUnitQueries];  // of weights: a tile is finished after the next one has begun
};

}  // namespace
