// C (M, N) = A (M, K) W^T (N, K), fp32 accumulators, with an epilogue per row of a panel.
//
// How A and W lie in memory and what a tile is differ between the instruction sets; each header
// below defines the same names:
//
//   kTileRows, kNR, kMaxRows   rows of A in a tile, columns of a panel, rows of A in L2
//   Left                       A, in the order that its tiles are read in; operators write its rows
//   gemm_scratch, gemm_part, packed_bytes, pack_panel     matmuls with weights
//   first_alike, panel_form, kUnpacks, unpack_panel       which precisions share panels; and back
//   head_terms_of, pack_keys, pack_values, multiply_panel matmuls inside attention: amx_tiles
//   multiply_head                                         the same: fma_tiles, for all others
//   group_rows, row_dtype, hidden_rows, hidden_columns    how the engine and the MLP cut their work
//   part_floats, part_epilogue                            sums of an MLP whose hidden columns are
//   cut
#pragma once
#include "parallel.hpp"

namespace {

using vitkern::PanelForm;
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
  bool by_steps = false;  // not packed, and (steps, pitch) instead: the transpose of a weight

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

// What A (M, K) is multiplied by for C (M, N) = A B, where B (K, N) has rows by a stride.
inline Weights plain_factor(Precision precision, const Rows& B, int64_t N, int64_t K) {
  Weights w{precision, B.dtype, B.data, N, K, false};
  w.pitch = B.stride;
  w.by_steps = true;
  return w;
}

// Where the sums of a tile go: rows of floats, overwritten or added to.
struct Result {
  float* c;
  int64_t stride;
  bool add;
};

// epilogue(m, n0, n, c) for rows of C that lie kNR apart, at once where it knows how: what rows
// share (a bias, an activation's table) then stays in registers.
template <int64_t kNR, class Epilogue>
inline void finish_rows(const Epilogue& epilogue, Range rows, int64_t n0, int64_t n, float* c) {
  if constexpr (requires { epilogue.template rows<kNR>(rows, n0, n, c); })
    if (epilogue.template rows<kNR>(rows, n0, n, c)) return;
  for (int64_t m = rows.begin; m < rows.end; ++m, c += kNR) epilogue(m, n0, n, c);
}

}  // namespace

#if defined(VITKERN_AMX)
#include "tiles_amx.hpp"
#else
#include "tiles_fma.hpp"
#endif
#if defined(VITKERN_INT16)
#include "tiles_int16.hpp"
#endif
#if defined(VITKERN_BF16)
#include "tiles_bf16.hpp"
#endif
#if defined(VITKERN_INT8)  // of any instruction set
#include "tiles_int8.hpp"
#endif

namespace {

#if defined(VITKERN_INT8)
using namespace int8_tiles;
#elif defined(VITKERN_AMX)
using namespace amx_tiles;
#elif defined(VITKERN_INT16)
using namespace int16_tiles;
#elif defined(VITKERN_BF16)
using namespace bf16_tiles;
#else
using namespace fma_tiles;
#endif

// Writes the first M rows of A, K elements each; the team shares them. write(m, to) makes row m at
// `to`, which may be `row`: this thread's room for K floats. Ends with a sync.
template <class Write>
void fill(const Team& team, const Left& A, int64_t M, int64_t K, float* row, const Write& write) {
  const Range rows = team.share(M);
  if constexpr (vitkern::kCounted) {
    vitkern::note(vitkern::Work::rows, rows.end - rows.begin, K);
    return team.sync();
  }
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
    if constexpr (vitkern::kCounted)
      vitkern::note(vitkern::Work::rows, rows.end - rows.begin);
    else
      for (int64_t m = rows.begin; m < rows.end; ++m) A.settle(m);
    team.sync();
  }
}

// Rows of A that are stored in parts choose a scale by how large they can be, where they have one
// for fp16's exponents: whether they want to be told, and what row m is told.
#if defined(VITKERN_AMX) && !defined(VITKERN_INT8)
inline bool expects(const Left& A) { return A.expects(); }
inline void expect(const Left& A, int64_t m, float bound) { A.expect(m, bound); }
#else
constexpr bool expects(const Left&) { return false; }
inline void expect(const Left&, int64_t, float) {}
struct ProductBound {
  ProductBound(const Weights&, const float*) {}
  float operator()(const Left&, int64_t) const { return 0; }
};
#endif

// Tiles in whose time a panel of unpacked weights is converted.
constexpr int64_t kConversion = 3;

// Threads of a team over a matmul: so many parts of its rows, each in so many parts of columns.
struct Grid {
  int64_t rows, columns;

  // Of all grids for so many threads the one whose largest cell takes the least time, in tiles of
  // one panel; `extra` is what a panel takes beside its tiles. Of equal ones that with the fewest
  // parts of rows: each of these reads all weights, which are more than the rows.
  static Grid even(int64_t tiles, int64_t panels, int64_t extra, int64_t threads) {
    Grid best{1, max(1, min(threads, panels))};
    int64_t least = INT64_MAX;
    for (int64_t rows = 1; rows <= min(threads, max(tiles, 1)); ++rows) {
      const int64_t columns = max(1, min(threads / rows, panels));
      const int64_t time = (ceil_div(tiles, rows) + extra) * ceil_div(panels, columns);
      if (time < least) {
        least = time;
        best = {rows, columns};
      }
    }
    return best;
  }
};

// Panels that a thread takes of its own cell at a time, where others may help; and how many others
// a thread looks after when it is done.
constexpr int64_t kTaken = 8, kHelped = 3;
#if defined(VITKERN_AMX)
constexpr bool kHelping = false;  // each call of gemm_part prefetches the weights that come next
#else
constexpr bool kHelping = !vitkern::kCounted;
#endif

// C by a team, each thread its cell of a grid: some tiles of A's rows times some panels of W.
// Weights that must be converted are split by rows alone where each thread has at least
// 2 * kMaxRows, against which converting all of them is cheap.
//
// A thread that is done computes panels of the next few threads' cells, if the team has shares: one
// that is held up (by another process, by the host) would be waited for.
//
// A must be ready in all threads; no sync at the end.
template <class Epilogue>
void gemm(const Team& team, const Left& A, int64_t M, const Weights& w, float* scratch,
          const Epilogue& epilogue) {
  const int64_t panels = ceil_div(w.N, kNR), tiles = ceil_div(M, kTileRows);
  const bool many_rows = !w.packed && M >= 2 * kMaxRows * team.size;
  const Grid grid = many_rows ? Grid{min(team.size, tiles), 1}
                              : Grid::even(tiles, panels, w.packed ? 0 : kConversion, team.size);
  Share alone;
  const int64_t helped = team.shares ? min(kHelped, team.size - 1) : 0;
  for (int64_t i = 0; i <= helped; ++i) {
    const int64_t rank = (team.rank + i) % team.size;
    if (rank >= grid.rows * grid.columns) continue;
    const Range some = even_part(tiles, rank / grid.columns, grid.rows);
    const Range rows{some.begin * kTileRows, min(M, some.end * kTileRows)};
    const Range all = even_part(panels, rank % grid.columns, grid.columns);
    if constexpr (vitkern::kCounted) {
      const int64_t columns = (all.end - all.begin) * kNR;
      vitkern::note(vitkern::Work::matmul, rows.end - rows.begin, columns, w.K,
                    packed_bytes(columns, w.K, w.precision));
      return;
    }
    Share& share = team.shares ? team.shares[rank] : alone;
    if (i == 0) share.open(all);
    for (;;) {
      const Range mine = i > 0        ? share.take_last()
                         : helped > 0 ? share.take_first(kTaken)
                                      : share.take_all();
      if (mine.begin >= mine.end) break;
      gemm_part(A, rows, w, mine, scratch, epilogue);
    }
  }
}

}  // namespace
