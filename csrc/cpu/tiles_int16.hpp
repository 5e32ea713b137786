// Tiles of 16-bit integer multiply-adds, faster than fp32 ones by 2 (AVX-512 VNNI) or 1.5 (AVX2):
// for the engine's bf16 precision and for operators whose weights are bf16. Included by gemm.hpp;
// the loops are in walk.hpp.
//
// kBlock steps of a row, of A or of W, are a block of integers.hpp: the sum over two blocks is
// exact in 32 bits. Sums on the way may wrap around, the last one is right. It is multiplied by
// both scales and added in fp32.
//
// An element in bf16 has an error of 2^-9.5 of itself (rms). Here it has one of 0.29 units, and a
// unit of an ordinary block of 256 is 2^-11.5 of the elements' rms: a sixteenth of bf16's error. An
// element may be 32767 units, so that the largest of a block can be 11 times its rms before the
// unit grows; beyond, the large element's own error dominates in either format, unless the weight
// it is multiplied by is tiny.
//
// A (M, K)  [row]: [K integers][a scale for each block][K floats: the row before it is settled]
//           or of its transpose [pair of steps]: [M][2 integers], then [block]: [M scales]
// W (N, K)  [32 columns][block]: [pairs of steps][32 columns][2 integers], then [32 scales]
//
// A block that holds NaN or infinity has the scale NaN: every sum it enters is NaN.
#pragma once
#include "integers.hpp"
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

// A unit is a pair of steps.
struct Kind {
  using Sum = Ints;
  using Factor = Ints;
  static constexpr int kPanelVectors = 128 / sizeof(Ints), kHeld = int16_tiles::kHeld;
  static Ints load(const char* p) { return load_ints(p); }
  static Ints broadcast(const char* pair) { return int16_tiles::broadcast(pair); }
  static Ints add(Ints sum, Ints x, auto y) { return add_pairs(sum, x, y); }
};

constexpr int64_t kNR = 32;
constexpr int64_t kBlock = 256;
constexpr int64_t kPairs = kBlock / 2;
constexpr int64_t kBlockBytes = kBlock * kNR * 2 + kNR * 4;
constexpr int kVectors = kNR / Vec::kLanes;

using fma_tiles::group_rows;
using fma_tiles::hidden_columns;
using fma_tiles::part_epilogue;
using fma_tiles::part_floats;
using fma_tiles::row_dtype;
// All in L2, before and after they are settled: 1 % faster than 3 MiB.
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  return fma_tiles::rows_that_fill(int64_t{1} << 20, round_up(max(F, 1), kLine) * 6, kTileRows,
                                   threads);
}

inline int64_t gemm_scratch(int64_t M, int64_t, Precision) { return kGroup * kNR * (kSlab + M); }

// ---- A -----------------------------------------------------------------------------

struct Left {
  char* data;
  int64_t K;
  int64_t bytes;   // of integers before the scales: of a row, or of all pairs
  int64_t stride;  // bytes, from row to row or from pair to pair
  bool is_transposed = false;

  static Left at(float* memory, int64_t K, Precision) {
    const int64_t bytes = round_up(K, 32) * 2;
    const int64_t stride = row_stride((bytes + scale_bytes(K)) / 4 + round_up(K, kLine)) * 4;
    return {reinterpret_cast<char*>(memory), K, bytes, stride};
  }
  static int64_t scale_bytes(int64_t K) { return round_up(ceil_div(K, kBlock) * 4, 64); }
  static int64_t floats(int64_t M, int64_t K, Precision p) {
    const int64_t steps = ceil_div(K, 2) + ceil_div(K, kBlock);
    return max(M * at(nullptr, K, p).stride / 4,
               steps * row_stride(M));  // whichever way it is filled
  }
  // Rows become integers before a GEMM reads them.
  static bool reads_in_place(DType, int64_t) { return false; }
  static Left in_place(const void*, int64_t) { return {}; }
  static bool reads_transposed(DType, int64_t) { return false; }
  static Left transposed(const void*, int64_t) { return {}; }

  const int32_t* pairs(int64_t m, int64_t k) const {
    return reinterpret_cast<const int32_t*>(
        data + (is_transposed ? k / 2 * stride + m * 4 : m * stride + k * 2));
  }
  // Of row m in the block of step k, and how far the next row's is.
  float* scale(int64_t m, int64_t k) const {
    return reinterpret_cast<float*>(
        data + bytes + (is_transposed ? k / kBlock * stride + m * 4 : m * stride + k / kBlock * 4));
  }
  int64_t scale_stride() const { return is_transposed ? 1 : stride / 4; }
  float* waiting(int64_t m) const {
    return reinterpret_cast<float*>(data + m * stride + bytes + scale_bytes(K));
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    int16_t* const out = reinterpret_cast<int16_t*>(data + m * stride);
    for (int64_t k = 0; k < n; k += kBlock)
      *scale(m, k) = quantise(DType::f32, row, k, min(kBlock, n - k), out + k);
  }
  // Columns k .. k + n of row m, until settle(m).
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(waiting(m) + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(waiting(m) + k, from, n * sizeof(float));
  }
  static constexpr bool kSettles = true;
  void settle(int64_t m) const { close(m, waiting(m), K); }

  // The same memory for the transpose of M columns, which take_steps then fills.
  static constexpr bool kFillsTransposed = true, kFillsPairs = false;
  Left for_transpose(int64_t M) const {
    const int64_t wide = row_stride(M) * 4;
    return {data, K, ceil_div(K, 2) * wide, wide, true};
  }
  // Steps [0, K) of the rows [0, M), by a team; no sync.
  void take_steps(const Team& team, const Rows& steps, int64_t M, int64_t K) const {
    const int64_t strips = ceil_div(M, kStrip), blocks = ceil_div(K, kBlock);
    const Range mine = team.share(strips * blocks);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t m0 = i % strips * kStrip, k = i / strips * kBlock;
      quantise_steps<kWidest>(
          steps.from(k, m0), min(kBlock, K - k), {0, min(kStrip, M - m0)},
          [&](int64_t m) { return const_cast<int32_t*>(pairs(m0 + m, k)); }, stride / 4,
          [&](int64_t m) { return scale(m0 + m, k); });
    }
  }
  static constexpr int64_t kStrip = kWidest * Vec::kLanes;
};

// ---- W -----------------------------------------------------------------------------

constexpr bool kPacksSteps = false;  // a block is converted as a whole
constexpr DType kFactorDtype = DType::bf16;
inline int64_t panel_bytes(int64_t K) { return ceil_div(K, kBlock) * kBlockBytes; }
inline int64_t packed_bytes(int64_t N, int64_t K, Precision) {
  return ceil_div(N, kNR) * panel_bytes(K);
}
inline float* block_scales(char* block) {
  return reinterpret_cast<float*>(block + kBlock * kNR * 2);
}

// Rows (n, K), of which the first kNR count, as a block of a panel; what is missing is zero.
inline void pack_rows(const Rows& rows, int64_t n, int64_t K, char* block) {
  constexpr int64_t L = Vec::kLanes;
  alignas(64) int16_t part[L][kBlock];
  for (int64_t j = 0; j < kNR; j += L) {
    for (int64_t i = 0; i < L; ++i) {
      const bool there = j + i < n;
      memset(part[i] + K / L * L, 0, (kBlock - K / L * L) * sizeof(int16_t));
      if (!there) memset(part[i], 0, sizeof(part[i]));
      block_scales(block)[j + i] =
          there ? quantise(rows.dtype, rows.data, (j + i) * rows.stride, K, part[i]) : 0;
    }
    for (int64_t pair = 0; pair < kPairs; pair += L) {  // L columns x L pairs, the other way round
      Vec both[L];
      for (int64_t i = 0; i < L; ++i)
        both[i] = Vec::load(reinterpret_cast<const float*>(part[i]) + pair);
      transpose(both);
      for (int64_t i = 0; i < L; ++i)
        both[i].store(reinterpret_cast<float*>(block) + (pair + i) * kNR + j);
    }
  }
}

// Steps (n, columns), of which the first kNR columns count, as a block of a panel.
inline void pack_steps(const Rows& steps, int64_t n, int64_t columns, char* block) {
  if (n < kBlock || columns < kNR) memset(block, 0, kBlockBytes);
  quantise_steps<kVectors>(
      steps, n, {0, min(kNR, columns)},
      [&](int64_t e) { return reinterpret_cast<int32_t*>(block) + e; }, kNR,
      [&](int64_t e) { return block_scales(block) + e; });
}

// The slab of a panel of unpacked weights.
inline void convert_panel(const Weights& w, int64_t panel, Range slab, char* block) {
  const Rows data{w.dtype, w.data, w.pitch};
  const int64_t row = w.first_row + panel * kNR, n = w.N - panel * kNR;
  for (int64_t k = slab.begin; k < slab.end; k += kBlock, block += kBlockBytes) {
    const int64_t step = w.first_step + k, K = min(kBlock, slab.end - k);
    if (w.by_steps)
      pack_steps(data.from(step, row), K, n, block);
    else
      pack_rows(data.from(row, step), n, K, block);
  }
}

// Panel `panel` of an unpacked weight to its place among the packed ones.
inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  convert_panel(w, panel, {0, w.K}, static_cast<char*>(panels) + panel * panel_bytes(w.K));
}

inline Precision first_alike(Precision) { return Precision::bf16; }
inline PanelForm panel_form(Precision) { return {"integers", kNR, kBlock, 1}; }
constexpr bool kUnpacks = false;  // the weights were rounded to integers
inline void unpack_panel(const Weights&, int64_t, void*) {}

// ---- Tiles -------------------------------------------------------------------------

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
template <int R, int kCount, bool kAcross>
[[gnu::noinline]] void multiply_rows(const Tile& tile) {
  Ahead ahead = tile.ahead;
  Ints acc[R][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) acc[r][v] = zero();
  ReaderOfA<R, kAcross> a(tile.a, tile.a_stride * 4);
  PanelReader b{static_cast<const char*>(tile.b), nullptr};
  for (int64_t i = 0; i < tile.pairs; i += kLine) {
    ahead.fetch();
    add_units<Kind, kCount>(acc, a, b, min(kLine, tile.pairs - i));
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
  static constexpr int64_t kUnit = kBlock, kTogether = 1;

  static const char* slab(const Weights& w, int64_t first, int64_t count, Range steps,
                          float* converted, int64_t* stride) {
    *stride = panel_bytes(w.packed ? w.pitch : kSlab);
    if (w.packed)
      return static_cast<const char*>(w.data) + (w.first_row / kNR + first) * *stride +
             (w.first_step + steps.begin) / kBlock * kBlockBytes;
    char* const out = reinterpret_cast<char*>(converted);
    for (int64_t p = 0; p < count; ++p) convert_panel(w, first + p, steps, out + p * *stride);
    return out;
  }

  // As fma_tiles'.
  template <class Done>
  static void multiply(const Left& A, Range rows, Range steps, const Panels& panels,
                       const Done& done) {
    const int64_t M = rows.end - rows.begin, tiles = ceil_div(M, kTileRows);
    const EvenParts heights(M, tiles);
    int64_t here = 0;
    for (int64_t k0 = steps.begin; k0 < steps.end; k0 += kBlock, here += kBlockBytes) {
      const int64_t there = k0 + kBlock < steps.end ? here + kBlockBytes : -1;
      const NextBlocks next(panels, there, kBlockBytes, tiles, kPairs / kLine);
      const char* const block = panels.data + here;
      for (int64_t t = 0; t < tiles; ++t) {
        const Range some = heights[t];
        const int64_t m = rows.begin + some.begin;
        const Tile tile{.a = A.pairs(m, k0),
                        .a_stride = A.stride / 4,
                        .a_scale = A.scale(m, k0),
                        .a_scale_stride = A.scale_stride(),
                        .b = block,
                        .b_scale = reinterpret_cast<const float*>(block + kBlock * kNR * 2),
                        .pairs = ceil_div(min(kBlock, steps.end - k0), 2),
                        .c = panels.c + some.begin * kNR,
                        .add = k0 > 0,
                        .ahead = next.of_tile(t)};
        with_rows<kTileRows>(some.end - some.begin, [&]<int R>() {
          A.is_transposed ? multiply_rows<R, kVectors, true>(tile)
                          : multiply_rows<R, kVectors, false>(tile);
        });
        if (k0 + kBlock >= steps.end) done({m, rows.begin + some.end});
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
