// The loops around a tile of registers, for tiles_fma.hpp, tiles_int16.hpp, tiles_bf16.hpp.
//
//   for each group of kGroup panels
//     for each slab of inner steps, <= kSlab     Tiles::slab makes W's part ready
//       for each part of at most kMaxRows rows   A's part stays in L2 for the whole group
//         for each panel of kNR columns
//           for each block of about kKC steps      W's block in L1 for all rows: 16 KiB of fp32
//             for each tile of kMR rows              kMR x kNR accumulators in registers
//
//        k ->            kNR
//   A  [ kMR rows ]  x  [ W ]   kMR * kNR / lanes accumulators + kNR / lanes of W + 1 broadcast
//
// Rows are cut into tiles of almost equal height (even_part): 197 rows with kMR = 14 make 2 tiles
// of 14 rows and 13 tiles of 13. Fourteen full tiles and one of a single row would be slower: that
// one row takes 4 / 14 of the time of a full tile.
//
// Between slabs the sums of C stay in scratch; behind a tile's last block its rows go through the
// epilogue, while they are in L1. Each tile prefetches a part of the next block of W into L2:
// without that, 12 % of the time is spent waiting for it. The next tile of A is left to the
// hardware: a prefetch of it costs 5 %. Sums over blocks of kKC, not over all of K, also keep the
// rounding error low. A result depends on its own row of A and column of W only: not on M, its tile
// or its thread.
#pragma once
#include "scratch.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kMR = 14;  // 28 accumulators + 2 + 1 of 32 registers
#else
constexpr int64_t kMR = 6;  // 12 accumulators + 2 + 1 of 16 registers
#endif
// 16 KiB of a 32 KiB L1 for W's block: 128 steps with AVX-512, 256 with AVX2, where 128 are 3 to
// 6 % slower on Zen 3: clearing, adding and storing a tile's sums takes a tenth of its time. Plain
// vectors of 4 lanes have room for 512, but round each product: such sums are not exact enough.
constexpr int64_t kKC = Vec::kLanes == 8 ? 256 : 128;
// The longest block: an eighth more than kKC spares a short one, but 256 steps are as long a sum as
// the error contract has room for.
constexpr int64_t kLongestBlock = Vec::kLanes == 8 ? kKC : kKC + kKC / 8;
constexpr int64_t kSlab = 864;  // at most; K is cut into slabs of almost equal length
constexpr int64_t kGroup = 8;   // panels: 8 * 32 * 768 * 4 B = 768 KiB of L2 when converted to fp32

// What a tile fetches into L2 of the block of W that comes next: `lines` at each kLine steps.
struct Ahead {
  const char* from;
  int64_t lines;

  // Tile t of so many, each of `fetches` times kLine steps, takes its share of a block.
  static Ahead share(const void* block, int64_t bytes, int64_t t, int64_t tiles, int64_t fetches) {
    const int64_t lines = ceil_div(bytes / 64, max(tiles * fetches, 1));
    return {static_cast<const char*>(block) + t * fetches * lines * 64, lines};
  }
  void fetch() {
    for (int64_t i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
  }
};

// f<R>() for a tile of R <= kMost rows, known to the compiler.
template <int kMost, class F>
inline void with_rows(int64_t R, const F& f) {
  if constexpr (kMost > 1)
    if (R < kMost) return with_rows<kMost - 1>(R, f);
  f.template operator()<kMost>();
}

// The rows of a tile of A, read in step. One pointer for four rows: [p], [p + s], [p + 2 s],
// [p + 3 s] are addressing modes, and 14 pointers are more than there are registers. (GCC keeps the
// others in vector registers, and fetching them costs a tenth of the multiply-adds' issue slots.)
template <int R>
struct TileReader {
  static constexpr int kPointers = (R + 3) / 4;
  const char* p[kPointers];
  int64_t s, s3;

  TileReader(const void* first, int64_t stride) : s(stride), s3(3 * stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      p[i] = static_cast<const char*>(first) + static_cast<int64_t>(4 * i) * stride;
      asm("" : "+r"(p[i]));  // each in a register of its own: GCC would compute them as a vector
    }
    asm("" : "+r"(s), "+r"(s3));  // the compiler must not make other multiples of them
  }
  const char* row(int r) const {
    const int part = r % 4;
    return p[r / 4] + (part == 3 ? s3 : part * s);
  }
  void advance(int64_t bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      p[i] += bytes;
      asm("" : "+r"(p[i]));
    }
  }
};

// For Tiles whose sums are C's elements as they are.
struct Finished {
  static auto finisher(const auto&, Range, const char*) {
    return [](Range, float*) {};
  }
};

// Rows [begin, end) of C for the panels [first, last), by one thread; `scratch` for all of A's
// rows. epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Tiles, class Left, class Epilogue>
void walk(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
          const Epilogue& epilogue) {
  constexpr int64_t kNR = Tiles::kColumns;
  const int64_t M = rows.end - rows.begin, parts = ceil_div(M, Tiles::kPartRows);
  const int64_t slabs = max(1, ceil_div(w.K, kSlab));     // one if K = 0, which gives C = 0
  float* const converted = scratch;                       // [panel][k][kNR]
  float* const waiting = scratch + kGroup * kSlab * kNR;  // [panel][row][kNR]
  for (int64_t first = panels.begin; first < panels.end; first += kGroup) {
    const int64_t count = min(kGroup, panels.end - first);
    for (int64_t part_of_k = 0; part_of_k < slabs; ++part_of_k) {
      const Range units = even_part(ceil_div(w.K, Tiles::kUnit), part_of_k, slabs);
      const Range slab{units.begin * Tiles::kUnit, min(w.K, units.end * Tiles::kUnit)};
      int64_t b_stride = 0;  // bytes from panel to panel
      const char* const b = Tiles::slab(w, first, count, slab, converted, &b_stride);
      for (int64_t part = 0; part < parts; ++part) {
        const Range some{rows.begin + M * part / parts, rows.begin + M * (part + 1) / parts};
        for (int64_t p = 0; p < count; ++p) {
          float* const c = waiting + (p * M + some.begin - rows.begin) * kNR;
          const char* const panel = b + p * b_stride;
          const int64_t n0 = (first + p) * kNR, n = min(kNR, w.N - n0);
          const auto finish = Tiles::finisher(A, slab, panel);
          const auto done = [&](Range tile) {  // while its sums are in L1
            if (slab.end < w.K) return;
            float* const sums = c + (tile.begin - some.begin) * kNR;
            finish(tile, sums);
            finish_rows<kNR>(epilogue, tile, n0, n, sums);
          };
          if (w.K) {
            Tiles::multiply(A, some, slab, panel, panel + b_stride, c, done);
          } else {
            memset(c, 0, (some.end - some.begin) * kNR * sizeof(float));
            done(some);
          }
        }
      }
    }
  }
}

}  // namespace
