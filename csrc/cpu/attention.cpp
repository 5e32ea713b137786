// attention: y = softmax(q k^T * scale + bias) v on packed qkv, read in place; heads of images are
// shared out, and queries too where the heads do not divide evenly.
#include "arena.hpp"
#include "flash.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

Head head_of(const attention_args& a, int64_t b, int64_t h) {
  const int64_t at = b * a.b_stride + h * a.h_stride;
  const Rows qkv{a.dtype, a.qkv, a.s_stride};
  return {.q = qkv.from(0, at),
          .k = qkv.from(0, at + a.part_stride),
          .v = qkv.from(0, at + 2 * a.part_stride),
          .bias = a.bias ? a.bias + b * a.bias_b_stride + h * a.bias_h_stride : nullptr,
          .bias_stride = a.bias_s_stride,
          .precision = precision_of(a.dtype),
          .lse = a.lse ? a.lse + (b * a.H + h) * a.S : nullptr,
          .S = a.S,
          .E = a.E,
          .scale = a.scale,
          .dropout = a.dropout,
          .first_element = static_cast<uint64_t>(b * a.H + h) * a.S * a.S};
}

}  // namespace

void attention(const attention_args& a) {
  const int64_t per_thread = FlashScratch(a.S, a.E, precision_of(a.dtype)).total;
  const Lease lease(a.threads * per_thread * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = lease.floats() + team.rank * per_thread;
    share_heads(team, a.B * a.H, a.S, [&](int64_t head, Range part) {
      const auto row = [&](int64_t s) {  // of y: where this head's part of token s starts
        return ((head / a.H * a.S + s) * a.H + head % a.H) * a.E;
      };
      for (int64_t i = 0; i < a.sequences; ++i) {
        const Range keys = a.offsets ? Range{a.offsets[i], a.offsets[i + 1]} : Range{0, a.S};
        const Range queries{max(keys.begin, part.begin), min(keys.end, part.end)};
        if (queries.begin < queries.end)
          attend(head_of(a, head / a.H, head % a.H), queries, keys, scratch,
                 [&](int64_t s, const float* o) { narrow_row(o, a.dtype, a.y, row(s), a.E); });
      }
    });
  });
}

}  // namespace vitkern::VITKERN_ISA
