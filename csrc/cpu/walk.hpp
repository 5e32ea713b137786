// The loops around a tile of registers, for tiles_fma.hpp, tiles_int16.hpp, tiles_bf16.hpp.
//
//   for each group of kGroup panels
//     for each slab of inner steps, <= kSlab     Tiles::slab makes W's part ready
//       for each part of at most kMaxRows rows   A's part stays in L2 for the whole group
//         for each panel of kNR columns, or two    with AVX-512 tiles have two
//           for each block of about kKC steps      W's block in L1 for all rows
//             for each tile of rows                  rows x columns accumulators in registers
//
//         k ->                 kNR     kNR
//   A  [ kPairRows rows ]  x  [ W ]   [ W ]   rows * columns / lanes accumulators + columns / lanes
//                                             of W + 1 broadcast
//
// AVX-512's 6 rows by two panels read half as much of A, which comes from L2, as 14 rows by one,
// and take 36 instead of 46 instructions for 24 multiply-adds: on a Cascade Lake 1.3 times as
// fast, 1.45 where the core's other hyperthread is busy, on a Zen 5 1.04. The last of an odd number
// of panels is multiplied by 14 rows.
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
#include "register_tile.hpp"
#include "scratch.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kMR = 14;  // by 2 vectors: 28 accumulators + 2 + 1 of 32 registers
constexpr int64_t kPanels = 2, kPairRows = 6;  // by 4 vectors: 24 accumulators + 4 + 1
#else
constexpr int64_t kMR = 6;  // 12 accumulators + 2 + 1 of 16 registers
constexpr int64_t kPanels = 1, kPairRows = kMR;
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

  void fetch() {
    for (int64_t i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
  }
};

// The slabs of panels that are multiplied together, and the sums of their columns.
struct Panels {
  const char* data;
  int64_t pitch;  // bytes from panel to panel; another lies behind the last
  int64_t count;  // 1 .. kPanels
  float* c;
  int64_t c_pitch;  // floats

  const char* at(int64_t panel) const { return data + panel * pitch; }
  float* sums(int64_t panel) const { return c + panel * c_pitch; }
  int64_t tiles(int64_t rows, int64_t alone) const {
    return ceil_div(rows, count > 1 ? kPairRows : alone);
  }
};

// The blocks that come next, of each panel its own, in equal shares for the tiles of this one.
class NextBlocks {
 public:
  // A block has so many bytes and is fetched from a tile in so many parts. The next one lies
  // `there` bytes behind a panel's begin, or (-1) at the begin of the panel that is multiplied
  // next.
  NextBlocks(const Panels& panels, int64_t there, int64_t bytes, int64_t tiles, int64_t fetches)
      : last_panel_(panels.count - 1) {
    const int64_t of_each = (tiles + last_panel_) >> last_panel_;  // kPanels <= 2
    lines_ = ceil_div(bytes / 64, max(of_each * fetches, 1));
    share_ = fetches * lines_ * 64;
    for (int64_t p = 0; p < panels.count; ++p)
      next_[p] = there < 0 ? panels.at(p + panels.count) : panels.at(p) + there;
  }
  Ahead of_tile(int64_t t) const {
    return {next_[t & last_panel_] + (t >> last_panel_) * share_, lines_};
  }

 private:
  const char* next_[kPanels];
  int64_t last_panel_, lines_, share_;
};

// f<R>() for a tile of R <= kMost rows, known to the compiler.
template <int kMost, class F>
inline void with_rows(int64_t R, const F& f) {
  if constexpr (kMost > 1)
    if (R < kMost) return with_rows<kMost - 1>(R, f);
  f.template operator()<kMost>();
}

// For Tiles whose sums are C's elements as they are.
struct Finished {
  static void finish(const auto&, Range, const char*, Range, float*) {}
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
        int64_t p = 0;
        for (int64_t together; p < count; p += together) {
          together = min(Tiles::kTogether, count - p);
          const Panels now{.data = b + p * b_stride,
                           .pitch = b_stride,
                           .count = together,
                           .c = waiting + (p * M + some.begin - rows.begin) * kNR,
                           .c_pitch = M * kNR};
          const auto done = [&](Range tile) {  // while its sums are in L1
            if (slab.end < w.K) return;
            for (int64_t i = 0; i < together; ++i) {
              const int64_t n0 = (first + p + i) * kNR, n = min(kNR, w.N - n0);
              float* const sums = now.sums(i) + (tile.begin - some.begin) * kNR;
              Tiles::finish(A, slab, now.at(i), tile, sums);
              finish_rows<kNR>(epilogue, tile, n0, n, sums);
            }
          };
          if (w.K) {
            Tiles::multiply(A, some, slab, now, done);
          } else {
            for (int64_t i = 0; i < together; ++i)
              memset(now.sums(i), 0, (some.end - some.begin) * kNR * sizeof(float));
            done(some);
          }
        }
      }
    }
  }
}

}  // namespace
