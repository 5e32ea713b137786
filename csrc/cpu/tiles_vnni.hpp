// Tiles of integer multiply-adds (AVX-512 VNNI) for the engine's bf16 precision: twice the rate of
// fp32 ones. Included by gemm.hpp; the loops are in walk.hpp.
//
// 128 steps of a row, of A or of W, are a block: integers of 13 bits, -4095 .. 4095, times one
// scale, the block's largest magnitude / 4095. A block's sum is exact in 32 bits, 128 * 4095^2 <
// 2^31; it is then multiplied by both scales and added in fp32.
//
// An element in bf16 has an error of 2^-9.5 of itself (rms). Here it has one of 2^-13.8 of its
// block's largest element, which is 2^-12 of the rms of an ordinary block. That is less than bf16's
// while the largest element is below 20 times the others; beyond, its own error dominates in either
// format, unless the weight it is multiplied by is tiny. More bits for A and fewer for W (14 and
// 12) gave twice the error on a trained DeiT.
//
// A (M, K)  [row]: [K integers][a scale for each block][K floats: the row before it is settled]
// W (N, K)  [32 columns][block]: [64 pairs of steps][32 columns][2 integers], then [32 scales]
//
// A block that holds NaN or infinity has the scale NaN: every sum it enters is NaN.
#pragma once
#include "tiles_fma.hpp"

namespace {
namespace vnni_tiles {

constexpr int64_t kTileRows = kMR;
constexpr int64_t kNR = fma_tiles::kNR;
constexpr int64_t kMaxRows = fma_tiles::kMaxRows;
constexpr int32_t kMost = 4095;  // of the integers' magnitudes
constexpr int64_t kPairs = kKC / 2;
constexpr int64_t kBlockBytes = kKC * kNR * 2 + kNR * 4;
static_assert(Vec::kLanes == 16 && kKC * kMost * kMost <= INT32_MAX);

using fma_tiles::gemm_scratch;
using fma_tiles::group_rows;
using fma_tiles::hidden_columns;
using fma_tiles::hidden_rows;
using fma_tiles::row_dtype;

// x (n), n <= kKC -> integers up to +-kMost; returns their scale. Rows end with zeros up to a
// multiple of 16. Below 1e-30, where the inverse of the scale could overflow, all is zero.
inline float quantise(const float* x, int64_t n, int16_t* out) {
  __m512i top = _mm512_setzero_si512();  // of the magnitudes' bits: NaN is above infinity
  for (int64_t i = 0; i < n; i += 16)
    top = _mm512_max_epu32(top, _mm512_castps_si512(magnitude(Vec::load(x + i, n - i)).v));
  const uint32_t bits = _mm512_reduce_max_epu32(top);
  float largest;
  memcpy(&largest, &bits, sizeof(largest));
  const bool finite = bits < 0x7f800000;
  const float inverse = finite && largest > 1e-30f ? kMost / largest : 0;
  for (int64_t i = 0; i < n; i += 16) {
    const Vec v = finite ? Vec::load(x + i, n - i) * Vec::set(inverse) : Vec::set(0);
    const __m256i q = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), q);
  }
  return finite ? (inverse ? largest / kMost : 0) : NAN;
}

struct Left {
  char* data;
  int64_t K;

  int64_t integers() const { return round_up(K, 32); }  // of a row: whole lines
  int64_t stride() const {                              // bytes from row to row
    const int64_t bytes = integers() * 2 + round_up(ceil_div(K, kKC) * 4, 64) + round_up(K, 16) * 4;
    return row_stride(bytes / 4) * 4;
  }
  static Left at(float* memory, int64_t K, Precision) {
    return {reinterpret_cast<char*>(memory), K};
  }
  static int64_t floats(int64_t M, int64_t K, Precision) {
    return M * Left{nullptr, K}.stride() / 4;
  }
  const int32_t* pairs(int64_t m, int64_t k) const {
    return reinterpret_cast<const int32_t*>(data + m * stride() + k * 2);
  }
  float* scales(int64_t m) const {
    return reinterpret_cast<float*>(data + m * stride() + integers() * 2);
  }
  float* waiting(int64_t m) const { return scales(m) + round_up(ceil_div(K, kKC), kLine); }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    int16_t* const out = reinterpret_cast<int16_t*>(data + m * stride());
    for (int64_t k = 0; k < n; k += kKC)
      scales(m)[k / kKC] = quantise(row + k, min(kKC, n - k), out + k);
  }
  // Columns k .. k + n of row m, until settle(m).
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(waiting(m) + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(waiting(m) + k, from, n * sizeof(float));
  }
  static constexpr bool kSettles = true;
  void settle(int64_t m) const { close(m, waiting(m), K); }
};

inline int64_t panel_bytes(int64_t K) { return ceil_div(K, kKC) * kBlockBytes; }
inline int64_t panel_floats(int64_t, Precision) { return 0; }  // pack_panel needs no scratch
inline int64_t packed_bytes(int64_t N, int64_t K, Precision) {
  return ceil_div(N, kNR) * panel_bytes(K);
}

// Panel `panel` of an unpacked weight to its place among the packed ones.
inline void pack_panel(const Weights& w, int64_t panel, float*, void* panels) {
  char* block = static_cast<char*>(panels) + panel * panel_bytes(w.K);
  for (int64_t k0 = 0; k0 < w.K; k0 += kKC, block += kBlockBytes) {
    const int64_t K = min(kKC, w.K - k0);
    int16_t* const integers = reinterpret_cast<int16_t*>(block);
    float* const scales = reinterpret_cast<float*>(block + kKC * kNR * 2);
    memset(block, 0, kBlockBytes);
    for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j) {
      int16_t row[kKC] = {};
      float elements[kKC];
      const int64_t at = (panel * kNR + j) * w.K + k0;
      for (int64_t k = 0; k < K; k += Vec::kLanes)
        load_as(w.dtype, w.data, at + k, K - k).store(elements + k);
      scales[j] = quantise(elements, K, row);
      for (int64_t k = 0; k < K; ++k) integers[(k / 2 * kNR + j) * 2 + k % 2] = row[k];
    }
  }
}

// sum += x y over both integers of each pair. As assembly: with its intrinsic GCC 12 copies each
// accumulator to another register and back through the stack, and runs at 40 % of the speed.
inline __m512i add_pairs(__m512i sum, __m512i x, __m512i y) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  return sum;
}

// c (R, kNR) = or += a (R, 2 * pairs) times a block of W, with both scales.
struct Tile {
  const int32_t* a;      // pairs of integers
  const float* a_scale;  // of each row
  int64_t a_stride;      // of both, in units of four bytes
  const char* block;
  int64_t pairs;
  float* c;
  bool add;
  Ahead ahead;
};

// As fma_tiles::multiply_rows.
template <int R>
[[gnu::noinline]] void multiply_rows(const Tile& tile) {
  const int64_t pairs = tile.pairs;
  Ahead ahead = tile.ahead;
  __m512i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  TileReader<R> rows(tile.a, tile.a_stride * 4);
  const char* b = tile.block;
  for (int64_t k0 = 0; k0 < pairs; k0 += kLine) {
    ahead.fetch();
    for (int64_t left = min(kLine, pairs - k0); left > 0; --left) {
      const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512i x = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(rows.row(r)));
        acc[r][0] = add_pairs(acc[r][0], x, b0);
        acc[r][1] = add_pairs(acc[r][1], x, b1);
      }
      rows.advance(4);
      b += 128;
    }
  }
  const float* const scales = reinterpret_cast<const float*>(tile.block + kKC * kNR * 2);
  const Vec scale[2] = {Vec::load(scales), Vec::load(scales + Vec::kLanes)};
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < 2; ++h) {
      float* const out = tile.c + r * kNR + h * Vec::kLanes;
      const Vec sum = Vec{_mm512_cvtepi32_ps(acc[r][h])} * scale[h];
      const Vec by = Vec::set(tile.a_scale[r * tile.a_stride]);
      (tile.add ? fma(sum, by, Vec::load(out)) : sum * by).store(out);
    }
}

struct Tiles {
  static constexpr int64_t kColumns = kNR, kPartRows = kMaxRows;

  static const char* slab(const Weights& w, int64_t first, int64_t, Range steps, float*,
                          int64_t* stride) {
    *stride = panel_bytes(w.pitch);
    return static_cast<const char*>(w.data) + (w.first_row / kNR + first) * *stride +
           (w.first_step + steps.begin) / kKC * kBlockBytes;
  }

  // c (M, kNR) = or += rows of A times a slab of a panel; `after` is what is read next.
  static void multiply(const Left& A, Range rows, Range steps, const char* panel, const char* after,
                       float* c) {
    const int64_t M = rows.end - rows.begin, tiles = ceil_div(M, kMR), stride = A.stride() / 4;
    for (int64_t k0 = steps.begin; k0 < steps.end; k0 += kKC, panel += kBlockBytes) {
      const int64_t pairs = ceil_div(min(kKC, steps.end - k0), 2);
      const char* const next = k0 + kKC < steps.end ? panel + kBlockBytes : after;
      for (int64_t t = 0; t < tiles; ++t) {
        const Range tile = even_part(M, t, tiles);
        const int64_t m = rows.begin + tile.begin, R = tile.end - tile.begin;
        const Tile work{.a = A.pairs(m, k0),
                        .a_scale = A.scales(m) + k0 / kKC,
                        .a_stride = stride,
                        .block = panel,
                        .pairs = pairs,
                        .c = c + tile.begin * kNR,
                        .add = k0 > 0,
                        .ahead = Ahead::share(next, kBlockBytes, t, tiles, kPairs / kLine)};
        with_rows(R, [&]<int kRows>() { multiply_rows<kRows>(work); });
      }
    }
  }
};

template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  walk<Tiles>(A, rows, w, panels, scratch, epilogue);
}

}  // namespace vnni_tiles
}  // namespace
