// How scratch is laid out and how much of it a kernel takes at a time.
#pragma once
#include "simd.hpp"

namespace {

// Rows of a chunk: a weight panel is converted once for each, which costs 1 % of the 2048 / kMR
// tiles that use it.
constexpr int64_t kChunkRows = 2048;
constexpr int64_t kLine = 16;  // floats in a cache line

// Floats of 4 KiB: with a stride that is a multiple, all 14 rows of a tile fall into the same few
// sets of L1.
constexpr int64_t kAliasing = 1024;

// The stride of rows of n floats: whole cache lines, and not such a multiple.
inline int64_t row_stride(int64_t n) {
  const int64_t stride = round_up(n, kLine);
  return stride % kAliasing == 0 ? stride + kLine : stride;
}

}  // namespace
