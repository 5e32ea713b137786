// One head of attention, flash style: a tile of queries and a block of keys at a time, online
// softmax.
//
// Memory is linear in S. A row's result depends on its own query only, so tiles and threads do not
// show. How the scores of a tile lie in memory is the instruction set's own: flash_amx.hpp has a
// query in each row, flash_fma.hpp, flash_int16.hpp and flash_bf16.hpp in each lane. All define
// kQueryGrain, FlashScratch and attend().
#pragma once
#include "gemm.hpp"
#include "math.hpp"
#include "philox.hpp"
#include "rows.hpp"
#include "scratch.hpp"

namespace {

struct Head {
  Rows q, k, v;       // (S, E)
  const float* bias;  // (S, S), rows by bias_stride, or null
  int64_t bias_stride;
  Precision precision;
  float* lse;  // (S) or null
  int64_t S, E;
  float scale;
  Dropout dropout;
  uint64_t first_element;  // of this head's scores (S, S) in the dropout's stream
};

}  // namespace

#if defined(VITKERN_AMX)
#include "flash_amx.hpp"
#elif defined(VITKERN_INT16) && !defined(VITKERN_PAIRS_IN_TWO)
#include "flash_int16.hpp"
#elif defined(VITKERN_BF16)
#include "flash_bf16.hpp"
#else
#include "flash_fma.hpp"
#endif

namespace {

// Queries in whose time the keys and values of a head are laid out.
constexpr int64_t kLayoutQueries = 16;

// compute(head, queries) for this thread's share of all heads: whole ones, or parts of their
// queries, cut at multiples of kQueryGrain.
template <class Body>
void share_heads(const Team& team, int64_t heads, int64_t queries, const Body& compute) {
  const int64_t grains = ceil_div(queries, kQueryGrain);
  const auto body = [&](int64_t head, int64_t first, int64_t last) {  // grains
    const Range some{first * kQueryGrain, min(queries, last * kQueryGrain)};
    if (some.begin >= some.end) return;
    if constexpr (vitkern::kCounted)
      vitkern::note(vitkern::Work::heads, some.end - some.begin);
    else
      compute(head, some);
  };
  // Threads of one head each, or even shares, for which most threads lay out two heads' keys and
  // values: whichever ends first.
  if (team.size >= heads && heads &&
      ceil_div(grains, team.size / heads) * kQueryGrain <=
          ceil_div(heads * queries, team.size) + kLayoutQueries) {
    for (int64_t head = 0; head < heads; ++head) {
      const Range ranks = even_part(team.size, head, heads);
      if (team.rank < ranks.begin || team.rank >= ranks.end) continue;
      const Range mine = even_part(grains, team.rank - ranks.begin, ranks.end - ranks.begin);
      body(head, mine.begin, mine.end);
    }
    return;
  }
  const Range mine = team.share(heads * grains);
  for (int64_t head = grains ? mine.begin / grains : 0; head * grains < mine.end; ++head)
    body(head, max(0, mine.begin - head * grains), min(grains, mine.end - head * grains));
}

}  // namespace
