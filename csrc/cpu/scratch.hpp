// How scratch is laid out and how much of it a kernel takes at a time.
#pragma once
#include "simd.hpp"

namespace {

// Rows handled between two syncs: enough that converting a weight panel costs 1 % of using it (2048
// / kMR tiles).
constexpr int64_t kChunkRows = 2048;
// The MLP's chunk is shorter, so that its F-wide rows stay in cache: 3 MiB of them for each thread
// (252 rows of a ViT-B), of which the GEMM walks one slab in L2 at a time. 1 MiB, all in L2, is 4 %
// slower at batch 1 and equal at batch 8: shorter chunks use each weight panel less.
constexpr int64_t kHiddenBytes = 3 << 20;

// Rows whose distance is a multiple of 4 KiB fall into the same few sets of L1, all 14 of a tile.
constexpr int64_t kAliasing = 1024;

// Distance of rows of n floats: whole cache lines, and not such a multiple.
inline int64_t row_stride(int64_t n) {
  const int64_t stride = round_up(n, 16);
  return stride % kAliasing == 0 ? stride + 16 : stride;
}

}  // namespace
