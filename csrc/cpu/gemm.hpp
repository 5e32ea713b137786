// C (M, N) = A (M, K) W^T (N, K), fp32 accumulators, with an epilogue per row of a panel.
//
// How A and W lie in memory and what a tile is differ between the instruction sets; each header
// below defines the same names:
//
//   kTileRows, kNR, kMaxRows   rows of A in a tile, columns of a panel, rows of A in L2
//   Left                       A, in the order that its tiles are read in; operators write its rows
//   gemm_scratch, gemm_part, packed_bytes, pack_panel     matmuls with weights
//   first_alike, kUnpacks, unpack_panel                   which precisions share panels; and back
//   panel_floats, pack_keys, pack_values, multiply_panel  matmuls inside attention: amx_tiles
//   multiply_head                                         the same: fma_tiles, for all others
//   group_rows, row_dtype, hidden_rows, hidden_columns    how the engine and the MLP cut their work
#pragma once
#include "parallel.hpp"

namespace {

using vitkern::Precision;

// A weight (N, K), or a part of one: some of its rows, which are columns of C, and some of its K.
struct Weights {
  Precision precision;
  DType dtype;       // of the data, while it is not packed
  const void* data;  // (rows, pitch) row-major, or the panels of it (pack.cpp)
  int64_t N, K;
  bool packed;
  const Weights* next = nullptr;          // packed, and read after these: AMX prefetches them
  int64_t first_row = 0, first_step = 0;  // of the part: multiples of kNR and of 32
  int64_t pitch = K;
  const float* scales = nullptr;  // (N) of int8 that are not packed

  Weights part(int64_t row, int64_t rows, int64_t step, int64_t steps) const {
    Weights w = *this;
    w.first_row += row;
    w.first_step += step;
    w.N = rows;
    w.K = steps;
    return w;
  }
};

inline Precision precision_of(DType dtype) {
  return dtype == DType::f32 ? Precision::fp32 : Precision::bf16;
}

// Of a lone operator: as they are, or in the panels that pack makes of them at precision_of(dtype).
inline Weights operand_weights(DType dtype, const void* data, int64_t N, int64_t K, bool packed) {
  return {precision_of(dtype), dtype, data, N, K, packed};
}

// Where the sums of a tile go: rows of floats, overwritten or added to.
struct Result {
  float* c;
  int64_t stride;
  bool add;
};

}  // namespace

#if defined(VITKERN_AMX)
#include "tiles_amx.hpp"
#else
#include "tiles_fma.hpp"
#endif
#if defined(VITKERN_INT8)  // of any instruction set
#include "tiles_int8.hpp"
#elif defined(VITKERN_INT16)
#include "tiles_int16.hpp"
#endif

namespace {

#if defined(VITKERN_INT8)
using namespace int8_tiles;
#elif defined(VITKERN_AMX)
using namespace amx_tiles;
#elif defined(VITKERN_INT16)
using namespace int16_tiles;
#else
using namespace fma_tiles;
#endif

// Writes the first M rows of A, K elements each; the team shares them. write(m, to) makes row m at
// `to`, which may be `row`: this thread's room for K floats. Ends with a sync.
template <class Write>
void fill(const Team& team, const Left& A, int64_t M, int64_t K, float* row, const Write& write) {
  const Range rows = team.share(M);
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    float* const to = A.open(m, row);
    write(m, to);
    A.close(m, to, K);
  }
  team.sync();
}

// Makes the first M rows ready for a GEMM, after a team stored them in parts and synced.
inline void settle(const Team& team, const Left& A, int64_t M) {
  if constexpr (Left::kSettles) {
    const Range rows = team.share(M);
    for (int64_t m = rows.begin; m < rows.end; ++m) A.settle(m);
    team.sync();
  }
}

// C by a team, which splits either its columns (panels of W) or its rows (tiles of A):
//
//   packed weights       whichever gives the slowest thread fewer tiles
//   weights to convert   columns, so that each panel is converted by one thread only. But rows
//   where
//                        each thread has at least 2 * kMaxRows, against which converting is cheap,
//                        or where a thread would have fewer than 4 panels and A has several tiles
//
// A must be ready in all threads; no sync at the end.
template <class Epilogue>
void gemm(const Team& team, const Left& A, int64_t M, const Weights& w, float* scratch,
          const Epilogue& epilogue) {
  const int64_t panels = ceil_div(w.N, kNR), tiles = ceil_div(M, kTileRows);
  const bool even = ceil_div(panels, team.size) * tiles <= ceil_div(tiles, team.size) * panels;
  const bool many_rows = M >= 2 * kMaxRows * team.size;
  if (w.packed ? even : !many_rows && (panels >= 4 * team.size || M <= kTileRows))
    gemm_part(A, {0, M}, w, team.share(panels), scratch, epilogue);
  else
    gemm_part(A, team.share(M, kTileRows), w, {0, panels}, scratch, epilogue);
}

}  // namespace
