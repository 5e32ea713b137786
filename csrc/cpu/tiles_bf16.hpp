// Tiles of bf16 multiply-adds (AVX512_BF16), two for each of fp32's: for operators whose weights
// are bf16, and for the engine's bf16 where it is asked for by name: integers (tiles_int16.hpp) are
// as fast there and more exact. Included by gemm.hpp; the loops are in walk.hpp.
//
// Both factors are rounded to bf16, as PyTorch's are; sums are fp32.
//
// A (M, K)  [row]: [K elements], read where they are if they are bf16 already
// W (N, K)  [32 columns]: [pairs of steps][32 columns][2 elements]
//
// vdpbf16ps takes denormals for zeros. What is missing in the last pair of steps is zero in W, and
// its place in A is not read.
#pragma once
#include "tiles_fma.hpp"

namespace {
namespace bf16_tiles {

constexpr int64_t kTileRows = 14;  // times 2 vectors: 28 accumulators + 2 of W + 1 broadcast
constexpr int64_t kMaxRows = fma_tiles::kMaxRows;
constexpr int64_t kNR = 32;
constexpr int64_t kPairBytes = kNR * 4;
constexpr int64_t kBlock = 256;  // steps: 16 KiB of W in L1

using fma_tiles::gemm_scratch;
using fma_tiles::group_rows;
using fma_tiles::hidden_columns;
using fma_tiles::part_epilogue;
using fma_tiles::part_floats;
using fma_tiles::row_dtype;
// All in L2, as integers are.
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  return fma_tiles::rows_that_fill(int64_t{1} << 20, row_stride(max(F, 1)) * 2, kTileRows, threads);
}

// ---- Elements ----------------------------------------------------------------------

inline __m256i rounded(Vec v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v.v)); }

// Elements i .. i + 32 of an array, of which n count; the others are zero.
inline __m512i load_elements(DType type, const void* p, int64_t i, int64_t n) {
  if (type == DType::bf16) {
    const __mmask32 there = n >= 32 ? 0xffffffff : (1u << n) - 1;
    return _mm512_maskz_loadu_epi16(there, static_cast<const bf16*>(p) + i);
  }
  const Vec low = load_as(type, p, i, n);
  const Vec high = n > 16 ? load_as(type, p, i + 16, n - 16) : Vec::set(0);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

// Sixteen columns of two steps as pairs.
inline __m512i paired(Vec even, Vec odd) {
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both);
}

// ---- A -----------------------------------------------------------------------------

// A (M, K): rows of elements by a stride, or of its transpose pairs of rows, [pair of steps][M][2].
struct Left {
  char* data;
  int64_t stride;  // bytes
  bool is_transposed = false;

  static Left at(float* memory, int64_t K, Precision) {
    return {reinterpret_cast<char*>(memory), row_stride(ceil_div(K, 2)) * 4};
  }
  static int64_t floats(int64_t M, int64_t K, Precision) {
    const int64_t pairs = ceil_div(K, 2);
    return max(M * row_stride(pairs), pairs * row_stride(M));  // whichever way it is filled
  }
  // Whether a GEMM reads rows where they are: with a stride that row_stride() does not avoid.
  static bool reads_in_place(DType dtype, int64_t stride) {
    return dtype == DType::bf16 && stride % (2 * kAliasing) != 0;
  }
  static Left in_place(const void* rows, int64_t stride) {
    return {const_cast<char*>(static_cast<const char*>(rows)), stride * 2};
  }
  static bool reads_transposed(DType, int64_t) { return false; }
  static Left transposed(const void*, int64_t) { return {}; }

  char* at(int64_t m, int64_t k) const {
    return data + (is_transposed ? k / 2 * stride + m * 4 : m * stride + k * 2);
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    for (int64_t k = 0; k < n; k += 32)
      _mm512_storeu_si512(at(m, k), load_elements(DType::f32, row, k, n - k));
  }
  // Columns k .. k + n of row m; k is a multiple of Vec::kLanes in store.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const {
    _mm256_mask_storeu_epi16(at(m, k), Vec::first(n), rounded(v));
  }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    for (int64_t i = 0; i < n; i += Vec::kLanes)
      _mm256_mask_storeu_epi16(at(m, k + i), Vec::first(n - i),
                               rounded(Vec::load(from + i, n - i)));
  }
  static constexpr bool kSettles = false;
  void settle(int64_t) const {}

  // The same memory for the transpose of M columns, which take_steps or store_steps then fills.
  static constexpr bool kFillsTransposed = true, kFillsPairs = true;
  Left for_transpose(int64_t M) const { return {data, row_stride(M) * 4, true}; }
  // Steps k and k + 1 of the rows m .. m + 16; both are multiples of their number.
  void store_steps(int64_t m, int64_t k, Vec even, Vec odd) const {
    _mm512_storeu_si512(at(m, k), paired(even, odd));
  }
  // Steps [0, K) of the rows [0, M), by a team; no sync.
  void take_steps(const Team& team, const Rows& steps, int64_t M, int64_t K) const {
    const Range mine = team.share(K, 2);
    for (int64_t k = mine.begin; k < mine.end; k += 2)
      for (int64_t m = 0; m < M; m += Vec::kLanes) {
        const Rows from = steps.from(k, m);
        const Vec odd =
            k + 1 < K ? load_as(from.dtype, from.data, from.stride, M - m) : Vec::set(0);
        store_steps(m, k, load_as(from.dtype, from.data, 0, M - m), odd);
      }
  }
};

// ---- W -----------------------------------------------------------------------------

constexpr bool kPacksSteps = false;  // pairs of steps are next to each other
constexpr DType kFactorDtype = DType::bf16;
inline int64_t panel_bytes(int64_t K) { return ceil_div(K, 2) * kPairBytes; }
inline int64_t packed_bytes(int64_t N, int64_t K, Precision) {
  return ceil_div(N, kNR) * panel_bytes(K);
}

// Rows (n, K), of which the first kNR count, as a panel; the missing ones are zero.
inline void pack_rows(const Rows& rows, int64_t n, int64_t K, char* panel) {
  for (int64_t k = 0; k < K; k += 32)
    for (int64_t half = 0; half < 2; ++half) {
      Vec part[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t j = half * 16 + i, at = j * rows.stride + k;
        part[i] = {_mm512_castsi512_ps(j < n ? load_elements(rows.dtype, rows.data, at, K - k)
                                             : _mm512_setzero_si512())};
        // The hardware sees no stream: consecutive loads are a row's stride from each other.
        __builtin_prefetch(offset(rows.dtype, rows.data, at + fma_tiles::kFarAhead), 0, 2);
      }
      transpose(part);  // 16 columns x 16 pairs of steps -> the other way round
      for (int64_t i = 0; i < min(16, ceil_div(K - k, 2)); ++i)
        _mm512_storeu_ps(panel + (k / 2 + i) * kPairBytes + half * 64, part[i].v);
    }
}

// Steps (n, columns), of which the first kNR columns count, as a panel; the missing ones are zero.
inline void pack_steps(const Rows& steps, int64_t n, int64_t columns, char* panel) {
  for (int64_t j = 0; j < n; j += 2, panel += kPairBytes)
    for (int64_t e = 0; e < kNR; e += 16) {
      const auto load = [&](int64_t row) {
        if (row >= n || e >= columns) return Vec::set(0);
        return load_as(steps.dtype, steps.data, row * steps.stride + e, columns - e);
      };
      _mm512_storeu_si512(panel + e * 4, paired(load(j), load(j + 1)));
    }
}

// The slab of a panel of unpacked weights.
inline void convert_panel(const Weights& w, int64_t panel, Range slab, char* out) {
  const Rows data{w.dtype, w.data, w.pitch};
  const int64_t row = w.first_row + panel * kNR, step = w.first_step + slab.begin;
  const int64_t n = w.N - panel * kNR, K = slab.end - slab.begin;
  if (w.by_steps)
    pack_steps(data.from(step, row), K, n, out);
  else
    pack_rows(data.from(row, step), n, K, out);
}

// Panel `panel` of an unpacked weight to its place among the packed ones.
inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  convert_panel(w, panel, {0, w.K}, static_cast<char*>(panels) + panel * panel_bytes(w.K));
}

inline Precision first_alike(Precision) { return Precision::bf16; }
inline PanelForm panel_form(Precision) { return {"pairs", kNR, 2, 1}; }

// The other way round, exact for a weight that was bf16.
constexpr bool kUnpacks = true;
inline void unpack_panel(const Weights& w, int64_t panel, void* weight) {
  const auto* const from =
      reinterpret_cast<const bf16*>(static_cast<const char*>(w.data) + panel * panel_bytes(w.K));
  for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j)
    for (int64_t k = 0; k < w.K; ++k)
      store_as(w.dtype, weight, (panel * kNR + j) * w.K + k,
               Vec::load(from + (k / 2 * kNR + j) * 2 + k % 2, 1), 1);
}

// ---- Tiles -------------------------------------------------------------------------

// c (R, kNR) = or += a (R, K) b (K, kNR).
struct Tile {
  const char* a;
  int64_t a_stride;  // bytes
  const char* b;
  int64_t K;
  float* c;
  bool add;
  Ahead ahead;
  int64_t pitch = 0, c_pitch = 0;  // bytes, floats from panel to panel
};

using Ints = __m512i;  // pairs of elements
using Sums = __m512;
inline Sums zero() { return _mm512_setzero_ps(); }
inline Ints load_ints(const char* p) { return _mm512_loadu_si512(p); }
inline Ints broadcast(const char* pair) {
  int32_t both;  // rows in place may have an odd stride
  memcpy(&both, pair, sizeof(both));
  return _mm512_set1_epi32(both);
}
inline Vec to_floats(Sums sum) { return {sum}; }
// A unit is a pair of steps.
struct Kind {
  using Sum = Sums;
  using Factor = Ints;
  static constexpr int kPanelVectors = 2, kHeld = 4;
  static Ints load(const char* p) { return load_ints(p); }
  static Ints broadcast(const char* pair) { return bf16_tiles::broadcast(pair); }
  static Sums add(Sums sum, Ints x, Ints y) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
  }
  static Sums add(Sums sum, Ints x, const char* y) { return add(sum, x, load_ints(y)); }
};

// As fma_tiles::multiply_rows, for kVectors of columns.
template <int R, int kVectors, bool kTransposed>
[[gnu::noinline]] void multiply_rows(const Tile& tile) {
  Ahead ahead = tile.ahead;
  Sums acc[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  ReaderOfA<R, kTransposed> a(tile.a, tile.a_stride);
  PanelReader b{tile.b, tile.b + tile.pitch};
  const int64_t pairs = kTransposed ? ceil_div(tile.K, 2) : tile.K / 2;
  for (int64_t i = 0; i < pairs; i += kLine) {
    ahead.fetch();
    add_units<Kind, kVectors>(acc, a, b, min(kLine, pairs - i));
  }
  if (!kTransposed && tile.K % 2) {
    // What lies behind a row's last element may not be a number, nor memory.
    int32_t last[R];
    for (int r = 0; r < R; ++r)
      last[r] = *reinterpret_cast<const uint16_t*>(tile.a + r * tile.a_stride + (tile.K - 1) * 2);
    asm volatile("" ::"r"(last) : "memory");  // TileReader hides what its pointers point to
    TileReader<R> end(last, sizeof(last[0]));
    add_units<Kind, kVectors>(acc, end, b, 1);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const out = tile.c + v / 2 * tile.c_pitch + r * kNR + v % 2 * Vec::kLanes;
      const Vec sum = to_floats(acc[r][v]);
      (tile.add ? Vec::load(out) + sum : sum).store(out);
    }
}

struct Tiles : Finished {
  static constexpr int64_t kColumns = kNR, kPartRows = kMaxRows;
  static constexpr int64_t kUnit = 2, kTogether = kPanels;

  static const char* slab(const Weights& w, int64_t first, int64_t count, Range steps,
                          float* converted, int64_t* stride) {
    *stride = panel_bytes(w.packed ? w.pitch : kSlab);
    if (w.packed)
      return static_cast<const char*>(w.data) + (w.first_row / kNR + first) * *stride +
             panel_bytes(w.first_step + steps.begin);
    char* const out = reinterpret_cast<char*>(converted);
    for (int64_t p = 0; p < count; ++p) convert_panel(w, first + p, steps, out + p * *stride);
    return out;
  }

  // As fma_tiles'.
  template <class Done>
  static void multiply(const Left& A, Range rows, Range steps, const Panels& panels,
                       const Done& done) {
    const int64_t M = rows.end - rows.begin, tiles = panels.tiles(M, kTileRows);
    const int64_t pairs = ceil_div(steps.end - steps.begin, 2),
                  blocks = ceil_div(2 * pairs, kBlock);
    const EvenParts heights(M, tiles);
    for (int64_t i = 0; i < blocks; ++i) {
      const Range part = even_part(pairs, i, blocks);
      const int64_t k0 = steps.begin + 2 * part.begin,
                    k1 = min(steps.end, steps.begin + 2 * part.end);
      const int64_t there = i + 1 < blocks ? part.end * kPairBytes : -1;
      const NextBlocks next(panels, there, panel_bytes(kBlock), tiles, kBlock / 2 / kLine);
      for (int64_t t = 0; t < tiles; ++t) {
        const Range some = heights[t];
        const Tile tile{.a = A.at(rows.begin + some.begin, k0),
                        .a_stride = A.stride,
                        .b = panels.data + part.begin * kPairBytes,
                        .K = k1 - k0,
                        .c = panels.c + some.begin * kNR,
                        .add = k0 > 0,
                        .ahead = next.of_tile(t),
                        .pitch = panels.pitch,
                        .c_pitch = panels.c_pitch};
        const int64_t R = some.end - some.begin;
        panels.count > 1 ? multiply_tile<kPairRows, 2 * kPanels>(R, tile, A.is_transposed)
                         : multiply_tile<kTileRows, 2>(R, tile, A.is_transposed);
        if (i + 1 == blocks) done({rows.begin + some.begin, rows.begin + some.end});
      }
    }
  }

 private:
  template <int kMost, int kVectors>
  static void multiply_tile(int64_t rows, const Tile& tile, bool is_transposed) {
    with_rows<kMost>(rows, [&]<int R>() {
      is_transposed ? multiply_rows<R, kVectors, true>(tile)
                    : multiply_rows<R, kVectors, false>(tile);
    });
  }
};

template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  walk<Tiles>(A, rows, w, panels, scratch, epilogue);
}

}  // namespace bf16_tiles
}  // namespace
