// Tiles of fp32 multiply-adds, for every CPU. Included by gemm.hpp; the loops are in walk.hpp.
#pragma once
#include "transpose.hpp"
#include "walk.hpp"

namespace {
namespace fma_tiles {

constexpr int64_t kNR = 2 * Vec::kLanes;
// Of A's part: 224 * 768 * 4 B = 672 KiB of a 1 MiB L2. With AVX2 96 rows, 288 KiB, take 1.02 times
// as long, and 64 rows with AVX-512 1.05: each uses a block of W less often. Not derived from the
// machine's L2: 577 rows in one part, 1.7 MiB, are as fast, so that L3 is fast enough for A.
constexpr int64_t kMaxRows = 224;
constexpr int64_t kTileRows = kMR;

// Rows of the engine's groups of images: 14 tiles use a weight panel before the next is fetched.
inline int64_t group_rows(Precision) { return 192; }
// The engine's rows between GEMMs, other than what Left holds: q, k and v.
inline DType row_dtype(Precision) { return DType::f32; }

// The MLP's chunk of rows: their hidden ones, of so many bytes each, fill `room` for each thread.
inline int64_t rows_that_fill(int64_t room, int64_t bytes, int64_t tile, int threads) {
  return max(4 * tile, room * threads / bytes / tile * tile);
}
// 3 MiB (252 rows of a ViT-B), of which the GEMM walks one slab in L2 at a time. 1 MiB, all in L2,
// is 4 % slower at batch 1 and equal at batch 8: shorter chunks use each weight panel less.
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  return max(8 * kMR, rows_that_fill(int64_t{3} << 20, row_stride(max(F, 1)) * 4, kMR, threads));
}
inline int64_t hidden_columns(int64_t F) { return F; }  // the slabs of the GEMM cut the sum already
inline int64_t part_floats(int64_t, int64_t) { return 0; }
template <class Last>
const Last& part_epilogue(const Last& last, Precision, float*, int64_t, bool, bool) {
  return last;
}

// A (M, K): rows of floats by a stride, or its transpose, which is read as fast: the rows of a tile
// are next to each other then, and each step is a stride from the one before.
struct Left {
  float* data;
  int64_t stride;
  bool is_transposed = false;

  static Left at(float* memory, int64_t K, Precision) { return {memory, row_stride(K)}; }
  static int64_t floats(int64_t M, int64_t K, Precision) { return M * row_stride(K); }
  // Whether a GEMM reads rows where they are: fp32, with a stride that row_stride() does not avoid.
  static bool reads_in_place(DType dtype, int64_t stride) {
    return dtype == DType::f32 && stride % kAliasing != 0;
  }
  static Left in_place(const void* rows, int64_t stride) {
    return {const_cast<float*>(static_cast<const float*>(rows)), stride};
  }
  static bool reads_transposed(DType dtype, int64_t stride) {
    return reads_in_place(dtype, stride);
  }
  static Left transposed(const void* steps, int64_t stride) {
    return {const_cast<float*>(static_cast<const float*>(steps)), stride, true};
  }
  const float* at(int64_t m, int64_t k) const {
    return data + (is_transposed ? k * stride + m : m * stride + k);
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t m, float*) const { return data + m * stride; }
  void close(int64_t, const float*, int64_t) const {}
  // Columns k .. k + n of row m; k is a multiple of Vec::kLanes in store.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(data + m * stride + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(data + m * stride + k, from, n * sizeof(float));
  }
  // Where true, rows that were stored or put in parts must be settled before a GEMM reads them.
  static constexpr bool kSettles = false;
  void settle(int64_t) const {}
  static constexpr bool kFillsTransposed = false, kFillsPairs = false;
};

// Per thread, in floats: the converted part of W, and C of a group for M rows.
inline int64_t gemm_scratch(int64_t M, int64_t, Precision) { return kGroup * kNR * (kSlab + M); }

// Whether a step of an unpacked factor can be written to the panels by itself.
constexpr bool kPacksSteps = true;
// What a backward keeps of a factor until its GEMM reads it.
constexpr DType kFactorDtype = DType::f32;
constexpr int64_t kFarAhead = 8 * kLine;

// out[k][j] = w[j][k] for j < kNR, k < K; rows j >= n are zero.
inline void pack_block(const Rows& w, int64_t n, int64_t K, float* out) {
  constexpr int64_t L = Vec::kLanes;
  for (int64_t j = 0; j < kNR; j += L)
    for (int64_t k = 0; k < K; k += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i) {
        const int64_t at = (j + i) * w.stride + k;
        rows[i] = j + i < n ? load_as(w.dtype, w.data, at, K - k) : Vec::set(0);
        // The hardware sees no stream: consecutive loads are a row's stride from each other.
        __builtin_prefetch(offset(w.dtype, w.data, at + kFarAhead), 0, 2);
      }
      transpose(rows);
      for (int64_t i = 0; i < min(L, K - k); ++i) rows[i].store(out + (k + i) * kNR + j);
    }
}

// Steps (n, columns), of which the first kNR columns count, as a panel: [n][kNR].
inline void copy_block(const Rows& steps, int64_t n, int64_t columns, float* out) {
  for (int64_t e = 0; e < kNR; e += Vec::kLanes)
    for (int64_t j = 0; j < n; ++j)
      (e < columns ? load_as(steps.dtype, steps.data, j * steps.stride + e, columns - e)
                   : Vec::set(0))
          .store(out + j * kNR + e);
}

// The slab of a panel of unpacked weights as fp32, [k][kNR].
inline void convert_panel(const Weights& w, int64_t panel, Range slab, float* out) {
  const Rows data{w.dtype, w.data, w.pitch};
  const int64_t row = w.first_row + panel * kNR, step = w.first_step + slab.begin;
  if (w.by_steps)
    copy_block(data.from(step, row), slab.end - slab.begin, w.N - panel * kNR, out);
  else
    pack_block(data.from(row, step), w.N - panel * kNR, slab.end - slab.begin, out);
}

// In fp32 for every precision: converting bf16 panels at each use would be slower.
inline int64_t packed_bytes(int64_t N, int64_t K, Precision) { return round_up(N, kNR) * K * 4; }

// Panel `panel` of an unpacked weight to its place among the packed ones.
inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  convert_panel(w, panel, {0, w.K}, static_cast<float*>(panels) + panel * w.K * kNR);
}

inline Precision first_alike(Precision) { return Precision::fp32; }
inline PanelForm panel_form(Precision) { return {"floats", kNR, 1, 1}; }

// The other way round: panel `panel` of packed weights to its rows of an unpacked one, w.K long.
constexpr bool kUnpacks = true;
inline void unpack_panel(const Weights& w, int64_t panel, void* weight) {
  constexpr int64_t L = Vec::kLanes;
  const float* const from = static_cast<const float*>(w.data) + panel * w.K * kNR;
  for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); j += L)
    for (int64_t k = 0; k < w.K; k += L) {
      Vec rows[L];
      for (int64_t i = 0; i < L; ++i)
        rows[i] = k + i < w.K ? Vec::load(from + (k + i) * kNR + j) : Vec::set(0);
      transpose(rows);
      for (int64_t i = 0; i < min(L, w.N - panel * kNR - j); ++i)
        store_as(w.dtype, weight, (panel * kNR + j + i) * w.K + k, rows[i], min(L, w.K - k));
    }
}

// c (R, kNR) = or += a (R, K) b (K, kNR), of one panel or of two.
struct Tile {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t K;
  Result to;
  Ahead ahead;
  bool a_is_transposed = false;
  int64_t b_pitch = 0, c_pitch = 0;  // floats from panel to panel
};

// A unit is a step.
struct Kind {
  using Sum = Vec;
  using Factor = Vec;
  static constexpr int kPanelVectors = 2, kHeld = 4;
  static Vec load(const char* p) { return Vec::load(reinterpret_cast<const float*>(p)); }
  static Vec broadcast(const char* p) { return Vec::set(*reinterpret_cast<const float*>(p)); }
  static Vec add(Vec sum, Vec x, Vec y) { return fma(x, y, sum); }
};

// Not inlined, so that the loop has all registers whatever its caller keeps in them: in some
// callers GCC held the pointers to A on the stack, 29 instructions for 12 multiply-adds instead
// of 25.
template <int R, int kVectors, bool kTransposed>
[[gnu::noinline]] void multiply_rows(const Tile& tile) {
  Ahead ahead = tile.ahead;
  Vec acc[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec::set(0);
  ReaderOfA<R, kTransposed> a(tile.a, tile.a_stride * 4);
  PanelReader b{reinterpret_cast<const char*>(tile.b),
                reinterpret_cast<const char*>(tile.b + tile.b_pitch)};
  for (int64_t k0 = 0; k0 < tile.K; k0 += kLine) {
    ahead.fetch();
    add_units<Kind, kVectors>(acc, a, b, min(kLine, tile.K - k0));
  }
  const auto out = [to = tile.to, pitch = tile.c_pitch](int r, int v) {
    return to.c + r * to.stride + v / 2 * pitch + v % 2 * Vec::kLanes;
  };
  if (tile.to.add) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) (Vec::load(out(r, v)) + acc[r][v]).store(out(r, v));
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v].store(out(r, v));
  }
}

template <int kMost, int kVectors>
inline void multiply_tile(int64_t rows, const Tile& tile) {
  with_rows<kMost>(rows, [&]<int R>() {
    tile.a_is_transposed ? multiply_rows<R, kVectors, true>(tile)
                         : multiply_rows<R, kVectors, false>(tile);
  });
}
inline void multiply(int64_t rows, const Tile& tile) { multiply_tile<kMR, 2>(rows, tile); }

struct Tiles : Finished {
  static constexpr int64_t kColumns = kNR, kPartRows = kMaxRows;
  static constexpr int64_t kUnit = 1;  // steps that slabs are cut at
  static constexpr int64_t kTogether = kPanels;

  // W's part of a slab as fp32, [panel][k][kNR]: where it lies packed, or converted.
  static const char* slab(const Weights& w, int64_t first, int64_t count, Range steps,
                          float* converted, int64_t* stride) {
    *stride = (w.packed ? w.pitch : kSlab) * kNR * 4;
    if (w.packed)
      return static_cast<const char*>(
          offset(DType::f32, w.data,
                 (w.first_row + first * kNR) * w.pitch + (w.first_step + steps.begin) * kNR));
    for (int64_t p = 0; p < count; ++p)
      convert_panel(w, first + p, steps, converted + p * kSlab * kNR);
    return reinterpret_cast<const char*>(converted);
  }

  // c (M, kNR) of each panel = or += rows of A times its slab. done(rows) follows what completes
  // them.
  template <class Done>
  static void multiply(const Left& A, Range rows, Range steps, const Panels& panels,
                       const Done& done) {
    const int64_t M = rows.end - rows.begin, tiles = panels.tiles(M, kMR);
    const int64_t all = steps.end - steps.begin, blocks = ceil_div(all, kLongestBlock);
    const EvenParts heights(M, tiles);
    for (int64_t i = 0; i < blocks; ++i) {
      const Range part = even_part(all, i, blocks);
      const int64_t k0 = steps.begin + part.begin, there = i + 1 < blocks ? part.end * kNR * 4 : -1;
      const NextBlocks next(panels, there, kKC * kNR * 4, tiles, kKC / kLine);
      for (int64_t t = 0; t < tiles; ++t) {
        const Range some = heights[t];
        const Tile tile{.a = A.at(rows.begin + some.begin, k0),
                        .a_stride = A.stride,
                        .b = reinterpret_cast<const float*>(panels.data) + part.begin * kNR,
                        .K = part.end - part.begin,
                        .to = {panels.c + some.begin * kNR, kNR, k0 > 0},
                        .ahead = next.of_tile(t),
                        .a_is_transposed = A.is_transposed,
                        .b_pitch = panels.pitch / 4,
                        .c_pitch = panels.c_pitch};
        const int64_t R = some.end - some.begin;
        panels.count > 1 ? multiply_tile<kPairRows, 2 * kPanels>(R, tile)
                         : fma_tiles::multiply(R, tile);
        if (i + 1 == blocks) done({rows.begin + some.begin, rows.begin + some.end});
      }
    }
  }
};

template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  walk<Tiles>(A, rows, w, panels, scratch, epilogue);
}

// ---- Matmuls inside attention ----------------------------------------------------

// Rows of a tile of so many vectors: with AVX2 as many accumulators as a full tile has (6 would
// wait for each other), with 32 registers kMR are enough.
constexpr int head_rows(int vectors) { return vectors == 1 && Vec::kLanes < 16 ? 2 * kMR : kMR; }

// c (R, kNR) = or += a (R, K) b (K, kNR), of which the first kVectors vectors of columns count.
// Element (r, k) of a is a[r * stride + k], or, kAcross, a[k * stride + r].
template <int R, int kVectors, bool kAcross>
[[gnu::noinline]] void multiply_head(const float* a, int64_t stride, const float* b, int64_t K,
                                     float* c, bool add) {
  Vec acc[R][2];  // not [kVectors]: GCC 12 breaks down on emulated vectors in an array of one
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec::set(0);
  ReaderOfA<R, kAcross> from(a, stride * 4);
  PanelReader panel{reinterpret_cast<const char*>(b), nullptr};
  add_units<Kind, kVectors>(acc, from, panel, K);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* const to = c + r * kNR + v * Vec::kLanes;
      (add ? Vec::load(to) + acc[r][v] : acc[r][v]).store(to);
    }
}

}  // namespace fma_tiles
}  // namespace
