// GEMMs of 8-bit integers on AMX: the loop over panels and tiles, and rows of integer sums through
// an epilogue while the next tile is multiplied. Included by tiles_int8.hpp, whose factors it
// reads.
#pragma once

namespace {
namespace int8_tiles {

// Steps of W in L1 at a time: 24 KiB.
constexpr int64_t kTileBlock = 768;

// Rows of complete sums as floats, two after two.
struct IntegerSums {
  const float* c;
  const char* scale;  // of the next row of A
  int64_t stride;
  Vec factor[2];  // of the columns, and the sums of their weights
  __m512i weights[2];

  IntegerSums(const Left& A, int64_t m, const Columns& columns, const float* c)
      : c(c), scale(reinterpret_cast<const char*>(&A.scale(m))), stride(A.stride) {
    for (int64_t i = 0; i < 2; ++i) {
      factor[i] = Vec::load(columns.scale + i * Vec::kLanes);
      weights[i] = _mm512_loadu_si512(columns.sum + i * Vec::kLanes);
    }
  }
  [[gnu::always_inline]] amx_tiles::Pair operator()() {
    amx_tiles::Pair rows;
    for (auto& row : rows.v) {
      const RowScale& a = *reinterpret_cast<const RowScale*>(scale);
      scale += stride;
      for (int64_t i = 0; i < 2; ++i, c += Vec::kLanes)
        row[i] = int8_tiles::finish(c, a, weights[i], factor[i]);
    }
    return rows;
  }
};

// The rows of a finished tile of one panel.
template <class Epilogue>
struct TileRows {
  const Left& A;
  const Epilogue& epilogue;
  int64_t m = 0, rows = 0, n0 = 0, n = 0;
  const Columns* columns = nullptr;
  float* c = nullptr;

  // Multiplies the next tile, while they go through the epilogue.
  void between(int64_t R, const Tile& tile) {
    const int64_t at_once = ceil_div(kTileRows / 2, max(tile.steps / kRowBytes, 1));
    const auto run = [&](const auto& pairs) {
      amx_tiles::Between work{IntegerSums(A, m, *columns, c),
                              pairs,
                              amx_tiles::NoLines{},
                              rows / 2,
                              at_once,
                              amx_tiles::Fetch{}};
      multiply_rows(R, tile, work);
      work.finish();
    };
    bool done = rows == 0;
    if constexpr (requires { epilogue.template with_pairs<0>(m, n0, run); })
      done = done || (n == kNR && epilogue.template with_pairs<0>(m, n0, run));
    finish(done ? rows / 2 * 2 : 0);
    if (!done || rows == 0) multiply_rows(R, tile);
    rows = 0;
  }
  // The rows from r on.
  void finish(int64_t r = 0) const {
    for (; r < rows; ++r) {
      finish_row(A.scale(m + r), *columns, c + r * kNR);
      finish_rows<kNR>(epilogue, {m + r, m + r + 1}, n0, n, c + r * kNR);
    }
  }
};

// Rows [begin, end) of C for the panels [first, last), by one thread.
//
//   for each panel of 32 columns
//     for each block of kTileBlock steps   in L1 for all rows; the next one is prefetched into L2
//       for each tile of 32 rows             streamed past L1, sums in scratch between two blocks
//
// The rows of a finished tile go through the epilogue inside the next tile's loop.
template <class Epilogue>
void multiply_integers(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
                       const Epilogue& epilogue) {
  const int64_t M = rows.end - rows.begin, tiles = ceil_div(M, kTileRows), bytes = A.bytes;
  const int64_t blocks = max(1, ceil_div(bytes, kTileBlock)), stride = panel_bytes(w.pitch);
  const char* panel =
      static_cast<const char*>(w.data) + (w.first_row / kNR + panels.begin) * stride;
  TileRows<Epilogue> done{A, epilogue};
  for (int64_t p = panels.begin; p < panels.end; ++p, panel += stride) {
    float* const sums = scratch + p % 2 * tiles * kTileRows * kNR;
    const auto* const columns = reinterpret_cast<const Columns*>(panel + bytes * kNR);
    const Panels one{.data = panel, .pitch = stride, .count = 1, .c = sums, .c_pitch = 0};
    for (int64_t i = 0; i < blocks; ++i) {
      const Range part = even_part(bytes / kRowBytes, i, blocks);
      const int64_t k0 = part.begin * kRowBytes, steps = part.end - part.begin;
      const int64_t there = i + 1 < blocks ? part.end * kRowBytes * kNR : -1;
      const NextBlocks next(one, there, steps * kRowBytes * kNR, tiles, steps);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t m = t * kTileRows, R = min(kTileRows, M - m);
        done.between(R, {.a = A.data + (rows.begin + m) * A.stride + k0,
                         .a_stride = A.stride,
                         .block = panel + k0 * kNR,
                         .steps = steps * kRowBytes,
                         .c = sums + m * kNR,
                         .add = i > 0,
                         .ahead = next.of_tile(t)});
        if (i + 1 < blocks) continue;
        done.m = rows.begin + m;
        done.rows = R;
        done.n0 = p * kNR;
        done.n = min(kNR, w.N - p * kNR);
        done.columns = columns;
        done.c = sums + m * kNR;
      }
    }
  }
  done.finish();
}

}  // namespace int8_tiles
}  // namespace
