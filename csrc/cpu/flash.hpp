// One head of attention, flash style: a tile of queries and a block of keys at a time, online
// softmax.
//
// Memory is linear in S. A row's result depends on its own query only, so tiles and threads do not
// show. How the scores of a tile lie in memory is the instruction set's own: flash_amx.hpp has a
// query in each row, flash_fma.hpp in each lane. Both define kQueries, FlashScratch and attend().
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
#else
#include "flash_fma.hpp"
#endif

namespace {

// body(head, queries) for this thread's share of all heads: whole ones, or parts of their queries
// where the heads do not divide evenly among the threads.
template <class Body>
void share_heads(const Team& team, int64_t heads, int64_t queries, const Body& body) {
  int parts = 1;
  while (queries > kQueries && heads * parts % team.size) ++parts;
  const auto piece = [&](int64_t i) {
    return Team{static_cast<int>(i), parts}.share(queries, kQueries);
  };
  const Range mine = team.share(heads * parts);
  for (int64_t head = mine.begin / parts; head * parts < mine.end; ++head) {
    const Range some{piece(max(0, mine.begin - head * parts)).begin,
                     piece(min(parts, mine.end - head * parts) - 1).end};
    if (some.begin < some.end) body(head, some);
  }
}

}  // namespace
