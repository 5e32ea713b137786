// C (M, N) = A (M, K) W^T (N, K), fp32 accumulators, W in any float dtype, with an epilogue per
// row.
//
//   for each group of kGroup panels
//     for each slab of kSlab inner steps       W's part is converted, unless it is packed fp32:
//     once
//       for each part of at most kMaxRows rows   A's part stays in L2 for the whole group
//         for each panel of kNR columns
//           for each block of kKC steps            W's block, kKC x kNR (16 KiB): in L1 for all
//           rows
//             for each tile of kMR rows              kMR x kNR accumulators in registers
//
//        k ->            kNR
//   A  [ kMR rows ]  x  [ W ]   kMR * kNR / lanes accumulators + kNR / lanes of W + 1 broadcast
//
// C waits in scratch from slab to slab; after the last one its rows go through the epilogue.
// Each tile prefetches the next tile's A into L1 and a part of the next block of W into L2:
// without, 8 % and 15 % of the time are spent waiting for them. Sums over blocks of kKC, not over
// all of K, also keep the rounding error low. A result depends on its own row of A
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
constexpr int64_t kMaxRows = 16 * kMR;  // of A's part: 224 * 768 * 4 B = 672 KiB of a 2 MiB L2
constexpr int64_t kGroup = 8;           // panels: 8 * 32 * 768 * 4 B = 768 KiB of it when converted

struct Weights {
  DType dtype;
  const void* data;  // (N, K) row-major, or panels [N / kNR][K][kNR]
  int64_t N, K;
  bool packed;
};

// Per thread, in floats: the converted part of W, and C of a group for M rows.
inline int64_t gemm_scratch(int64_t M) { return kGroup * kNR * (kSlab + M); }

constexpr int64_t kFarAhead = 8 * kLine;

// out[k][j] = w[j][k0 + k] for j < kNR, k < K; rows j >= n are zero. w rows are `stride` apart.
inline void pack_block(DType type, const void* w, int64_t stride, int64_t n, int64_t k0, int64_t K,
                       float* out) {
  constexpr int64_t L = Vec::kLanes;
  for (int64_t j = 0; j < kNR; j += L)
    for (int64_t k = 0; k < K; k += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i) {
        const int64_t at = (j + i) * stride + k0 + k;
        rows[i] = j + i < n ? load_as(type, w, at, K - k) : Vec::set(0);
        __builtin_prefetch(offset(type, w, at + kFarAhead), 0, 2);  // no stream: rows are far apart
      }
      transpose(rows);
      for (int64_t i = 0; i < min(L, K - k); ++i) rows[i].store(out + (k + i) * kNR + j);
    }
}

// The slab of a panel of any weights as packed fp32, [k][kNR].
inline void convert_panel(const Weights& w, int64_t panel, Range slab, float* out) {
  const int64_t K = slab.end - slab.begin;
  const void* const from = offset(w.dtype, w.data, panel * kNR * w.K);
  if (!w.packed) return pack_block(w.dtype, from, w.K, w.N - panel * kNR, slab.begin, K, out);
  for (int64_t i = 0; i < K * kNR; i += Vec::kLanes)
    load_as(w.dtype, from, slab.begin * kNR + i, Vec::kLanes).store(out + i);
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

// c (M, kNR) = or += a (M, K) b (K, kNR), K at most a slab; `after` is what b will be next time.
// Tiles are of even height, 197 rows are 2 of 14 and 13 of 13: a tile of one row would take 4 / 14
// of the time of a whole one.
inline void multiply_slab(const float* A, int64_t a_stride, int64_t M, const float* b, int64_t K,
                          const float* after, float* c, bool add) {
  const int64_t tiles = ceil_div(M, kMR);
  for (int64_t k0 = 0; k0 < K; k0 += kKC) {
    const int64_t steps = min(kKC, K - k0);
    const float* const next = k0 + kKC < K ? b + (k0 + kKC) * kNR : after;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = M * t / tiles, R = M * (t + 1) / tiles - m;
      const float* const a = A + m * a_stride + k0;
      const int64_t line = t * kKC * 4 % (kKC * kNR);  // this tile's share of the next block
      multiply(R, a, a_stride, b + k0 * kNR, steps, c + m * kNR, kNR, add || k0 > 0,
               {a + R * a_stride, next + line});
    }
  }
}

// Rows [begin, end) of C for the panels [first, last), by one thread; `scratch` for all of A's
// rows. epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const float* A, int64_t a_stride, Range rows, const Weights& w, Range panels,
               float* scratch, const Epilogue& epilogue) {
  const bool ready = w.packed && w.dtype == DType::f32;
  const int64_t M = rows.end - rows.begin, parts = ceil_div(M, kMaxRows);
  float* const converted = scratch;                       // [panel][k][kNR]
  float* const waiting = scratch + kGroup * kSlab * kNR;  // [panel][row][kNR]
  for (int64_t first = panels.begin; first < panels.end; first += kGroup) {
    const int64_t count = min(kGroup, panels.end - first);
    int64_t k0 = 0;
    do {  // at least once: K = 0 gives C = 0
      const Range slab{k0, min(w.K, k0 + kSlab)};
      const float* b = static_cast<const float*>(w.data) + (first * w.K + k0) * kNR;
      if (!ready) {
        for (int64_t p = 0; p < count; ++p)
          convert_panel(w, first + p, slab, converted + p * kSlab * kNR);
        b = converted;
      }
      const int64_t b_stride = (ready ? w.K : kSlab) * kNR;  // from panel to panel
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t m0 = M * part / parts, m1 = M * (part + 1) / parts;
        for (int64_t p = 0; p < count; ++p) {
          float* const c = waiting + (p * M + m0) * kNR;
          const float* const panel = b + p * b_stride;
          if (!w.K) memset(c, 0, (m1 - m0) * kNR * sizeof(float));
          multiply_slab(A + (rows.begin + m0) * a_stride + k0, a_stride, m1 - m0, panel,
                        slab.end - slab.begin, panel + b_stride, c, k0 > 0);
          if (slab.end < w.K) continue;
          const int64_t n0 = (first + p) * kNR, n = min(kNR, w.N - n0);
          for (int64_t m = m0; m < m1; ++m) epilogue(rows.begin + m, n0, n, c + (m - m0) * kNR);
        }
      }
      k0 = slab.end;
    } while (k0 < w.K);
  }
}

// The whole product by a team: columns are shared out, so that no thread converts another's
// weights; rows when there are so many that converting is cheap, or too few columns. A must be
// ready in all threads; no sync at the end.
template <class Epilogue>
void gemm(const Team& team, const float* A, int64_t a_stride, int64_t M, const Weights& w,
          float* scratch, const Epilogue& epilogue) {
  const int64_t panels = ceil_div(w.N, kNR);
  const bool many_rows = M >= 2 * kMaxRows * team.size;
  if (!many_rows && (panels >= 4 * team.size || M <= kMR))
    gemm_part(A, a_stride, {0, M}, w, team.share(panels), scratch, epilogue);
  else
    gemm_part(A, a_stride, team.share(M, kMR), w, {0, panels}, scratch, epilogue);
}

}  // namespace
