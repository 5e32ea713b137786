// C (M, N) = A (M, K) W^T (N, K), fp32 accumulators, W in any float dtype, with an epilogue per
// row.
//
//   for each group of panels               C of the group waits in scratch, for K beyond one slab
//     for each slab of kSlab inner steps     A's slab (rows x kSlab) stays in L2 for the whole
//     group
//       for each panel of kNR columns
//         for each block of kKC steps          W's block, kKC x kNR (16 KiB): in L1 for all rows
//           for each tile of kMR rows            kMR x kNR accumulators in registers
//
//        k ->            kNR
//   A  [ kMR rows ]  x  [ W ]   kMR * kNR / lanes accumulators + kNR / lanes of W + 1 broadcast
//
// Each tile prefetches the next tile's A into L1 and a part of the next block of W into L2:
// without, 8 % and 15 % of the time are spent waiting for them. Sums over blocks of kKC, not over
// all of K, also keep the rounding error below a plain BLAS's. A result depends on its own row of A
// and column of W only: not on M, its tile or its thread.
#pragma once
#include "parallel.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kMR = 14;  // 28 accumulators + 2 + 1 of 32 registers
#else
constexpr int64_t kMR = 6;  // 12 accumulators + 2 + 1 of 16 registers
#endif
constexpr int64_t kNR = 2 * Vec::kLanes;
constexpr int64_t kKC = 128;
constexpr int64_t kLine = 16;  // floats in a cache line
constexpr int64_t kSlab = 6 * kKC;
constexpr int64_t kMaxRows = 16 * kMR;  // of A's slab: 224 * 768 * 4 B = 672 KiB of a 2 MiB L2
constexpr int64_t kGroup = 12;          // panels: their C is 336 KiB

struct Weights {
  DType dtype;
  const void* data;  // (N, K) row-major, or panels [N / kNR][K][kNR]
  int64_t N, K;
  bool packed;
};

// Per thread: one block of a panel, and the tiles of C that wait for their next block.
constexpr int64_t kGemmScratch = kKC * kNR + kGroup * kMaxRows * kNR;  // floats

// out[k][j] = w[j][k0 + k] for j < kNR, k < K; rows j >= n are zero. w rows are `stride` apart.
inline void pack_block(DType type, const void* w, int64_t stride, int64_t n, int64_t k0, int64_t K,
                       float* out) {
  constexpr int64_t L = Vec::kLanes;
  for (int64_t j = 0; j < kNR; j += L)
    for (int64_t k = 0; k < K; k += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i)
        rows[i] = j + i < n ? load_as(type, w, (j + i) * stride + k0 + k, K - k) : Vec::set(0);
      transpose(rows);
      for (int64_t i = 0; i < min(L, K - k); ++i) rows[i].store(out + (k + i) * kNR + j);
    }
}

// Block [k0, k0 + K) of a panel as fp32 [k][kNR]: in place when it is already that, else in
// `scratch`.
inline const float* panel_block(const Weights& w, int64_t panel, int64_t k0, int64_t K,
                                float* scratch) {
  if (!w.packed) {
    const void* rows = offset(w.dtype, w.data, panel * kNR * w.K);
    pack_block(w.dtype, rows, w.K, w.N - panel * kNR, k0, K, scratch);
    return scratch;
  }
  const int64_t start = (panel * w.K + k0) * kNR;
  if (w.dtype == DType::f32) return static_cast<const float*>(w.data) + start;
  const bf16* from = static_cast<const bf16*>(w.data) + start;
  for (int64_t i = 0; i < K * kNR; i += Vec::kLanes)
    Vec::load(from + i, Vec::kLanes).store(scratch + i);
  return scratch;
}

// What the next calls will read: A's next tile, and lines of W's next block.
struct Ahead {
  const float* a;
  const float* b;
};

// c (R, kNR) = or += a (R, K) b (K, kNR)
template <int R>
inline void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t K, float* c,
                          int64_t c_stride, bool add, Ahead ahead) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec::set(0);
  for (int64_t k0 = 0; k0 < K; k0 += kLine) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) __builtin_prefetch(ahead.a + r * a_stride + k0, 0, 3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) __builtin_prefetch(ahead.b + 4 * k0 + i * kLine, 0, 2);
    const int64_t end = min(K, k0 + kLine);
    for (int64_t k = k0; k < end; ++k) {
      const Vec b0 = Vec::load(b + k * kNR), b1 = Vec::load(b + k * kNR + Vec::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec x = Vec::set(a[r * a_stride + k]);
        acc[r][0] = fma(x, b0, acc[r][0]);
        acc[r][1] = fma(x, b1, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) {
      float* out = c + r * c_stride + h * Vec::kLanes;
      (add ? Vec::load(out) + acc[r][h] : acc[r][h]).store(out);
    }
}

inline void multiply(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t K,
                     float* c, int64_t c_stride, bool add, Ahead ahead) {
  switch (rows) {
#define VITKERN_ROWS(R) \
  case R:               \
    return multiply_rows<R>(a, a_stride, b, K, c, c_stride, add, ahead);
    VITKERN_ROWS(1)
    VITKERN_ROWS(2)
    VITKERN_ROWS(3)
    VITKERN_ROWS(4)
    VITKERN_ROWS(5)
    VITKERN_ROWS(6)
#if defined(__AVX512F__)
    VITKERN_ROWS(7)
    VITKERN_ROWS(8)
    VITKERN_ROWS(9)
    VITKERN_ROWS(10)
    VITKERN_ROWS(11)
    VITKERN_ROWS(12)
    VITKERN_ROWS(13)
    VITKERN_ROWS(14)
#endif
#undef VITKERN_ROWS
  }
}

// One panel's slab [k0, k1) for the rows [begin, end), added to c (rows, kNR).
// Tiles are of even height, 197 rows are 2 of 14 and 13 of 13: a tile of one row would take 4 / 14
// of the time of a whole one.
inline void multiply_slab(const float* A, int64_t a_stride, Range rows, const Weights& w,
                          int64_t panel, Range slab, float* block, float* c) {
  const int64_t M = rows.end - rows.begin, tiles = ceil_div(M, kMR);
  for (int64_t k0 = slab.begin; k0 < slab.end; k0 += kKC) {
    const int64_t K = min(kKC, slab.end - k0);
    const float* const b = panel_block(w, panel, k0, K, block);
    const float* const next = w.packed && w.dtype == DType::f32 ? b + K * kNR : b;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = M * t / tiles, R = M * (t + 1) / tiles - m;
      const float* const a = A + (rows.begin + m) * a_stride + k0;
      const int64_t line = t * kKC * 4 % (kKC * kNR);  // this tile's part of the next block
      multiply(R, a, a_stride, b, K, c + m * kNR, kNR, k0 > 0, {a + R * a_stride, next + line});
    }
  }
}

// Rows [begin, end) of C for the panels [first, last), by one thread.
// epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const float* A, int64_t a_stride, Range rows, const Weights& w, Range panels,
               float* scratch, const Epilogue& epilogue) {
  float* const block = scratch;
  float* const c = scratch + kKC * kNR;  // [panel of the group][row][kNR]
  const int64_t parts = ceil_div(rows.end - rows.begin, kMaxRows);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t M = rows.end - rows.begin;
    const Range mine{rows.begin + M * part / parts, rows.begin + M * (part + 1) / parts};
    for (int64_t first = panels.begin; first < panels.end; first += kGroup) {
      const int64_t last = min(panels.end, first + kGroup);
      int64_t k0 = 0;
      do {  // at least once: K = 0 gives C = 0
        const Range slab{k0, min(w.K, k0 + kSlab)};
        for (int64_t panel = first; panel < last; ++panel) {
          float* const cp = c + (panel - first) * kMaxRows * kNR;
          if (!w.K) memset(cp, 0, kMaxRows * kNR * sizeof(float));
          multiply_slab(A, a_stride, mine, w, panel, slab, block, cp);
          if (slab.end < w.K) continue;
          const int64_t n0 = panel * kNR, n = min(kNR, w.N - n0);
          for (int64_t m = mine.begin; m < mine.end; ++m)
            epilogue(m, n0, n, cp + (m - mine.begin) * kNR);
        }
        k0 = slab.end;
      } while (k0 < w.K);
    }
  }
}

// The whole product by a team: columns are split when there are enough panels, so that no thread
// converts another's weights; rows otherwise. A must be ready in all threads; no sync at the end.
template <class Epilogue>
void gemm(const Team& team, const float* A, int64_t a_stride, int64_t M, const Weights& w,
          float* scratch, const Epilogue& epilogue) {
  const int64_t panels = ceil_div(w.N, kNR);
  if (panels >= 4 * team.size || M <= kMR)
    gemm_part(A, a_stride, {0, M}, w, team.share(panels), scratch, epilogue);
  else
    gemm_part(A, a_stride, team.share(M, kMR), w, {0, panels}, scratch, epilogue);
}

}  // namespace
