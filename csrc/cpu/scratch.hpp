// How scratch is laid out and how much of it a kernel takes at a time.
#pragma once
#include "simd.hpp"

namespace {

// Rows handled between two syncs: enough that converting a weight panel costs 1 % of using it (2048
// / kMR tiles).
constexpr int64_t kChunkRows = 2048;
constexpr int64_t kLine = 16;  // floats in a cache line

// Rows whose distance is a multiple of 4 KiB fall into the same few sets of L1, all 14 of a tile.
constexpr int64_t kAliasing = 1024;

// Distance of rows of n floats: whole cache lines, and not such a multiple.
inline int64_t row_stride(int64_t n) {
  const int64_t stride = round_up(n, kLine);
  return stride % kAliasing == 0 ? stride + kLine : stride;
}

}  // namespace
