// Tiles of 8-bit integer multiply-adds for the engine's int8 precision. Included by gemm.hpp; the
// loops are in walk.hpp, the multiply-adds in dot_int8.hpp.
//
// A row of A is u8: element = scale * (integer - zero), both chosen by its smallest and largest
// element, so that the hidden rows of a GELU do not spend half of the integers on negative
// elements that they do not have. A row of W is s8 times one scale, made by
// vitkern/quantisation.py. For each element of C
//
//   c = (sum of integers - zero * sum of W's row) * scale of W's row * scale of A's row
//
// where everything in brackets is exact, so that all instruction sets have the same bits.
//
// A (M, K)  [row]: [K u8, padded to 64][scale, zero][K floats: the row before it is settled]
// W (N, K)  [32 columns]: [fours of steps, padded to 64 steps][32 columns][4 s8], then [32 scales],
//           [32 sums of a column]
//
// A weight that comes as floats (patch embedding, head) and the rows that it is multiplied with are
// not rounded to 8 bits: tiles of two terms or int16_tiles where there are any, two hundredths
// of a forward faster than fma_tiles.
//
// A row of A with NaN or infinity has the scale NaN, and so has its row of C. A row of W that is
// not finite comes with the scale NaN.
#pragma once
#include "dot_int8.hpp"

namespace {
namespace int8_tiles {

// For weights that come as floats.
#if defined(VITKERN_AMX)
namespace finer = amx_tiles;
constexpr Precision kFiner =
    amx_tiles::terms_of(Precision::fp32).halves ? Precision::fp32 : Precision::tf32;
#elif defined(VITKERN_INT16)
namespace finer = int16_tiles;
constexpr Precision kFiner = Precision::bf16;
#else
namespace finer = fma_tiles;
constexpr Precision kFiner = Precision::fp32;
#endif

inline Weights as_finer(Weights w) {
  w.precision = kFiner;
  w.next = nullptr;  // integers
  return w;
}

constexpr int64_t kMaxRows = 384;  // of A's part: 288 KiB of a 512 KiB L2
constexpr int64_t kBlock = 384;    // steps: 12 KiB of W in L1
static_assert(kBlock % kRowBytes == 0);

#if defined(VITKERN_AMX)
inline DType row_dtype(Precision) { return DType::bf16; }  // as attention reads them
inline int64_t group_rows(Precision) { return 384; }
constexpr int64_t kHiddenBytes = int64_t{4} << 20;  // fewer rows would wait for the weights
#else
using fma_tiles::group_rows;
using fma_tiles::row_dtype;
// All in L2, before and after they are settled: 2 (ViT-S) to 4 % (ViT-B) faster than 3 MiB.
constexpr int64_t kHiddenBytes = int64_t{1} << 20;
#endif
using fma_tiles::part_epilogue;
using fma_tiles::part_floats;
inline int64_t hidden_rows(int64_t F, Precision, int threads) {
  return fma_tiles::rows_that_fill(kHiddenBytes, round_up(max(F, 1), kLine) * 5, kTileRows,
                                   threads);
}
inline int64_t hidden_columns(int64_t F) { return F; }  // a row has one scale

inline int64_t gemm_scratch(int64_t M, int64_t K, Precision) {
  return max(kGroup * kNR * (kSlab + M), finer::gemm_scratch(M, K, kFiner));
}

// The nearest integers of v, the least 0 and the largest 255, lane by lane.
inline void store_bytes(Vec v, uint8_t* out) {
#if defined(__AVX512F__)
  const __m512i q = _mm512_max_epi32(_mm512_cvtps_epi32(v.v), _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(q));
#elif defined(__AVX2__)
  const __m256i q = _mm256_cvtps_epi32(v.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
#else
  v = lesser(greater(nearest(v), Vec::set(0)), Vec::set(255));
  for (int64_t i = 0; i < Vec::kLanes; ++i) out[i] = static_cast<uint8_t>(v.v[i]);
#endif
}

struct RowScale {
  float scale;
  int32_t zero;
};

// x (n) -> integers, and others up to a multiple of Vec::kLanes, which zeros of W meet.
inline RowScale quantise(const float* x, int64_t n, uint8_t* out) {
  constexpr int64_t L = Vec::kLanes;
  // Of every second vector: chains of half the length.
  Vec top[2] = {}, bottom[2] = {}, bad[2] = {};
  for (int64_t i = 0; i < n; i += 2 * L)
#pragma GCC unroll 2
    for (int64_t k = 0; k < 2; ++k) {
      const int64_t left = n - i - k * L;
      const Vec v = left > 0 ? Vec::load(x + i + k * L, left) : Vec::set(0);
      top[k] = greater(v, top[k]);  // a NaN loses in both, and is in the sum
      bottom[k] = lesser(v, bottom[k]);
      bad[k] = fma(v, Vec::set(0), bad[k]);
    }
  const float low = -(Vec::set(0) - lesser(bottom[0], bottom[1])).largest();
  const float high = greater(top[0], top[1]).largest(), wrong = (bad[0] + bad[1]).sum();
  if (!(wrong == 0)) {
    memset(out, 0, n);
    return {NAN, 0};
  }
  const float scale = high / 255 - low / 255;  // high - low may overflow
  if (scale < 1e-30f) {                        // whose inverse may overflow
    memset(out, 0, n);
    return {0, 0};
  }
  const float inverse = 1 / scale, zero = rintf(-low * inverse);
  for (int64_t i = 0; i < n; i += L)
    store_bytes(fma(Vec::load(x + i, n - i), Vec::set(inverse), Vec::set(zero)), out + i);
  return {scale, static_cast<int32_t>(zero)};
}

struct Left {
  char* data;
  int64_t K, bytes, stride;  // of a row's integers; from row to row
  bool is_finer;             // rows of a weight that comes as floats: `rest` has them
  finer::Left rest;

  static Left at(float* memory, int64_t K, Precision p) {
    const int64_t bytes = round_up(K, kRowBytes);
    const int64_t stride = row_stride((bytes + kRowBytes) / 4 + round_up(K, kLine)) * 4;
    return {reinterpret_cast<char*>(memory),   K, bytes, stride, p != Precision::int8,
            finer::Left::at(memory, K, kFiner)};
  }
  static int64_t floats(int64_t M, int64_t K, Precision p) {
    constexpr int64_t kBeyond = 31;  // rows that AMX's last tile loads, and nobody uses
    return max((M + kBeyond) * at(nullptr, K, p).stride / 4, finer::Left::floats(M, K, kFiner));
  }
  RowScale& scale(int64_t m) const {
    return *reinterpret_cast<RowScale*>(data + m * stride + bytes);
  }
  float* waiting(int64_t m) const {
    return reinterpret_cast<float*>(data + m * stride + bytes + kRowBytes);
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t m, float* row) const { return is_finer ? rest.open(m, row) : row; }
  void close(int64_t m, const float* row, int64_t n) const {
    if (is_finer) return rest.close(m, row, n);
    scale(m) = quantise(row, n, reinterpret_cast<uint8_t*>(data + m * stride));
  }
  // Columns k .. k + n of row m, until settle(m).
  void store(int64_t m, int64_t k, Vec v, int64_t n) const { v.store(waiting(m) + k, n); }
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    memcpy(waiting(m) + k, from, n * sizeof(float));
  }
  bool has_few_bits() const { return !is_finer; }
#if defined(VITKERN_AMX)
  template <auto, class Work>
  [[gnu::always_inline]] bool with_rows(int64_t m, int64_t k, const Work& work) const {
    work(amx_tiles::FloatRows{reinterpret_cast<char*>(waiting(m) + k), stride});
    return true;
  }
#endif
  static constexpr bool kSettles = true;
  void settle(int64_t m) const { close(m, waiting(m), K); }
};

struct Columns {  // what follows the integers of a panel
  float scale[kNR];
  int32_t sum[kNR];
};

inline int64_t panel_bytes(int64_t K) {
  return round_up(K, kRowBytes) * kNR + static_cast<int64_t>(sizeof(Columns));
}
inline int64_t packed_bytes(int64_t N, int64_t K, Precision p) {
  if (p != Precision::int8) return finer::packed_bytes(round_up(N, kNR), K, kFiner);
  return ceil_div(N, kNR) * panel_bytes(K);
}

// Panels of the finer tiles in one of these.
constexpr int64_t kFinerPanels = kNR / finer::kNR;

// Panel `panel` of an unpacked weight, s8 with scales or floats, to its place among the packed
// ones.
inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  if (w.precision != Precision::int8) {
    for (int64_t p = panel * kFinerPanels; p < (panel + 1) * kFinerPanels; ++p)
      finer::pack_panel(as_finer(w), p, panels);
    return;
  }
  char* const to = static_cast<char*>(panels) + panel * panel_bytes(w.K);
  memset(to, 0, panel_bytes(w.K));
  Columns columns = {};
  for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j) {
    const int64_t n = panel * kNR + j;
    const auto* const row = static_cast<const signed char*>(w.data) + n * w.K;
    columns.scale[j] = w.scales[n];
    for (int64_t k = 0; k < w.K; ++k) {
      to[(k / 4 * kNR + j) * 4 + k % 4] = static_cast<char>(row[k]);
      columns.sum[j] += row[k];
    }
  }
  memcpy(to + round_up(w.K, kRowBytes) * kNR, &columns, sizeof(columns));
}

inline Precision first_alike(Precision) { return Precision::int8; }
inline PanelForm panel_form(Precision) { return {"int8", kNR, kBlock, 1}; }
constexpr bool kUnpacks = false;  // the weights were rounded to integers
inline void unpack_panel(const Weights&, int64_t, void*) {}

#if defined(__AVX512F__)
// A vector of int32 sums -> fp32; `weights` are the sums of W's rows, `factor` their scales.
[[gnu::always_inline]] inline Vec finish(const float* c, const RowScale& a, __m512i weights,
                                         Vec factor) {
  const __m512i zeros = _mm512_mullo_epi32(_mm512_set1_epi32(a.zero), weights);
  const Vec sum{_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(c), zeros))};
  return sum * factor * Vec::set(a.scale);
}
#endif

// c (kNR) int32 -> fp32. By whole vectors where an epilogue reads it next by them: halves of one
// that are still on their way to the cache would be waited for.
inline void finish_row(const RowScale& a, const Columns& w, float* c) {
#if defined(__AVX512F__)
  for (int64_t j = 0; j < kNR; j += Vec::kLanes)
    finish(c + j, a, _mm512_loadu_si512(w.sum + j), Vec::load(w.scale + j)).store(c + j);
#else
  const Sums row = Sums::at(c);
  for (int64_t j = 0; j < kNR; ++j)
    c[j] = static_cast<float>(row.sum[j] - a.zero * w.sum[j]) * w.scale[j] * a.scale;
#endif
}

}  // namespace int8_tiles
}  // namespace

#if defined(VITKERN_AMX)
#include "integers_amx.hpp"
#endif

namespace {
namespace int8_tiles {

#if !defined(VITKERN_AMX)

struct Tiles {
  static constexpr int64_t kColumns = kNR, kPartRows = kMaxRows;
  static constexpr int64_t kUnit = kBlock, kTogether = int8_tiles::kTogether;

  static const char* slab(const Weights& w, int64_t first, int64_t, Range steps, float*,
                          int64_t* stride) {
    *stride = panel_bytes(w.pitch);
    return static_cast<const char*>(w.data) + (w.first_row / kNR + first) * *stride +
           (w.first_step + steps.begin) * kNR;
  }

  // As fma_tiles'.
  template <class Done>
  static void multiply(const Left& A, Range rows, Range steps, const Panels& panels,
                       const Done& done) {
    const int64_t M = rows.end - rows.begin, tiles = panels.tiles(M, kTileRows);
    const EvenParts heights(M, tiles);
    for (int64_t k0 = steps.begin; k0 < steps.end; k0 += kBlock) {
      const int64_t here = (k0 - steps.begin) * kNR,
                    there = k0 + kBlock < steps.end ? here + kBlock * kNR : -1;
      const NextBlocks next(panels, there, kBlock * kNR, tiles, kBlock / kFetchSteps);
      for (int64_t t = 0; t < tiles; ++t) {
        const Range some = heights[t];
        const Range now{rows.begin + some.begin, rows.begin + some.end};
        const Tile tile{.a = A.data + now.begin * A.stride + k0,
                        .a_stride = A.stride,
                        .block = panels.data + here,
                        .steps = min(kBlock, round_up(steps.end - k0, kRowBytes)),
                        .c = panels.c + some.begin * kNR,
                        .add = k0 > 0,
                        .ahead = next.of_tile(t),
                        .panels = panels.count,
                        .pitch = panels.pitch,
                        .c_pitch = panels.c_pitch};
        multiply_rows(some.end - some.begin, tile);
        if (k0 + kBlock >= steps.end) done(now);
      }
    }
  }

  // Sums of rows, whose last slab of a panel is this one, to fp32.
  static void finish(const Left& A, Range steps, const char* panel, Range rows, float* c) {
    Columns columns;
    memcpy(&columns, panel + (A.bytes - steps.begin) * kNR, sizeof(columns));
    for (int64_t m = rows.begin; m < rows.end; ++m, c += kNR) finish_row(A.scale(m), columns, c);
  }
};

template <class Epilogue>
void multiply_integers(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
                       const Epilogue& epilogue) {
  walk<Tiles>(A, rows, w, panels, scratch, epilogue);
}

#endif

template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  if (w.precision == Precision::int8)
    return multiply_integers(A, rows, w, panels, scratch, epilogue);
  const int64_t count = ceil_div(w.N, finer::kNR);
  const Range part{min(panels.begin * kFinerPanels, count), min(panels.end * kFinerPanels, count)};
  finer::gemm_part(A.rest, rows, as_finer(w), part, scratch, epilogue);
}

}  // namespace int8_tiles
}  // namespace
