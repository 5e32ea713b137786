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
        units_(ceil_div(queries.end - queries.begin, kQueries) * blocks_),
        panels_(ceil_div(h.E, kColumns)) {}

  void run() {
    if (!units_) return;
    take_queries(0);
    for (int64_t j = 0; j < groups(0); ++j) multiply_keys(0, j);
    for (int64_t u = 0; u <= units_; ++u) {
      const bool before = u > 0, after = u + 1 < units_;
      if (after && (u + 1) % blocks_ == 0) take_queries((u + 1) / blocks_);
      const int64_t values = before ? panels_ * groups(u - 1) : 0;
      const int64_t steps = values + (after ? groups(u + 1) : 0);
      const int64_t rows = u < units_ ? tile(u / blocks_).end - tile(u / blocks_).begin : 0;
      int64_t step = 0;
      const auto until = [&](int64_t end) {
        for (; step < end; ++step)
          step < values ? multiply_values(u - 1, step) : multiply_keys(u + 1, step - values);
      };
      for (int64_t r = 0; r < rows; ++r) {
        until(steps * (r + 1) / rows);
        make_weights(u, r);
      }
      until(steps);
      if (before && u % blocks_ == 0) finish(u / blocks_ - 1);
    }
  }

  int64_t tiles() const { return units_ / blocks_; }
  Range tile(int64_t t) const {
    const Range some = amx_tiles::query_tile(queries_.end - queries_.begin, t);
    return {queries_.begin + some.begin, queries_.begin + some.end};
  }
  // The rows of tile t, as bits, that are left to attend_tile.
  uint32_t& unsafe(int64_t t) const {
    return reinterpret_cast<uint32_t*>(scratch_ + at_.unsafe)[t];
  }

 private:
  bool both_halves(int64_t u) const {
    const Range some = tile(u / blocks_);
    return some.end - some.begin > kQueries / 2;
  }
  // The keys of unit u, from the first of all.
  Range block(int64_t u) const {
    const int64_t i = u % blocks_;
    return {i * kKeys, min(n_, (i + 1) * kKeys)};
  }
  int64_t groups(int64_t u) const {  // of kColumns keys
    const Range keys = block(u);
    return ceil_div(keys.end - keys.begin, kColumns);
  }

  HeadLeft q(int64_t t) const {
    return HeadLeft::at(scratch_ + at_.q + t % 2 * at_.q_floats, h_.E, h_.precision);
  }
  float* s(int64_t u) const { return scratch_ + at_.s + u % 2 * at_.s_floats; }
  char* p(int64_t u) const {
    return reinterpret_cast<char*>(scratch_ + at_.p + u % 2 * at_.p_floats);
  }
  float* o() const { return scratch_ + at_.o; }

  void take_queries(int64_t t) const {
    const Range some = tile(t);
    const HeadLeft to = q(t);
    unsafe(t) = 0;
    for (int64_t i = some.begin; i < some.end; ++i) to.copy(i - some.begin, h_.q.from(i));
  }

  // Scores of 32 keys: s (32, 32) = q k^T.
  void multiply_keys(int64_t u, int64_t group) const {
    const char* const a = q(u / blocks_).data;
    const float* const panels = scratch_ + at_.k;
    const char* const b =
        reinterpret_cast<const char*>(panels + (block(u).begin / kColumns + group) * at_.k_panel);
    const auto nothing = [] {};
    const Result to{s(u) + group * kColumns, kScoreStride, false};
    amx_tiles::multiply_block<1>(both_halves(u) ? kQueries : kQueries / 2,
                                 {a, b, ceil_div(h_.E, amx_tiles::kSteps), false}, to, to, nothing);
  }

  // What 32 keys add to o (32, 32): its accumulators stay in their tiles until the last of them.
  void multiply_values(int64_t u, int64_t step) const {
    const int64_t count = groups(u), panel = step / count, group = step % count;
    const bool two = both_halves(u);
    const float* const panels = scratch_ + at_.v;
    const char* const b = reinterpret_cast<const char*>(panels + panel * at_.v_panel) +
                          (block(u).begin / kColumns + group) * amx_tiles::kPairBytes;
    const char* const a = p(u) + group * amx_tiles::kPairBytes;
    float* const to = o() + panel * kColumns;
    const Result result{to, at_.o_stride, u % blocks_ > 0};
    if (group == 0) two ? amx_tiles::begin_tiles<2>(result) : amx_tiles::begin_tiles<1>(result);
    two ? amx_tiles::multiply_step<2, 1>(a, b) : amx_tiles::multiply_step<1, 1>(a, b);
    if (group + 1 == count)
      two ? amx_tiles::store_tiles<2>(result) : amx_tiles::store_tiles<1>(result);
  }

  // Row r of unit u: scores to weights, in bf16 and in the order of tiles.
  void make_weights(int64_t u, int64_t r) {
    constexpr float kLog2e = 1.44269504f;
    const Range keys = block(u);
    const int64_t J = keys.end - keys.begin, query = tile(u / blocks_).begin + r;
    const float* const row = s(u) + r * kScoreStride;
    char* to = p(u) + r / 16 * kTileBytes + r % 16 * kTileStride;
    const float* const bias =
        h_.bias ? h_.bias + query * h_.bias_stride + first_key_ + keys.begin : nullptr;
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
    expect_next_head(query);
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
    const int64_t t = u / blocks_;
    float& l = l_[t % 2][r];
    l = (u % blocks_ == 0 ? 0 : l) + (sum[0] + sum[1]).sum();
    const bool safe =
        _mm512_cmp_ps_mask(top.v, _mm512_set1_ps(kSafeExponent), _CMP_LT_OQ) == 0xffff;
    unsafe(t) |= static_cast<uint32_t>(!safe) << r;
  }

  // The next head's columns stand beside this one's, a row of qkv apart from each other: nothing
  // but this fetches them.
  void expect_next_head(int64_t i) const {
    const Rows* const parts[] = {&h_.q, &h_.k, &h_.v};
    for (const Rows* const part : parts)
      for (int64_t e = 0; e < h_.E; e += 2 * kLine)
        __builtin_prefetch(offset(part->dtype, part->data, i * part->stride + h_.E + e), 0, 2);
  }

  void finish(int64_t t) const {
    const Range some = tile(t);
    for (int64_t i = some.begin; i < some.end; ++i) {
      const int64_t r = i - some.begin;
      if (unsafe(t) >> r & 1) continue;
      float* const row = o() + r * at_.o_stride;
      const float l = l_[t % 2][r];
      const Vec inverse = Vec::set(1 / l);
      for (int64_t e = 0; e < at_.o_stride; e += Vec::kLanes)
        (Vec::load(row + e) * inverse).store(row + e);
      out_(i, row);
      if (h_.lse) h_.lse[i] = logf(l);
    }
  }

  static constexpr int kLargerSize = 0x0b;  // vrangeps: the larger of both magnitudes, positive
  const Head& h_;
  const FlashScratch& at_;
  float* const scratch_;
  const Out& out_;
  const Range queries_;
  const int64_t first_key_, n_, blocks_, units_, panels_;
  float l_[2][kQueries];  // sums of weights: a tile is finished after the next one has begun
};

}  // namespace
