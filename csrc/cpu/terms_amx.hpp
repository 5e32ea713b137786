// A and W as AMX multiplies them: each element a sum of bf16 terms (bf16 1, tf32 2, fp32 3), in the
// order in which tiles are loaded.
//
//   A (M, K)  [32 rows][32 steps][term][2 tiles][16 rows][32 steps]
//   W (N, K)  [32 columns][32 steps][term][2 tiles][16 pairs of steps][16 columns][2]
//
// What is missing in the last tile of steps is zero on both sides; rows beyond M are never used.
#pragma once
#include "amx.hpp"
#include "between_amx.hpp"
#include "scratch.hpp"
#include "transpose.hpp"

namespace {
namespace amx_tiles {

constexpr int64_t kTileRows = 32;
constexpr int64_t kNR = 32;
constexpr int64_t kSteps = 32;                  // of K in a tile
constexpr int64_t kPairBytes = 2 * kTileBytes;  // two tiles side by side, or one above the other

constexpr int terms_of(Precision p) {
  return p == Precision::fp32 ? 3 : p == Precision::tf32 ? 2 : 1;  // int8: in attention only
}

// ---- Elements as sums of bf16 terms ----------------------------------------------

inline Vec rounded(Vec x) {  // to bf16, as fp32
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

// x = part[0] + part[1] + ..., exactly with three (from 1e-33 up: bf16 flushes its denormals). An
// element that is not finite, or rounds to infinity in bf16, goes into the last part: that one is
// only multiplied by the other factor's first part, and a zero part times infinity would be NaN.
template <int terms>
inline void split(Vec x, Vec* part) {
  if constexpr (terms == 1) {
    part[0] = x;  // who stores it rounds
  } else {
    constexpr int kNotFinite = 0x99;  // NaNs and infinities
    part[0] = rounded(x);
    Vec rest = x - part[0];
    const __mmask16 finite = _knot_mask16(_mm512_fpclass_ps_mask(rest.v, kNotFinite));
    for (int t = 1; t < terms; ++t) {
      part[t] = {_mm512_maskz_mov_ps(finite, rounded(rest).v)};
      rest = rest - part[t];
    }
    part[terms - 1].v = _mm512_mask_mov_ps(part[0].v, finite, part[terms - 1].v);
    part[0].v = _mm512_maskz_mov_ps(finite, part[0].v);
  }
}

// 32 elements of each term, in bf16: the first sixteen from a, then from b.
template <int terms>
inline void split_pair(Vec a, Vec b, __m512i* out) {
  Vec first[terms], second[terms];
  split<terms>(a, first);
  split<terms>(b, second);
  for (int t = 0; t < terms; ++t) out[t] = bf16_pair(first[t], second[t]);
}

// Calls f<terms>() with the terms known to the compiler.
template <class F>
[[gnu::always_inline]] inline void with_terms(int terms, const F& f) {
  if (terms == 1)
    f.template operator()<1>();
  else if (terms == 2)
    f.template operator()<2>();
  else
    f.template operator()<3>();
}

// Of 32 columns of W, or 32 rows of A.
inline int64_t panel_bytes(int64_t K, int terms) {
  return ceil_div(K, kSteps) * terms * kPairBytes;
}

// Elements i .. i + 32 of an array as terms; those from i + n on are zero.
template <int terms>
[[gnu::always_inline]] inline void load_terms(DType type, const void* p, int64_t i, int64_t n,
                                              __m512i* out) {
  if (terms == 1 && type == DType::bf16) {
    const __mmask32 there = n >= 32 ? 0xffffffff : (1u << n) - 1;
    out[0] = _mm512_maskz_loadu_epi16(there, static_cast<const bf16*>(p) + i);
  } else {
    split_pair<terms>(load_as(type, p, i, n),
                      n > 16 ? load_as(type, p, i + 16, n - 16) : Vec::set(0), out);
  }
}

// ---- A ---------------------------------------------------------------------------

struct Left {
  char* data;
  int64_t K;
  int terms;

  static Left at(float* memory, int64_t K, Precision p) {
    return {reinterpret_cast<char*>(memory), K, terms_of(p)};
  }
  static int64_t floats(int64_t M, int64_t K, Precision p) {
    return ceil_div(M, kTileRows) * panel_bytes(K, terms_of(p)) / 4;
  }
  static bool reads_in_place(DType, int64_t) { return false; }
  static Left in_place(const void*, int64_t) { return {}; }
  static bool reads_transposed(DType, int64_t) { return false; }
  static Left transposed(const void*, int64_t) { return {}; }
  static Left of_scores(float*, int64_t K, float* memory, Precision p) { return at(memory, K, p); }

  const char* block(int64_t m) const { return data + m / kTileRows * panel_bytes(K, terms); }
  // Element (m, k) of the first term; the next terms follow, each after kPairBytes.
  [[gnu::always_inline]] char* at(int64_t m, int64_t k) const {
    return const_cast<char*>(block(m)) + k / kSteps * terms * kPairBytes + m / 16 % 2 * kTileBytes +
           m % 16 * kTileStride + k % kSteps * 2;
  }

  // Row m is written between open and close, at the address that open returns.
  float* open(int64_t, float* row) const { return row; }
  void close(int64_t m, const float* row, int64_t n) const {
    with_terms(terms, [&]<int kTerms>() __attribute__((always_inline)) {
      __m512i part[kTerms];
      for (int64_t k = 0; k < n; k += kSteps) {
        split_pair<kTerms>(Vec::load(row + k, n - k),
                           n - k > 16 ? Vec::load(row + k + 16, n - k - 16) : Vec::set(0), part);
        for (int t = 0; t < kTerms; ++t) _mm512_store_si512(at(m, k) + t * kPairBytes, part[t]);
      }
    });
  }
  // Row m, as the first of `from` is.
  [[gnu::always_inline]] void copy(int64_t m, const Rows& from) const {
    with_terms(terms, [&]<int kTerms>() __attribute__((always_inline)) {
      __m512i part[kTerms];
      for (int64_t k = 0; k < K; k += kSteps) {
        load_terms<kTerms>(from.dtype, from.data, k, K - k, part);
        for (int t = 0; t < kTerms; ++t) _mm512_store_si512(at(m, k) + t * kPairBytes, part[t]);
      }
    });
  }
  bool has_few_bits() const { return terms == 1; }
  // Columns k .. k + n of row m, k a multiple of 16. At the row's end its last tile is filled up.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const {
    write(m, k, n < 16 ? v.keep_first(n, 0) : v, 0, n);
  }
  // Rows from m on, the first of a block, of the columns k .. k + 32, two at a time: those of a
  // block lie one after the other. Only for kTerms terms.
  template <int kTerms, class Work>
  [[gnu::always_inline]] bool with_rows(int64_t m, int64_t k, const Work& work) const {
    if (terms != kTerms) return false;
    work([to = at(m, k)](const Pair& rows) mutable __attribute__((always_inline)) {
      for (int64_t r = 0; r < 2; ++r, to += kTileStride) {
        __m512i part[kTerms];
        split_pair<kTerms>(rows.v[r][0], rows.v[r][1], part);
        for (int t = 0; t < kTerms; ++t) _mm512_store_si512(to + t * kPairBytes, part[t]);
      }
    });
    return true;
  }
  // Columns k .. k + n of row m, for any k: a head's columns may start anywhere.
  void put(int64_t m, int64_t k, const float* from, int64_t n) const {
    if (terms == 1 && k % kSteps == 0 && n % kSteps == 0) {
      for (int64_t i = 0; i < n; i += kSteps) {
        _mm512_store_si512(at(m, k + i), bf16_pair(Vec::load(from + i), Vec::load(from + i + 16)));
      }
      return;
    }
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
  // Lanes [lane, lane + n) of x to the columns k + lane onwards; the other lanes of x are zero.
  void write(int64_t m, int64_t k, Vec x, int64_t lane, int64_t n) const {
    const bool last = k + lane + n >= K;
    const __mmask16 mask =
        static_cast<__mmask16>((last ? 0xffff : Vec::first(lane + n)) & ~((1u << lane) - 1));
    with_terms(terms, [&]<int kTerms>() __attribute__((always_inline)) {
      Vec part[kTerms];
      split<kTerms>(x, part);
      for (int t = 0; t < kTerms; ++t) {
        char* const to = at(m, k) + t * kPairBytes;
        const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(part[t].v));
        _mm256_mask_storeu_epi16(to, mask, half);
        if (last && k % kSteps == 0)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_setzero_si256());
      }
    });
  }
};

// ---- W ---------------------------------------------------------------------------

inline int64_t panel_floats(int64_t K, Precision p) { return panel_bytes(K, terms_of(p)) / 4; }
inline int64_t packed_bytes(int64_t N, int64_t K, Precision p) {
  return ceil_div(N, kNR) * panel_bytes(K, terms_of(p));
}

// Rows (n, K), of which the first 32 count, as a panel; the missing ones are zero.
template <int terms>
inline void pack_rows(const Rows& rows, int64_t n, int64_t K, char* panel) {
  for (int64_t k = 0; k < K; k += kSteps)
    for (int64_t half = 0; half < 2; ++half) {
      Vec part[terms][16];
      for (int64_t i = 0; i < 16; ++i) {
        __m512i elements[terms] = {};
        const int64_t j = half * 16 + i;
        if (j < n) load_terms<terms>(rows.dtype, rows.data, j * rows.stride + k, K - k, elements);
        for (int t = 0; t < terms; ++t) part[t][i] = {_mm512_castsi512_ps(elements[t])};
      }
      for (int t = 0; t < terms; ++t) {
        char* const tile = panel + (k / kSteps * terms + t) * kPairBytes + half * kTileBytes;
        transpose(part[t]);  // 16 columns x 16 pairs of steps -> the other way round
        for (int64_t i = 0; i < 16; ++i)
          part[t][i].store(reinterpret_cast<float*>(tile + i * kTileStride));
      }
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
template <int terms>
inline void pack_steps(const Rows& steps, int64_t n, int64_t columns, char* panel) {
  if (terms == 1 && steps.dtype == DType::bf16) return pack_pairs(steps, n, columns, panel);
  for (int64_t j = 0; j < round_up(n, kSteps); j += 2) {
    char* const pair = panel + j / kSteps * terms * kPairBytes + j % kSteps / 2 * kTileStride;
    for (int64_t e = 0; e < kNR; e += 16) {
      Vec even[terms], odd[terms];
      const auto load = [&](int64_t row) {
        if (row >= n || e >= columns) return Vec::set(0);
        return load_as(steps.dtype, steps.data, row * steps.stride + e, columns - e);
      };
      split<terms>(load(j), even);
      split<terms>(load(j + 1), odd);
      for (int t = 0; t < terms; ++t) {
        if constexpr (terms == 1) even[t] = rounded(even[t]), odd[t] = rounded(odd[t]);
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even[t].v), 16);
        const __m512i both = _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_castps_si512(odd[t].v));
        _mm512_store_si512(pair + t * kPairBytes + e / 16 * kTileBytes, both);
      }
    }
  }
}

// Panel `panel` of a weight that is not packed.
inline void convert_panel(const Weights& w, int64_t panel, char* out) {
  const int64_t row = w.first_row + panel * kNR, n = w.N - panel * kNR;
  const Rows data{w.dtype, w.data, w.pitch};
  with_terms(terms_of(w.precision), [&]<int terms>() {
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
inline PanelForm panel_form(Precision p) { return {"terms", kNR, kSteps, terms_of(p)}; }

// The other way round: the sum of an element's terms, which is exact with three of them.
constexpr bool kPacksSteps = false;  // pairs of steps are next to each other
constexpr DType kFactorDtype = DType::f32;
constexpr bool kUnpacks = true;
inline void unpack_panel(const Weights& w, int64_t panel, void* weight) {
  const int terms = terms_of(w.precision);
  const char* const from = static_cast<const char*>(w.data) + panel * panel_bytes(w.K, terms);
  for (int64_t j = 0; j < min(kNR, w.N - panel * kNR); ++j)
    for (int64_t k = 0; k < w.K; ++k) {
      const char* const at = from + k / kSteps * terms * kPairBytes + j / 16 * kTileBytes +
                             k % kSteps / 2 * kTileStride + j % 16 * 4 + k % 2 * 2;
      float sum = 0;
      for (int t = 0; t < terms; ++t) {
        uint16_t bits;
        memcpy(&bits, at + t * kPairBytes, 2);
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float term;
        memcpy(&term, &wide, 4);
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
  with_terms(terms_of(p),
             [&]<int terms>() { pack_rows<terms>(keys, n, E, reinterpret_cast<char*>(panel)); });
}

// Values (n, columns), of which the first kNR columns count, as the panel that softmax weights are
// multiplied by.
inline void pack_values(const Rows& values, int64_t n, int64_t columns, Precision p, float* panel) {
  with_terms(terms_of(p), [&]<int terms>() {
    pack_steps<terms>(values, n, columns, reinterpret_cast<char*>(panel));
  });
}

}  // namespace amx_tiles
}  // namespace
