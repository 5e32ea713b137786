// A and W as AMX multiplies them: sums of terms (split_amx.hpp), in the order in which tiles are
// loaded.
//
//   A (M, K)  [32 rows]: [32 steps][term][2 tiles][16 rows][32 steps], then Scales of fp16
//   W (N, K)  [32 columns]: [32 steps][term][2 tiles][16 pairs of steps][16 columns][2], then
//   Scales
//
// What is missing in the last tile of steps is zero on both sides; rows beyond M are never used.
#pragma once
#include "between_amx.hpp"
#include "split_amx.hpp"
#include "transpose.hpp"

namespace {
namespace amx_tiles {

// ---- A ---------------------------------------------------------------------------

struct Left {
  char* data;
  int64_t K;
  Terms terms;

  static Left at(float* memory, int64_t K, Terms terms) {
    return {reinterpret_cast<char*>(memory), K, terms};
  }
  static Left at(float* memory, int64_t K, Precision p) { return at(memory, K, terms_of(p)); }
  static int64_t floats(int64_t M, int64_t K, Terms terms) {
    return ceil_div(M, kTileRows) * panel_bytes(K, terms) / 4;
  }
  static int64_t floats(int64_t M, int64_t K, Precision p) { return floats(M, K, terms_of(p)); }
  static bool reads_in_place(DType, int64_t) { return false; }
  static Left in_place(const void*, int64_t) { return {}; }
  static bool reads_transposed(DType, int64_t) { return false; }
  static Left transposed(const void*, int64_t) { return {}; }

  const char* block(int64_t m) const { return data + m / kTileRows * panel_bytes(K, terms); }
  // Element (m, k) of the first term; the next terms follow, each after kPairBytes.
  [[gnu::always_inline]] char* at(int64_t m, int64_t k) const {
    return const_cast<char*>(block(m)) + k / kSteps * terms.count * kPairBytes +
           m / 16 % 2 * kTileBytes + m % 16 * kTileStride + k % kSteps * 2;
  }

  Scales& scales(int64_t m) const { return scales_of(const_cast<char*>(block(m)), K, terms); }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    if (terms.halves)
      PowersOfTwo(largest_magnitude(DType::f32, row, 0, n)).set(scales(m), m % kTileRows);
    take(m, {DType::f32, row, 0}, n);
  }
  // Row m, as the first of `from` is.
  void copy(int64_t m, const Rows& from) const {
    if (terms.halves)
      PowersOfTwo(largest_magnitude(from.dtype, from.data, 0, K)).set(scales(m), m % kTileRows);
    take(m, from, K);
  }
  // The same where row m's scale is known: after expect.
  [[gnu::always_inline]] void take(int64_t m, const Rows& from, int64_t n) const {
    with_terms(terms, [&]<Terms kTerms>() __attribute__((always_inline)) {
      const Vec scale = scale_of<kTerms>(m);
      Vec squares = Vec::set(0);
      __m512i part[kTerms.count];
      for (int64_t k = 0; k < n; k += kSteps) {
        load_terms<kTerms>(from.dtype, from.data, k, n - k, scale, squares, part);
        for (int t = 0; t < kTerms.count; ++t)
          _mm512_store_si512(at(m, k) + t * kPairBytes, part[t]);
      }
      if constexpr (kTerms.halves) {
        const int64_t r = m % kTileRows;
        scales(m).norm[r] = sqrtf(squares.sum()) * scales(m).inverse[r];
      }
    });
  }
  // Rows that are stored or put in parts: that no element of row m will be larger. It may be far
  // from the largest: of fp16's exponents they need a few.
  bool expects() const { return terms.halves; }
  void expect(int64_t m, float bound) const {
    const float finite = bound < INFINITY ? bound : 1.0f;  // else elements are not finite either
    PowersOfTwo(Vec::set(finite)).set(scales(m), m % kTileRows);
  }
  // What sums of row m are to be multiplied by.
  float inverse(int64_t m) const { return scales(m).inverse[m % kTileRows]; }
  // The Euclidean norm of row m, which was closed or copied.
  float norm(int64_t m) const { return scales(m).norm[m % kTileRows]; }

  bool has_few_bits() const { return terms.count == 1 && !terms.halves; }
  // Columns k .. k + n of row m, k a multiple of 16. At the row's end its last tile is filled up.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const {
    write(m, k, n < 16 ? v.keep_first(n, 0) : v, 0, n);
  }
  // Rows from m on, the first of a block, of the columns k .. k + 32, two at a time: those of a
  // block lie one after the other. Only for kTerms terms.
  template <Terms kTerms, class Work>
  [[gnu::always_inline]] bool with_rows(int64_t m, int64_t k, const Work& work) const {
    if (terms.count != kTerms.count || terms.halves != kTerms.halves) return false;
    const float* scale = kTerms.halves ? scales(m).scale : nullptr;
    work([to = at(m, k), scale](const Pair& rows) mutable __attribute__((always_inline)) {
      for (int64_t r = 0; r < 2; ++r, to += kTileStride) {
        __m512i part[kTerms.count];
        Vec a = rows.v[r][0], b = rows.v[r][1];
        if constexpr (kTerms.halves) {
          const Vec by = Vec::set(*scale++);
          a = a * by, b = b * by;
        }
        split_pair<kTerms>(a, b, part);
        for (int t = 0; t < kTerms.count; ++t) _mm512_store_si512(to + t * kPairBytes, part[t]);
      }
    });
    return true;
  }
  // Columns k .. k + n of row m, for any k: a head's columns may start anywhere.
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    if (k % kSteps == 0 && n % kSteps == 0)
      return with_terms(terms, [&]<Terms kTerms>() __attribute__((always_inline)) {
        const Vec scale = scale_of<kTerms>(m);
        __m512i part[kTerms.count];
        for (int64_t i = 0; i < n; i += kSteps) {
          Vec a = Vec::load(from + i), b = Vec::load(from + i + 16);
          if constexpr (kTerms.halves) a = a * scale, b = b * scale;
          split_pair<kTerms>(a, b, part);
          for (int t = 0; t < kTerms.count; ++t)
            _mm512_store_si512(at(m, k + i) + t * kPairBytes, part[t]);
        }
      });
    while (n > 0) {
      const int64_t lane = k % 16, some = min(n, 16 - lane);
      float row[16] = {};
      memcpy(row + lane, from, some * sizeof(float));
      write(m, k - lane, Vec::load(row), lane, some);
      from += some;
      k += some;
      n -= some;
    }
  }
  // Where true, rows that were stored or put in parts must be settled before a GEMM reads them.
  static constexpr bool kSettles = false;
  void settle(int64_t) const {}
  static constexpr bool kFillsTransposed = false, kFillsPairs = false;

 private:
  template <Terms kTerms>
  Vec scale_of(int64_t m) const {
    return Vec::set(kTerms.halves ? scales(m).scale[m % kTileRows] : 1.0f);
  }
  // Lanes [lane, lane + n) of x to the columns k + lane onwards; the other lanes of x are zero.
  void write(int64_t m, int64_t k, Vec x, int64_t lane, int64_t n) const {
    const bool last = k + lane + n >= K;
    const __mmask16 mask =
        static_cast<__mmask16>((last ? 0xffff : Vec::first(lane + n)) & ~((1u << lane) - 1));
    with_terms(terms, [&]<Terms kTerms>() __attribute__((always_inline)) {
      __m256i part[kTerms.count];
      if constexpr (kTerms.halves) x = x * scale_of<kTerms>(m);
      split_one<kTerms>(x, part);
      for (int t = 0; t < kTerms.count; ++t) {
        char* const to = at(m, k) + t * kPairBytes;
        _mm256_mask_storeu_epi16(to, mask, part[t]);
        if (last && k % kSteps == 0)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_setzero_si256());
      }
    });
  }
};

// ---- W ---------------------------------------------------------------------------

inline int64_t packed_bytes(int64_t N, int64_t K, Precision p) {
  return ceil_div(N, kNR) * panel_bytes(K, terms_of(p));
}

// Rows (n, K), of which the first 32 count, as a panel; the missing ones are zero.
template <Terms terms>
inline void pack_rows(const Rows& rows, int64_t n, int64_t K, char* panel) {
  Scales scales{};
  Vec squares[kNR] = {};
  if (terms.halves)
    for (int64_t j = 0; j < min(n, kNR); ++j)
      PowersOfTwo(largest_magnitude(rows.dtype, rows.data, j * rows.stride, K)).set(scales, j);
  for (int64_t k = 0; k < K; k += kSteps)
    for (int64_t half = 0; half < 2; ++half) {
      Vec part[terms.count][16];
      for (int64_t i = 0; i < 16; ++i) {
        __m512i elements[terms.count] = {};
        const int64_t j = half * 16 + i;
        if (j < n)
          load_terms<terms>(rows.dtype, rows.data, j * rows.stride + k, K - k,
                            Vec::set(scales.scale[j]), squares[j], elements);
        for (int t = 0; t < terms.count; ++t) part[t][i] = {_mm512_castsi512_ps(elements[t])};
      }
      for (int t = 0; t < terms.count; ++t) {
        char* const tile = panel + (k / kSteps * terms.count + t) * kPairBytes + half * kTileBytes;
        transpose(part[t]);  // 16 columns x 16 pairs of steps -> the other way round
        for (int64_t i = 0; i < 16; ++i)
          part[t][i].store(reinterpret_cast<float*>(tile + i * kTileStride));
      }
    }
  if constexpr (terms.halves) {
    for (int64_t j = 0; j < kNR; ++j) scales.norm[j] = sqrtf(squares[j].sum()) * scales.inverse[j];
    scales_of(panel, K, terms) = scales;
  }
}

// Steps (n, columns) in bf16, of which the first 32 columns count, as a panel: rows in pairs.
inline void pack_pairs(const Rows& steps, int64_t n, int64_t columns, char* panel) {
  const __mmask32 there = columns >= kNR ? 0xffffffff : (1u << columns) - 1;
  // Fours of columns, so that interleaving within 128 bits leaves the first 16 columns in one
  // vector
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const auto load = [&](int64_t j) {
    if (j >= n) return _mm512_setzero_si512();
    const auto* const row = static_cast<const bf16*>(steps.data) + j * steps.stride;
    return _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(there, row));
  };
  for (int64_t j = 0; j < n; j += kSteps)
    for (int64_t i = 0; i < kSteps; i += 2) {
      const __m512i even = load(j + i), odd = load(j + i + 1);
      char* const to = panel + j / kSteps * kPairBytes + i / 2 * kTileStride;
      _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(even, odd));
    }
}

// Steps (n, columns), of which the first 32 columns count, as a panel; the missing ones are zero.
template <Terms terms>
inline void pack_steps(const Rows& steps, int64_t n, int64_t columns, char* panel) {
  if (terms.count == 1 && !terms.halves && steps.dtype == DType::bf16)
    return pack_pairs(steps, n, columns, panel);
  for (int64_t e = 0; e < kNR; e += 16) {
    const auto load = [&](int64_t row) {
      if (row >= n || e >= columns) return Vec::set(0);
      return load_as(steps.dtype, steps.data, row * steps.stride + e, columns - e);
    };
    Vec most = Vec::set(0), squares = Vec::set(0);
    for (int64_t j = 0; terms.halves && j < n; ++j) most = greater(finite_magnitude(load(j)), most);
    const PowersOfTwo by(most);
    for (int64_t j = 0; j < round_up(n, kSteps); j += 2) {
      char* const pair =
          panel + j / kSteps * terms.count * kPairBytes + j % kSteps / 2 * kTileStride;
      Vec even = load(j), odd = load(j + 1);
      if constexpr (terms.halves) {
        even = even * by.scale, odd = odd * by.scale;
        squares = fma(even, even, fma(odd, odd, squares));
      }
      __m256i low[terms.count], high[terms.count];
      split_one<terms>(even, low);
      split_one<terms>(odd, high);
      for (int t = 0; t < terms.count; ++t) {
        const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(low[t]),
                                             _mm512_slli_epi32(_mm512_cvtepu16_epi32(high[t]), 16));
        _mm512_store_si512(pair + t * kPairBytes + e / 16 * kTileBytes, both);
      }
    }
    if constexpr (terms.halves) {
      Scales& scales = scales_of(panel, n, terms);
      by.scale.store(scales.scale + e);
      by.inverse.store(scales.inverse + e);
      (Vec{_mm512_sqrt_ps(squares.v)} * by.inverse).store(scales.norm + e);
    }
  }
}

// Panel `panel` of a weight that is not packed.
inline void convert_panel(const Weights& w, int64_t panel, char* out) {
  const int64_t row = w.first_row + panel * kNR, n = w.N - panel * kNR;
  const Rows data{w.dtype, w.data, w.pitch};
  with_gemm_terms(terms_of(w.precision), [&]<Terms terms>() {
    if (w.by_steps)
      pack_steps<terms>(data.from(w.first_step, row), w.K, n, out);
    else
      pack_rows<terms>(data.from(row, w.first_step), n, w.K, out);
  });
}

inline void pack_panel(const Weights& w, int64_t panel, void* panels) {
  convert_panel(w, panel,
                static_cast<char*>(panels) + panel * panel_bytes(w.K, terms_of(w.precision)));
}

inline Precision first_alike(Precision p) { return p; }
inline PanelForm panel_form(Precision p) {
  return {terms_of(p).halves ? "halves" : "terms", kNR, kSteps, terms_of(p).count};
}

// The other way round: the sum of an element's terms, which is exact with three of bf16, and has 22
// bits with two of fp16.
constexpr bool kPacksSteps = false;  // pairs of steps are next to each other
constexpr DType kFactorDtype = DType::f32;
constexpr bool kUnpacks = true;
inline void unpack_panel(const Weights& w, int64_t panel, void* weight) {
  const Terms terms = terms_of(w.precision);
  const char* const from = static_cast<const char*>(w.data) + panel * panel_bytes(w.K, terms);
  const Scales* const scales = terms.halves ? &scales_of(from, w.K, terms) : nullptr;
  for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j)
    for (int64_t k = 0; k < w.K; ++k) {
      const char* const at = from + k / kSteps * terms.count * kPairBytes + j / 16 * kTileBytes +
                             k % kSteps / 2 * kTileStride + j % 16 * 4 + k % 2 * 2;
      float sum = 0;
      for (int t = 0; t < terms.count; ++t) {
        uint16_t bits;
        memcpy(&bits, at + t * kPairBytes, 2);
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float term;
        memcpy(&term, &wide, 4);
        if (scales)
          term = _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(bits)))) *
                 scales->inverse[j];
        sum = t ? sum + term : term;
      }
      store_as(w.dtype, weight, (panel * kNR + j) * w.K + k, Vec::set(sum), 1);
    }
}

// ---- Factors inside attention ----------------------------------------------------

// Tile t of n queries: all but the last are full, and that one takes half the time from 16 down.
inline Range query_tile(int64_t n, int64_t t) {
  return {t * kTileRows, min(n, (t + 1) * kTileRows)};
}

// Keys (n, E), of which the first kNR count, as the panel that queries are multiplied by.
inline void pack_keys(const Rows& keys, int64_t n, int64_t E, Precision p, float* panel) {
  with_head_terms(head_terms_of(p), [&]<Terms terms>() {
    pack_rows<terms>(keys, n, E, reinterpret_cast<char*>(panel));
  });
}

// Values (n, columns), of which the first kNR columns count, as the panel that softmax weights are
// multiplied by.
inline void pack_values(const Rows& values, int64_t n, int64_t columns, Precision p, float* panel) {
  with_head_terms(head_terms_of(p), [&]<Terms terms>() {
    pack_steps<terms>(values, n, columns, reinterpret_cast<char*>(panel));
  });
}

}  // namespace amx_tiles
}  // namespace
