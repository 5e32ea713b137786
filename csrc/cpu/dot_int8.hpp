// c (R, 32) int32 = or += a (R, steps) u8 times a block of W (steps, 32) s8, exactly, by what each
// instruction set has. Included by tiles_int8.hpp, which says how A and W lie in memory.
//
//   AMX             tdpbusd: 16 rows x 16 columns x 64 steps an instruction
//   VNNI            vpdpbusd: four steps of a column
//   AVX-512, AVX2   vpmaddubsw multiplies two steps to 16 bits; two of those are added before
//                   vpmaddwd widens them. Three multiplications for 64 multiply-adds of a 256-bit
//                   vector, where 16-bit integers take four: in L1 of a Zen 3 2.5 times as fast as
//                   fp32, 16-bit integers 1.6 times. What keeps those sums within 16 bits is how
//                   the weights are quantised: of any four that are added there, those of one sign
//                   add up to at most 128, and 255 * 128 < 2^15.
//   others          fp32: integers below 2^24 are exact
#pragma once
#include "tiles_fma.hpp"
#if defined(VITKERN_AMX)
#include "tiles_amx.hpp"
#endif

namespace {
namespace int8_tiles {

constexpr int64_t kNR = 32;
constexpr int64_t kRowBytes = 64;  // rows of A and panels of W are padded to whole multiples

struct Tile {
  const char* a;
  int64_t a_stride;   // bytes
  const char* block;  // [steps / 4][32 columns][4]
  int64_t steps;      // a multiple of kRowBytes
  float* c;           // holds int32, see Sums
  bool add;
  Ahead ahead;
  int64_t panels = 1, pitch = 0, c_pitch = 0;  // <= kTogether; bytes, floats from one to the next
};

// Sums are int32 in the memory of floats until all of K is in them.
struct Sums {
  int32_t sum[kNR];

  static Sums at(const float* c) {
    Sums s;
    memcpy(s.sum, c, sizeof(s));
    return s;
  }
  void store(float* c) const { memcpy(c, sum, sizeof(*this)); }
};

#if defined(VITKERN_AMX)

constexpr int64_t kTileRows = 32;

// between() runs at each step: the vector units work while the tile unit does.
template <int rows, class Between>
inline void multiply_tiles(const Tile& t, Between& between) {
  const Result sums{t.c, kNR, t.add};
  amx_tiles::begin_tiles<rows>(sums);
  Ahead ahead = t.ahead;
  for (int64_t k = 0; k < t.steps; k += kRowBytes) {
    tile_load<6>(t.block + k * kNR, 4 * kNR), tile_load<7>(t.block + k * kNR + 64, 4 * kNR);
    tile_stream<4>(t.a + k, t.a_stride);
    if constexpr (rows == 2) tile_stream<5>(t.a + 16 * t.a_stride + k, t.a_stride);
    tile_dot_bytes<0, 4, 6>(), tile_dot_bytes<1, 4, 7>();
    if constexpr (rows == 2) tile_dot_bytes<2, 5, 6>(), tile_dot_bytes<3, 5, 7>();
    ahead.fetch();
    between();
  }
  amx_tiles::store_tiles<rows>(sums);
}

// Whole tiles are read and written; A has the memory, and c the rows of the last tile.
template <class Between>
inline void multiply_rows(int64_t R, const Tile& t, Between& between) {
  if (R > 16)
    multiply_tiles<2>(t, between);
  else
    multiply_tiles<1>(t, between);
}
inline void multiply_rows(int64_t R, const Tile& t) {
  const auto nothing = [] {};
  multiply_rows(R, t, nothing);
}
constexpr int64_t kFetchSteps = kRowBytes;

#elif defined(__AVX2__) || defined(__AVX512F__)

#if defined(__AVX512F__)
typedef __m512i Ints;
inline Ints zero() { return _mm512_setzero_si512(); }
inline Ints broadcast(const char* quad) {
  return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
}
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
#else
typedef __m256i Ints;
inline Ints zero() { return _mm256_setzero_si256(); }
inline Ints broadcast(const char* quad) {
  return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
}
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_ints(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
#endif
constexpr int kVectors = kNR * 4 / sizeof(Ints);

// As assembly for the reasons that tiles_int16.hpp has for its own.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || \
    (defined(VITKERN_EMULATED) && defined(VITKERN_INT16))

#if defined(__AVX512F__)
constexpr int64_t kTileRows = 14;  // times 2 vectors: 28 accumulators + 2 of W + 1 broadcast
#else
constexpr int64_t kTileRows = 3;  // times 4 vectors: 12 accumulators + 1 of W + 1 broadcast
#endif
constexpr int64_t kUnit = 4;  // steps at once
constexpr int64_t kTogether = kPanels;

// Four steps of W are loaded once for all rows: as operands in memory they would be 28 loads for 28
// multiplications, and a Zen 4 loads one vector of 512 bits a clock, broadcasts beside them.
struct Kind {
  using Sum = Ints;
  using Factor = Ints;
  static constexpr int kPanelVectors = kVectors;
#if defined(__AVX512F__)
  static constexpr int kHeld = 4;
#else
  static constexpr int kHeld = 1;
#endif
  static Ints load(const char* p) { return load_ints(p); }
  static Ints broadcast(const char* quad) { return int8_tiles::broadcast(quad); }
  static Ints add(Ints sum, Ints x, const char* y) { return add(sum, x, load_ints(y)); }
  static Ints add(Ints sum, Ints x, Ints y) {
#if defined(VITKERN_EMULATED)
    return _mm512_dpbusd_epi32(sum, x, y);
#elif defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "xm"(y));
    return sum;
#endif
  }
};

// sums += rows of A times so many vectors of W.
template <int kCount, int R>
[[gnu::always_inline]] inline void multiply_steps(const Tile& tile, Ints (&sums)[R][kCount]) {
  Ahead ahead = tile.ahead;
  TileReader<R> a(tile.a, tile.a_stride);
  PanelReader b{tile.block, tile.block + tile.pitch};
  for (int64_t k = 0; k < tile.steps; k += kRowBytes) {
    ahead.fetch();
    add_units<Kind, kCount>(sums, a, b, kRowBytes / kUnit);
  }
}

#else

#if defined(__AVX512F__)
constexpr int64_t kTileRows = 12;  // times 2 vectors: 24 accumulators + 2 broadcasts + 3
#else
constexpr int64_t kTileRows = 2;  // times 4 vectors: 8 accumulators + 2 broadcasts + 3
#endif
constexpr int64_t kUnit = 8;
constexpr int64_t kTogether = 1;

inline Ints add_octets(Ints sum, Ints x0, Ints x1, const char* w, Ints ones) {
  const Ints* const w0 = reinterpret_cast<const Ints*>(w);
  const Ints* const w1 = reinterpret_cast<const Ints*>(w + kNR * 4);
#if defined(VITKERN_EMULATED)
  const Ints both = _mm512_add_epi16(_mm512_maddubs_epi16(x0, load_ints(w0)),
                                     _mm512_maddubs_epi16(x1, load_ints(w1)));
  return add(sum, _mm512_madd_epi16(both, ones));
#else
  Ints first, second;
  asm("vpmaddubsw %5, %3, %1\n\t"
      "vpmaddubsw %6, %4, %2\n\t"
      "vpaddw %2, %1, %1\n\t"
      "vpmaddwd %7, %1, %1\n\t"
      "vpaddd %1, %0, %0"
      : "+v"(sum), "=&v"(first), "=&v"(second)
      : "v"(x0), "v"(x1), "m"(*w0), "m"(*w1), "v"(ones));
  return sum;
#endif
}

// sums += rows of A times a panel.
template <int kCount, int R>
[[gnu::always_inline]] inline void multiply_steps(const Tile& tile, Ints (&sums)[R][kCount]) {
#if defined(__AVX512F__)
  const Ints ones = _mm512_set1_epi32(0x10001);
#else
  const Ints ones = _mm256_set1_epi16(1);
#endif
  Ahead ahead = tile.ahead;
  TileReader<R> rows(tile.a, tile.a_stride);
  const char* w = tile.block;
  for (int64_t k = 0; k < tile.steps; k += kUnit, w += kUnit * kNR) {
    if (k % kRowBytes == 0) ahead.fetch();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Ints x0 = broadcast(rows.row(r)), x1 = broadcast(rows.row(r) + 4);
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v)
        sums[r][v] = add_octets(sums[r][v], x0, x1, w + v * sizeof(Ints), ones);
    }
    rows.advance(kUnit);
  }
}

#endif

constexpr int64_t kFetchSteps = kRowBytes;

// As fma_tiles::multiply_rows.
template <int R, int kCount>
[[gnu::noinline]] void multiply_whole(const Tile& tile) {
  Ints acc[R][kCount];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) acc[r][v] = zero();
  multiply_steps<kCount>(tile, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kCount; ++v) {
      float* const c = tile.c + v / kVectors * tile.c_pitch + r * kNR;
      char* const to = reinterpret_cast<char*>(c) + v % kVectors * sizeof(Ints);
      store_ints(to, tile.add ? add(load_ints(to), acc[r][v]) : acc[r][v]);
    }
}

inline void multiply_rows(int64_t R, const Tile& tile) {
  if constexpr (kTogether > 1)
    if (tile.panels > 1)
      return with_rows<kPairRows>(
          R, [&]<int kRows>() { multiply_whole<kRows, kVectors * kTogether>(tile); });
  with_rows<kTileRows>(R, [&]<int kRows>() { multiply_whole<kRows, kVectors>(tile); });
}

#else

constexpr int64_t kTileRows = 8 * fma_tiles::kTileRows;  // that use a block of W as floats
constexpr int64_t kFetchSteps = 128;                     // whose sums are below 255 * 127 * 128
constexpr int64_t kTogether = 1;

inline void multiply_rows(int64_t R, const Tile& tile) {
  constexpr int64_t kColumns = fma_tiles::kNR;
  float a[kTileRows * kFetchSteps], w[kFetchSteps * kColumns], c[kTileRows * kColumns];
  Ahead ahead = tile.ahead;
  for (int64_t k0 = 0; k0 < tile.steps; k0 += kFetchSteps) {
    ahead.fetch();
    const int64_t K = min(kFetchSteps, tile.steps - k0);
    const auto* const block = reinterpret_cast<const signed char*>(tile.block) + k0 * kNR;
    for (int64_t r = 0; r < R; ++r)
      for (int64_t k = 0; k < K; ++k)
        a[r * kFetchSteps + k] = static_cast<unsigned char>(tile.a[r * tile.a_stride + k0 + k]);
    for (int64_t j0 = 0; j0 < kNR; j0 += kColumns) {
      for (int64_t k = 0; k < K; ++k)
        for (int64_t j = 0; j < kColumns; ++j)
          w[k * kColumns + j] = block[(k / 4 * kNR + j0 + j) * 4 + k % 4];
      for (int64_t r = 0; r < R; r += fma_tiles::kTileRows)
        fma_tiles::multiply(
            min(fma_tiles::kTileRows, R - r),
            {a + r * kFetchSteps, kFetchSteps, w, K, {c + r * kColumns, kColumns, false}, Ahead{}});
      for (int64_t r = 0; r < R; ++r) {
        Sums row = Sums::at(tile.c + r * kNR);
        for (int64_t j = 0; j < kColumns; ++j) {
          const int32_t sum = static_cast<int32_t>(c[r * kColumns + j]);
          row.sum[j0 + j] = tile.add || k0 ? row.sum[j0 + j] + sum : sum;
        }
        row.store(tile.c + r * kNR);
      }
    }
  }
}

#endif

}  // namespace int8_tiles
}  // namespace
