// Tiles of 16-bit integer multiply-adds for the engine's bf16 precision, faster than fp32 ones by 2
// (AVX-512 VNNI) or 1.5 (AVX2). Included by gemm.hpp; the loops are in walk.hpp.
//
// kBlock steps of a row, of A or of W, are a block: integers times one scale, so chosen that the
// integers' Euclidean norm is at most 46340. By Cauchy and Schwarz the sum over two blocks is then
// at most 46340^2 < 2^31 and exact in 32 bits, whatever the data: sums on the way may wrap around,
// the last one is right. It is multiplied by both scales and added in fp32.
//
// An element in bf16 has an error of 2^-9.5 of itself (rms). Here it has one of 0.29 units, and a
// unit of an ordinary block of 256 is 2^-11.5 of the elements' rms: a sixteenth of bf16's error. An
// element may be 32767 units, so that the largest of a block can be 11 times its rms before the
// unit grows; beyond, the large element's own error dominates in either format, unless the weight
// it is multiplied by is tiny.
//
// A (M, K)  [row]: [K integers][a scale for each block][K floats: the row before it is settled]
// W (N, K)  [32 columns][block]: [pairs of steps][32 columns][2 integers], then [32 scales]
//
// A block that holds NaN or infinity has the scale NaN: every sum it enters is NaN.
#pragma once
#include "tiles_fma.hpp"

namespace {
namespace int16_tiles {

#if defined(__AVX512F__)
typedef __m512i Ints;
constexpr int64_t kTileRows = 14;  // times 2 vectors: 28 accumulators + 2 of W + 1 broadcast
constexpr int64_t kMaxRows = fma_tiles::kMaxRows;
constexpr int kHeld = 2;  // vectors of W in registers; the others are read as operands
inline Ints zero() { return _mm512_setzero_si512(); }
inline Ints load_ints(const char* p) { return _mm512_loadu_si512(p); }
inline Ints broadcast(const char* pair) {
  return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(pair));
}
inline Vec to_floats(Ints sum) { return {_mm512_cvtepi32_ps(sum)}; }
inline void store_nearest(Vec v, int16_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v.v)));
}
// The nearest integers of a and b, lane by lane a pair.
inline void store_pairs(Vec a, Vec b, int32_t* out) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 16);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(a.v), high));
}
inline Vec square_root(Vec v) { return {_mm512_sqrt_ps(v.v)}; }
#else
typedef __m256i Ints;
constexpr int64_t kTileRows = 3;   // times 4 vectors: 12 accumulators + 1 of W + 1 broadcast + 2
constexpr int64_t kMaxRows = 192;  // of A's part: 288 KiB of a 512 KiB L2
constexpr int kHeld = 1;
inline Ints zero() { return _mm256_setzero_si256(); }
inline Ints load_ints(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Ints broadcast(const char* pair) {
  return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(pair));
}
inline Vec to_floats(Ints sum) { return {_mm256_cvtepi32_ps(sum)}; }
inline void store_nearest(Vec v, int16_t* out) {
  const __m256i q = _mm256_cvtps_epi32(v.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)));
}
inline void store_pairs(Vec a, Vec b, int32_t* out) {
  const __m256i high = _mm256_slli_epi32(_mm256_cvtps_epi32(b.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_blend_epi16(_mm256_cvtps_epi32(a.v), high, 0xaa));
}
inline Vec square_root(Vec v) { return {_mm256_sqrt_ps(v.v)}; }
#endif

// sum += x y over both integers of each pair, where y is in a register ("v") or in memory ("m"). As
// assembly: with its intrinsic GCC 12 copies each accumulator of vpdpwssd to another register and
// back through the stack, and runs at 40 % of the speed; the sums of vpmaddwd it adds up in another
// order, for which there are not enough registers.
#if defined(VITKERN_PAIRS_IN_TWO)
#define VITKERN_ADD_PAIRS(where, y) \
  Ints both;                        \
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(both) : "v"(x), where(y))
#elif defined(VITKERN_EMULATED)
#define VITKERN_ADD_PAIRS(where, y) sum = _mm512_dpwssd_epi32(sum, x, y)
#elif defined(__AVX512F__)
#define VITKERN_ADD_PAIRS(where, y) asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), where(y))
#else
#define VITKERN_ADD_PAIRS(where, y) \
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), where(y))
#endif
inline Ints add_pairs(Ints sum, Ints x, Ints y) {
  VITKERN_ADD_PAIRS("v", y);
  return sum;
}
inline Ints add_pairs(Ints sum, Ints x, const char* y) {
  VITKERN_ADD_PAIRS("m", *reinterpret_cast<const Ints*>(y));
  return sum;
}
#undef VITKERN_ADD_PAIRS

using Sums = Ints;

constexpr int64_t kNR = 32;
constexpr int64_t kBlock = 256;
constexpr int64_t kPairs = kBlock / 2;
constexpr int64_t kBlockBytes = kBlock * kNR * 2 + kNR * 4;
constexpr int kVectors = kNR / Vec::kLanes;

using fma_tiles::group_rows;
using fma_tiles::hidden_columns;
using fma_tiles::row_dtype;
// All in L2, before and after they are settled: 1 % faster than 3 MiB.
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  return fma_tiles::rows_that_fill(int64_t{1} << 20, round_up(max(F, 1), kLine) * 6, kTileRows,
                                   threads);
}

inline int64_t gemm_scratch(int64_t M, int64_t, Precision) { return kGroup * kNR * (kSlab + M); }

// The sum of the squares of x * by.
inline float sum_of_squares(const float* x, int64_t n, float by) {
  Vec sum = Vec::set(0);
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const Vec v = Vec::load(x + i, n - i) * Vec::set(by);
    sum = fma(v, v, sum);
  }
  return sum.sum();
}

// What n elements may have in units of their scale: a norm that rounding, which moves it by at most
// sqrt(n) / 2, and the rounding of this arithmetic leave below 46340; and each one for itself.
inline float most_norm(int64_t n) { return 46339 - 0.5f * sqrtf(static_cast<float>(n)); }
constexpr float kMostUnits = 32766.5f;
constexpr float kTiny = 1e-30f;  // the inverse of such a scale could overflow: all is zero

// x (n) -> integers, and zeros up to a multiple of Vec::kLanes; returns their scale.
inline float quantise(const float* x, int64_t n, int16_t* out) {
  Vec top = Vec::set(0), sum = Vec::set(0);
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const Vec v = Vec::load(x + i, n - i);
    sum = fma(v, v, sum);
    top = greater(magnitude(v), top);  // a NaN loses here, and is in the sum
  }
  const float largest = top.largest();
  float squares = sum.sum();
  const bool finite = squares == squares && largest < INFINITY;
  float inverse = 0;
  if (finite && largest > kTiny) {
    const bool ordinary = largest > 1e-15f && largest < 1e15f;
    if (ordinary)
      squares /= largest * largest;
    else  // those squares leave the range of fp32
      squares = sum_of_squares(x, n, 1 / largest);
    const float units = most_norm(n) / sqrtf(squares);  // that the largest element would have
    inverse = (units < kMostUnits ? units : kMostUnits) / largest;
  }
  for (int64_t i = 0; i < n; i += Vec::kLanes)
    store_nearest(finite ? Vec::load(x + i, n - i) * Vec::set(inverse) : Vec::set(0), out + i);
  return finite ? (inverse ? 1 / inverse : 0) : NAN;
}

struct Left {
  char* data;
  int64_t K;
  int64_t bytes, scale_bytes, stride;  // of a row's integers, of its scales, from row to row

  static Left at(float* memory, int64_t K, Precision) {
    const int64_t bytes = round_up(K, 32) * 2, scale_bytes = round_up(ceil_div(K, kBlock) * 4, 64);
    const int64_t stride = row_stride((bytes + scale_bytes) / 4 + round_up(K, kLine)) * 4;
    return {reinterpret_cast<char*>(memory), K, bytes, scale_bytes, stride};
  }
  static int64_t floats(int64_t M, int64_t K, Precision p) {
    return M * at(nullptr, K, p).stride / 4;
  }
  const int32_t* pairs(int64_t m, int64_t k) const {
    return reinterpret_cast<const int32_t*>(data + m * stride + k * 2);
  }
  float* scales(int64_t m) const { return reinterpret_cast<float*>(data + m * stride + bytes); }
  float* waiting(int64_t m) const {
    return reinterpret_cast<float*>(data + m * stride + bytes + scale_bytes);
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    int16_t* const out = reinterpret_cast<int16_t*>(data + m * stride);
    for (int64_t k = 0; k < n; k += kBlock)
      scales(m)[k / kBlock] = quantise(row + k, min(kBlock, n - k), out + k);
  }
  // Columns k .. k + n of row m, until settle(m).
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(waiting(m) + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(waiting(m) + k, from, n * sizeof(float));
  }
  static constexpr bool kSettles = true;
  void settle(int64_t m) const { close(m, waiting(m), K); }
};

inline int64_t panel_bytes(int64_t K) { return ceil_div(K, kBlock) * kBlockBytes; }
inline int64_t packed_bytes(int64_t N, int64_t K, Precision) {
  return ceil_div(N, kNR) * panel_bytes(K);
}

// Panel `panel` of an unpacked weight to its place among the packed ones.
inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  char* block = static_cast<char*>(panels) + panel * panel_bytes(w.K);
  for (int64_t k0 = 0; k0 < w.K; k0 += kBlock, block += kBlockBytes) {
    const int64_t K = min(kBlock, w.K - k0);
    int16_t* const integers = reinterpret_cast<int16_t*>(block);
    float* const scales = reinterpret_cast<float*>(block + kBlock * kNR * 2);
    memset(block, 0, kBlockBytes);
    for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j) {
      int16_t row[kBlock] = {};
      float elements[kBlock];
      const int64_t at = (panel * kNR + j) * w.K + k0;
      for (int64_t k = 0; k < K; k += Vec::kLanes)
        load_as(w.dtype, w.data, at + k, K - k).store(elements + k);
      scales[j] = quantise(elements, K, row);
      for (int64_t k = 0; k < K; ++k) integers[(k / 2 * kNR + j) * 2 + k % 2] = row[k];
    }
  }
}

inline Precision first_alike(Precision) { return Precision::bf16; }
inline PanelForm panel_form(Precision) { return {"integers", kNR, kBlock, 1}; }
constexpr bool kUnpacks = false;  // the weights were rounded to integers
inline void unpack_panel(const Weights&, int64_t, void*) {}

// c (R, kNR) = or += a (R, 2 * pairs) times b (2 * pairs, kNR), both with their scales.
struct Tile {
  const int32_t* a;  // pairs of integers
  int64_t a_stride;
  const float* a_scale;  // of each row
  int64_t a_scale_stride;
  const void* b;         // [pairs][kNR][2 integers]
  const float* b_scale;  // of each column
  int64_t pairs;
  float* c;
  bool add;
  Ahead ahead;
};

// As fma_tiles::multiply_rows. Of b kCount vectors of columns count. Pair i of row r is
// a[r * a_stride + i], or, kAcross, a[i * a_stride + r].
template <int R, int kCount = kVectors, bool kAcross = false>
[[gnu::noinline]] void multiply_rows(const Tile& tile) {
  constexpr int kHere = kCount < kHeld ? kCount : kHeld;
  const int64_t pairs = tile.pairs, across = tile.a_stride;
  Ahead ahead = tile.ahead;
  Ints acc[R][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) acc[r][v] = zero();
  TileReader<R> rows(tile.a, tile.a_stride * 4);
  const int32_t* a = tile.a;
  const char* b = static_cast<const char*>(tile.b);
  for (int64_t k0 = 0; k0 < pairs; k0 += kLine) {
    ahead.fetch();
    for (int64_t left = min(kLine, pairs - k0); left > 0; --left) {
      Ints held[kHere];
#pragma GCC unroll 4
      for (int v = 0; v < kHere; ++v) held[v] = load_ints(b + v * sizeof(Ints));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Ints x = broadcast(kAcross ? reinterpret_cast<const char*>(a + r) : rows.row(r));
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v)
          acc[r][v] = v < kHere ? add_pairs(acc[r][v], x, held[v])
                                : add_pairs(acc[r][v], x, b + v * sizeof(Ints));
      }
      if constexpr (kAcross)
        a += across;
      else
        rows.advance(4);
      b += kVectors * sizeof(Ints);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec by = Vec::set(tile.a_scale[r * tile.a_scale_stride]);
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) {
      float* const out = tile.c + r * kNR + v * Vec::kLanes;
      const Vec sum = to_floats(acc[r][v]) * Vec::load(tile.b_scale + v * Vec::kLanes);
      (tile.add ? fma(sum, by, Vec::load(out)) : sum * by).store(out);
    }
  }
}

struct Tiles : Finished {
  static constexpr int64_t kColumns = kNR, kPartRows = kMaxRows;
  static constexpr int64_t kUnit = kBlock;

  static const char* slab(const Weights& w, int64_t first, int64_t, Range steps, float*,
                          int64_t* stride) {
    *stride = panel_bytes(w.pitch);
    return static_cast<const char*>(w.data) + (w.first_row / kNR + first) * *stride +
           (w.first_step + steps.begin) / kBlock * kBlockBytes;
  }

  // As fma_tiles'.
  template <class Done>
  static void multiply(const Left& A, Range rows, Range steps, const char* panel, const char* after,
                       float* c, const Done& done) {
    const int64_t M = rows.end - rows.begin, tiles = ceil_div(M, kTileRows), stride = A.stride / 4;
    for (int64_t k0 = steps.begin; k0 < steps.end; k0 += kBlock, panel += kBlockBytes) {
      const int64_t pairs = ceil_div(min(kBlock, steps.end - k0), 2);
      const char* const next = k0 + kBlock < steps.end ? panel + kBlockBytes : after;
      const auto* const scales = reinterpret_cast<const float*>(panel + kBlock * kNR * 2);
      for (int64_t t = 0; t < tiles; ++t) {
        const Range tile = even_part(M, t, tiles);
        const int64_t m = rows.begin + tile.begin, R = tile.end - tile.begin;
        const Tile work{.a = A.pairs(m, k0),
                        .a_stride = stride,
                        .a_scale = A.scales(m) + k0 / kBlock,
                        .a_scale_stride = stride,
                        .b = panel,
                        .b_scale = scales,
                        .pairs = pairs,
                        .c = c + tile.begin * kNR,
                        .add = k0 > 0,
                        .ahead = Ahead::share(next, kBlockBytes, t, tiles, kPairs / kLine)};
        with_rows<kTileRows>(R, [&]<int kRows>() { multiply_rows<kRows>(work); });
        if (k0 + kBlock >= steps.end) done({m, m + R});
      }
    }
  }
};

template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  walk<Tiles>(A, rows, w, panels, scratch, epilogue);
}

}  // namespace int16_tiles
}  // namespace
