// C (M, N) = A (M, K) W^T (N, K), fp32 accumulators, W in any float dtype, with an epilogue per row
// of C.
//
//   for each panel of kNR columns            W panel, K x kNR: converted or transposed into L1/L2
//   scratch
//     for each block of kKC inner steps        kKC * kNR * 4 B = 32 KiB (AVX-512): the block stays
//     in L1
//       for each tile of kMR rows              kMR x kNR accumulators live in registers
//
//        k ->            kNR
//   A  [ kMR rows ]  x  [ W ]   kMR * kNR / lanes accumulators + kNR / lanes of W + 1 broadcast <=
//   registers
//
// Sums over blocks of kKC, not over all of K, also keep the rounding error at the level of a
// blocked BLAS. A result depends on its own row of A and column of W only: not on M, the tile it
// falls in or the thread.
#pragma once
#include "parallel.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kMR = 14;  // 28 accumulators + 2 + 1 of 32 registers
#else
constexpr int64_t kMR = 6;  // 12 accumulators + 2 + 1 of 16 registers
#endif
constexpr int64_t kNR = 2 * Vec::kLanes;
constexpr int64_t kKC = 256;
constexpr int64_t kABytes = 1 << 20;  // rows of A walked per panel: half of a 2 MiB L2
constexpr int64_t kMaxRows = 24 * kMR;

struct Weights {
  DType dtype;
  const void* data;  // (N, K) row-major, or panels [N / kNR][K][kNR]
  int64_t N, K;
  bool packed;
};

// Per thread: one block of a panel, and the tiles of C that wait for their next block.
constexpr int64_t kGemmScratch = kKC * kNR + kMaxRows * kNR;  // floats

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

// c (R, kNR) = or += a (R, K) b (K, kNR)
template <int R>
inline void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t K, float* c,
                          int64_t c_stride, bool add) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec::set(0);
  for (int64_t k = 0; k < K; ++k) {
    const Vec b0 = Vec::load(b + k * kNR), b1 = Vec::load(b + k * kNR + Vec::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = Vec::set(a[r * a_stride + k]);
      acc[r][0] = fma(x, b0, acc[r][0]);
      acc[r][1] = fma(x, b1, acc[r][1]);
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
                     float* c, int64_t c_stride, bool add) {
  switch (rows) {
#define VITKERN_ROWS(R) \
  case R:               \
    return multiply_rows<R>(a, a_stride, b, K, c, c_stride, add);
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

// Rows [begin, end) of C for the panels [first, last), by one thread.
// epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const float* A, int64_t a_stride, Range rows, const Weights& w, Range panels,
               float* scratch, const Epilogue& epilogue) {
  float* const block = scratch;
  float* const c = scratch + kKC * kNR;
  const int64_t fit = kABytes / (max(w.K, 1) * 4) / kMR * kMR;
  const int64_t step = max(kMR, min(kMaxRows, fit));
  for (int64_t m0 = rows.begin; m0 < rows.end; m0 += step) {
    const int64_t m1 = min(rows.end, m0 + step);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const int64_t n0 = panel * kNR, n = min(kNR, w.N - n0);
      int64_t k0 = 0;
      do {  // at least once: K = 0 gives C = 0
        const int64_t K = min(kKC, w.K - k0);
        const float* b = panel_block(w, panel, k0, K, block);
        for (int64_t m = m0; m < m1; m += kMR) {
          const int64_t R = min(kMR, m1 - m);
          float* const tile = c + (m - m0) * kNR;
          multiply(R, A + m * a_stride + k0, a_stride, b, K, tile, kNR, k0 > 0);
          if (k0 + K >= w.K)
            for (int64_t r = 0; r < R; ++r) epilogue(m + r, n0, n, tile + r * kNR);
        }
        k0 += K;
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
