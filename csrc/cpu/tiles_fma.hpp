// Tiles of fp32 multiply-adds, for every CPU without a tile unit. Included by gemm.hpp.
//
//   for each group of kGroup panels
//     for each slab of kSlab inner steps         W's part is converted, unless it is packed fp32
//       for each part of at most kMaxRows rows   A's part stays in L2 for the whole group
//         for each panel of kNR columns
//           for each block of kKC steps            W's block, kKC x kNR (16 KiB), in L1 for all
//           rows
//             for each tile of kMR rows              kMR x kNR accumulators in registers
//
//        k ->            kNR
//   A  [ kMR rows ]  x  [ W ]   kMR * kNR / lanes accumulators + kNR / lanes of W + 1 broadcast
//
// C waits in scratch from slab to slab; after the last one its rows go through the epilogue.
// Each tile prefetches the next tile's A into L1 and a part of the next block of W into L2:
// without, 8 % and 15 % of the time are spent waiting for them. Sums over blocks of kKC, not over
// all of K, also keep the rounding error low. A result depends on its own row of A and column of W
// only: not on M, its tile or its thread.
#pragma once
#include "scratch.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kMR = 14;  // 28 accumulators + 2 + 1 of 32 registers
#else
constexpr int64_t kMR = 6;  // 12 accumulators + 2 + 1 of 16 registers
#endif
constexpr int64_t kNR = 2 * Vec::kLanes;
constexpr int64_t kKC = 128;
constexpr int64_t kSlab = 6 * kKC;
constexpr int64_t kMaxRows = 16 * kMR;  // of A's part: 224 * 768 * 4 B = 672 KiB of a 2 MiB L2
constexpr int64_t kGroup = 8;           // panels: 8 * 32 * 768 * 4 B = 768 KiB of it when converted
constexpr int64_t kTileRows = kMR;

// Rows of the engine's groups of images: 14 tiles use a weight panel before the next is fetched.
inline int64_t group_rows(Precision) { return 192; }
// The engine's rows between products, other than what Left holds: q, k and v.
inline DType row_dtype(Precision) { return DType::f32; }

// The MLP's chunk of rows: their F-wide hidden rows fill 3 MiB for each thread (252 rows of a
// ViT-B), of which the GEMM walks one slab in L2 at a time. 1 MiB, all in L2, is 4 % slower at
// batch 1 and equal at batch 8: shorter chunks use each weight panel less.
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  const int64_t fit = (int64_t{3} << 20) * threads / (row_stride(max(F, 1)) * 4) / kMR * kMR;
  return max(8 * kMR, fit);
}
inline int64_t hidden_columns(int64_t F) { return F; }  // the slabs of the GEMM cut the sum already

// A (M, K): rows of floats, `stride` apart.
struct Left {
  float* data;
  int64_t stride;

  static Left at(float* memory, int64_t K, Precision) { return {memory, row_stride(K)}; }
  static int64_t floats(int64_t M, int64_t K, Precision) { return M * row_stride(K); }
  // Rows that a product can read where they are, unless their distance is one row_stride() avoids.
  static bool reads_in_place(DType dtype, int64_t stride) {
    return dtype == DType::f32 && stride % kAliasing != 0;
  }
  static Left in_place(const void* rows, int64_t stride) {
    return {const_cast<float*>(static_cast<const float*>(rows)), stride};
  }
  // Attention's scores become weights where they are.
  static Left of_scores(float* scores, int64_t stride, float*, Precision) {
    return {scores, stride};
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t m, float*) const { return data + m * stride; }
  void close(int64_t, const float*, int64_t) const {}
  // Columns k .. k + n of row m; k is a multiple of Vec::kLanes in store.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(data + m * stride + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(data + m * stride + k, from, n * sizeof(float));
  }
};

// Per thread, in floats: the converted part of W, and C of a group for M rows.
inline int64_t gemm_scratch(int64_t M, int64_t, Precision) { return kGroup * kNR * (kSlab + M); }

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

inline DType packed_dtype(Precision p) { return p == Precision::bf16 ? DType::bf16 : DType::f32; }

// Floats of a panel of K steps in scratch.
inline int64_t panel_floats(int64_t K, Precision) { return K * kNR; }

// The slab of a panel of any weights as packed fp32, [k][kNR].
inline void convert_panel(const Weights& w, int64_t panel, Range slab, float* out) {
  const int64_t K = slab.end - slab.begin, row = w.first_row + panel * kNR;
  const int64_t step = w.first_step + slab.begin;
  if (!w.packed)
    return pack_block(w.dtype, offset(w.dtype, w.data, row * w.pitch), w.pitch, w.N - panel * kNR,
                      step, K, out);
  for (int64_t i = 0; i < K * kNR; i += Vec::kLanes)
    load_as(packed_dtype(w.precision), w.data, row * w.pitch + step * kNR + i, Vec::kLanes)
        .store(out + i);
}

inline int64_t packed_bytes(int64_t N, int64_t K, Precision precision) {
  return round_up(N, kNR) * K * (packed_dtype(precision) == DType::f32 ? 4 : 2);
}

// Panel `panel` of an unpacked weight to its place among the packed ones; `scratch` holds a panel.
inline void pack_panel(const Weights& w, int64_t panel, float* scratch, void* panels) {
  convert_panel(w, panel, {0, w.K}, scratch);
  for (int64_t i = 0; i < w.K * kNR; i += Vec::kLanes)
    store_as(packed_dtype(w.precision), panels, panel * w.K * kNR + i, Vec::load(scratch + i),
             Vec::kLanes);
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
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  const bool ready = w.packed && packed_dtype(w.precision) == DType::f32;
  const int64_t M = rows.end - rows.begin, parts = ceil_div(M, kMaxRows);
  float* const converted = scratch;                       // [panel][k][kNR]
  float* const waiting = scratch + kGroup * kSlab * kNR;  // [panel][row][kNR]
  for (int64_t first = panels.begin; first < panels.end; first += kGroup) {
    const int64_t count = min(kGroup, panels.end - first);
    int64_t k0 = 0;
    do {  // at least once: K = 0 gives C = 0
      const Range slab{k0, min(w.K, k0 + kSlab)};
      const float* b = static_cast<const float*>(w.data) + (w.first_row + first * kNR) * w.pitch +
                       (w.first_step + k0) * kNR;
      if (!ready) {
        for (int64_t p = 0; p < count; ++p)
          convert_panel(w, first + p, slab, converted + p * kSlab * kNR);
        b = converted;
      }
      const int64_t b_stride = (ready ? w.pitch : kSlab) * kNR;  // from panel to panel
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t m0 = M * part / parts, m1 = M * (part + 1) / parts;
        for (int64_t p = 0; p < count; ++p) {
          float* const c = waiting + (p * M + m0) * kNR;
          const float* const panel = b + p * b_stride;
          if (!w.K) memset(c, 0, (m1 - m0) * kNR * sizeof(float));
          multiply_slab(A.data + (rows.begin + m0) * A.stride + k0, A.stride, m1 - m0, panel,
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

// ---- Products inside attention ---------------------------------------------------

// Keys (n, E) as the panel of a product with queries: kNR of them at most, [e][kNR].
inline void pack_keys(DType type, const void* keys, int64_t stride, int64_t n, int64_t E, Precision,
                      float* panel) {
  pack_block(type, keys, stride, n, 0, E, panel);
}

// Columns of values (n, columns) as the panel of a product with weights: kNR at most, [n][kNR].
inline void pack_values(DType type, const void* values, int64_t stride, int64_t n, int64_t columns,
                        Precision, float* panel) {
  for (int64_t e = 0; e < kNR; e += Vec::kLanes)
    for (int64_t j = 0; j < n; ++j)
      (e < columns ? load_as(type, values, j * stride + e, columns - e) : Vec::set(0))
          .store(panel + j * kNR + e);
}

// c (R, kNR) = or += the first R <= kTileRows rows of a (R, K) times steps k0 .. k0 + K of a panel.
inline void multiply_panel(const Left& a, int64_t R, const float* panel, int64_t k0, int64_t K,
                           float* c, int64_t c_stride, bool add) {
  multiply(R, a.data, a.stride, panel + k0 * kNR, K, c, c_stride, add, {a.data, panel});
}

}  // namespace
