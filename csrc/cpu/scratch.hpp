// How scratch is laid out and how much of it a kernel takes at a time.
#pragma once
#include "simd.hpp"

namespace {

// Rows handled between two syncs: enough that converting a weight panel costs 1 % of using it (2048
// / kMR tiles).
constexpr int64_t kChunkRows = 2048;
// The MLP's chunk is shorter, so that its F-wide rows stay in L2: about 1 MiB of them for each
// thread.
constexpr int64_t kHiddenBytes = 1 << 20;

// Distance of rows of n floats: whole cache lines, and never a multiple of 4 KiB, where the rows of
// a tile would all fall into the same few sets of L1.
inline int64_t row_stride(int64_t n) {
  const int64_t stride = round_up(n, 16);
  return stride % 1024 == 0 ? stride + 16 : stride;
}

}  // namespace
