// attend() in bf16 for AMX: the tile unit multiplies while the vector units make weights of scores.
// Included by flash_amx.hpp, whose tiles, panels and buffers it uses.
//
// A unit is a tile of kQueries queries against a block of at most kKeys keys. While the scores of
// unit u become weights, row by row, a step of the tile unit stands between the rows:
//
//   tile unit     weights(u - 1) v   q k^T of (u + 1)
//   vector units            scores(u) -> weights(u)
//
// A weight is 2^x, x = s * scale * log2(e) + bias * log2(e), with no maximum subtracted: that is
// exact enough while |x| < kSafeExponent, bf16 having fp32's exponents. Rows with a larger one are
// left to attend_tile, row by row, so that a row's result does not depend on the rows beside it.
#pragma once

namespace {

constexpr float kSafeExponent = 100;

// 2^x for weights that are rounded to bf16: a polynomial of degree 4 in the fraction (3e-6).
inline Vec power_of_two(Vec x) {
  const Vec f{_mm512_reduce_ps(x.v, 0x01)};  // x - floor(x)
  Vec p = fma(Vec::set(0.013534166850149632f), f, Vec::set(0.052011460065841675f));
  p = fma(p, f, Vec::set(0.2414427548646927f));
  p = fma(p, f, Vec::set(0.6930038332939148f));
  p = fma(p, f, Vec::set(1.0000026226043701f));
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
        blocks_(max(1, ceil_div(n_, kKeys))),
        tiles_(ceil_div(queries.end - queries.begin, kQueries)) {}

  void run() {
    if (!tiles_) return;
    Unit before{}, now{}, after = unit(0, 0);
    take_queries(after);
    for (int64_t j = 0; j < after.groups; ++j) multiply_keys(after, j);
    const int64_t units = tiles_ * blocks_, panels = ceil_div(h_.E, kColumns);
    for (int64_t u = 0, tile = 0, block = 0; u <= units; ++u) {
      before = now;
      now = after;
      if (++block == blocks_) block = 0, ++tile;
      after = u + 1 < units ? unit(tile, block) : Unit{};
      if (after.rows && block == 0) take_queries(after);
      // The tile unit's steps: values of the unit before, then keys of the unit after.
      const int64_t steps = panels * before.groups + after.groups;
      int64_t step = 0, panel = 0, group = 0;
      const auto until = [&](int64_t end) {
        for (; step < end; ++step) {
          if (panel < panels && before.rows)
            multiply_values(before, panel, group);
          else
            multiply_keys(after, group);
          if (++group == before.groups && panel < panels) group = 0, ++panel;
        }
      };
      for (int64_t r = 0; r < now.rows; ++r) {
        until(steps * (r + 1) / now.rows);
        make_weights(now, r);
      }
      until(steps);
      if (before.rows && before.is_last) finish(before);
    }
  }

  int64_t tiles() const { return tiles_; }
  Range tile(int64_t t) const {
    const Range some = amx_tiles::query_tile(queries_.end - queries_.begin, t);
    return {queries_.begin + some.begin, queries_.begin + some.end};
  }
  // The rows of tile t, as bits, that are left to attend_tile.
  uint32_t& unsafe(int64_t t) const {
    return reinterpret_cast<uint32_t*>(scratch_ + at_.unsafe)[t];
  }

 private:
  struct Unit {
    int64_t tile, first, rows;  // queries; none: there is no such unit
    int64_t key, keys, groups;  // from the first of all; of kColumns
    bool is_first, is_last;     // of the tile's
    HeadLeft q;
    float* s;  // (kQueries, kKeys), rows by kScoreStride
    char* p;   // the same in tile order
  };

  Unit unit(int64_t t, int64_t block) const {
    const Range some = tile(t);
    const int64_t key = block * kKeys, keys = min(n_ - key, kKeys), odd = (t * blocks_ + block) % 2;
    return {.tile = t,
            .first = some.begin,
            .rows = some.end - some.begin,
            .key = key,
            .keys = keys,
            .groups = ceil_div(keys, kColumns),
            .is_first = block == 0,
            .is_last = block + 1 == blocks_,
            .q = HeadLeft::at(scratch_ + at_.q + t % 2 * at_.q_floats, h_.E, h_.precision),
            .s = scratch_ + at_.s + odd * at_.s_floats,
            .p = reinterpret_cast<char*>(scratch_ + at_.p + odd * at_.p_floats)};
  }

  void take_queries(const Unit& u) const {
    unsafe(u.tile) = 0;
    for (int64_t r = 0; r < u.rows; ++r) u.q.copy(r, h_.q.from(u.first + r));
  }

  // Scores of 32 keys: s (32, 32) = q k^T.
  void multiply_keys(const Unit& u, int64_t group) const {
    const float* const panel = scratch_ + at_.k + (u.key / kColumns + group) * at_.k_panel;
    const Result to{u.s + group * kColumns, kScoreStride, false};
    const auto nothing = [] {};
    amx_tiles::multiply_block<1>(
        u.rows,
        {u.q.data, reinterpret_cast<const char*>(panel), ceil_div(h_.E, amx_tiles::kSteps), false},
        to, to, nothing);
  }

  // What 32 keys add to o (32, 32): its accumulators stay in their tiles until the last of them.
  void multiply_values(const Unit& u, int64_t panel, int64_t group) const {
    if (u.rows > kQueries / 2)
      multiply_values<2>(u, panel, group);
    else
      multiply_values<1>(u, panel, group);
  }
  template <int rows>
  void multiply_values(const Unit& u, int64_t panel, int64_t group) const {
    const Result o{scratch_ + at_.o + panel * kColumns, at_.o_stride, !u.is_first};
    const float* const values = scratch_ + at_.v + panel * at_.v_panel;
    if (group == 0) amx_tiles::begin_tiles<rows>(o);
    amx_tiles::multiply_step<rows, 1>(
        u.p + group * amx_tiles::kPairBytes,
        reinterpret_cast<const char*>(values) + (u.key / kColumns + group) * amx_tiles::kPairBytes);
    if (group + 1 == u.groups) amx_tiles::store_tiles<rows>(o);
  }

  // Row r of unit u: scores to weights, in bf16 and in the order of tiles.
  void make_weights(const Unit& u, int64_t r) {
    constexpr float kLog2e = 1.44269504f;
    const int64_t J = u.keys, query = u.first + r;
    const float* const row = u.s + r * kScoreStride;
    char* to = u.p + r / 16 * kTileBytes + r % 16 * kTileStride;
    const float* const bias =
        h_.bias ? h_.bias + query * h_.bias_stride + first_key_ + u.key : nullptr;
    const Vec factor = Vec::set(h_.scale * kLog2e);
    Vec top = Vec::set(0), sum[2] = {Vec::set(0), Vec::set(0)};
    const auto exponent = [&](int64_t j) {
      const Vec x = Vec::load(row + j) * factor;
      return bias ? fma(Vec::load(bias + j, J - j), Vec::set(kLog2e), x) : x;
    };
    const auto store = [&](Vec first, Vec second) {
      sum[0] = sum[0] + first;
      sum[1] = sum[1] + second;
      _mm512_store_si512(to, bf16_pair(first, second));
      to += amx_tiles::kPairBytes;
    };
    if (u.is_last) expect_next_head(query);
    int64_t j = 0;
    for (; j + kColumns <= J; j += kColumns) {
      const Vec x = exponent(j), y = exponent(j + 16);
      top.v = _mm512_range_ps(_mm512_range_ps(top.v, x.v, kLargerSize), y.v, kLargerSize);
      store(power_of_two(x), power_of_two(y));
    }
    if (j < J) {  // zeros beyond the last key
      const Vec x = exponent(j).keep_first(J - j, 0);
      top.v = _mm512_range_ps(top.v, x.v, kLargerSize);
      Vec first = power_of_two(x).keep_first(J - j, 0), second = Vec::set(0);
      if (J - j > 16) {
        const Vec y = exponent(j + 16).keep_first(J - j - 16, 0);
        top.v = _mm512_range_ps(top.v, y.v, kLargerSize);
        second = power_of_two(y).keep_first(J - j - 16, 0);
      }
      store(first, second);
    }
    float& l = l_[u.tile % 2][r];
    l = (u.is_first ? 0 : l) + (sum[0] + sum[1]).sum();
    const bool safe =
        _mm512_cmp_ps_mask(top.v, _mm512_set1_ps(kSafeExponent), _CMP_LT_OQ) == 0xffff;
    unsafe(u.tile) |= static_cast<uint32_t>(!safe) << r;
  }

  // The next head's columns stand beside this one's, a row of qkv apart from each other: nothing
  // but this fetches them.
  void expect_next_head(int64_t i) const {
    const Rows* const parts[] = {&h_.q, &h_.k, &h_.v};
    for (const Rows* const part : parts)
      for (int64_t e = 0; e < h_.E; e += 2 * kLine)
        __builtin_prefetch(offset(part->dtype, part->data, i * part->stride + h_.E + e), 0, 2);
  }

  void finish(const Unit& u) const {
    for (int64_t r = 0; r < u.rows; ++r) {
      if (unsafe(u.tile) >> r & 1) continue;
      float* const row = scratch_ + at_.o + r * at_.o_stride;
      const float l = l_[u.tile % 2][r];
      const Vec inverse = Vec::set(1 / l);
      for (int64_t e = 0; e < at_.o_stride; e += Vec::kLanes)
        (Vec::load(row + e) * inverse).store(row + e);
      out_(u.first + r, row);
      if (h_.lse) h_.lse[u.first + r] = logf(l);
    }
  }

  static constexpr int kLargerSize = 0x0b;  // vrangeps: the larger of both magnitudes, positive
  const Head& h_;
  const FlashScratch& at_;
  float* const scratch_;
  const Out& out_;
  const Range queries_;
  const int64_t first_key_, n_, blocks_, tiles_;
  float l_[2][kQueries];  // sums of weights: a tile is finished after the next one has begun
};

}  // namespace
