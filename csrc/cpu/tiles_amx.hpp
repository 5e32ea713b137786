// Tiles of the AMX unit: factors of bf16 or fp16, fp32 accumulators. Included by gemm.hpp.
//
//   for each group of panels, about kGroupBytes   W's part stays in L2, the next one is prefetched
//     for each block of 32 rows of A                in L1 for the group: 48 KiB of bf16 at K = 768
//       for each panel of 32 columns                  streamed past L1
//         for each 32 steps of K
//
//             B0 B1      tmm6 tmm7        four accumulators, four loads for four multiplications;
//         A0  C0 C1    4 tmm0 tmm1        odd panels walk K backwards, so that they start with the
//         A1  C2 C3    5 tmm2 tmm3        part of A that L1 still has
//
// The rows of one finished block go through the epilogue inside the next block's K loop, a few at
// each step: the vector units work while the tile unit does.
//
// An element is the sum of up to three terms (split_amx.hpp). Of the pairs of terms those that
// matter are multiplied and added:
//   bf16, 1   hi hi
//   bf16, 2   mid hi + hi hi + hi mid
//   bf16, 3   lo hi + mid hi + mid mid + hi mid + hi lo, then, after all of K, hi hi
//   fp16, 1   hi hi
//   fp16, 2   lo hi + hi hi + hi lo
// A tile adds 32 steps up before it rounds to the sum of those before: K / 32 roundings, three
// times as many where the terms are not apart. Where K is long its parts are added up by vectors.
//
// A result depends on its own row of A and its column of W only: not on M, its tile or its thread.
#pragma once
#include "multiply_amx.hpp"

namespace {
namespace amx_tiles {

constexpr int64_t kGroupBytes = 208 << 10;  // 4 panels at K = 768, beside the next 4 and A in L2
constexpr int64_t kMaxRows = 448;           // rows of A, of one term: two images

// Rows of the engine's groups of images: two of 197 tokens fill 25 tiles in bf16.
inline int64_t group_rows(Precision p) { return 384 / terms_of(p).count; }
inline DType row_dtype(Precision p) { return p == Precision::bf16 ? DType::bf16 : DType::f32; }

// The MLP's hidden columns at a time: at most 768, so that those of hidden_rows stay in L2 (624 KiB
// of bf16). They cut fc2's sum, so they depend on F alone.
inline int64_t hidden_columns(int64_t F) {
  constexpr int64_t kMost = 768;
  return min(F, round_up(ceil_div(F, max(ceil_div(F, kMost), 1)), kSteps));
}
inline int64_t hidden_rows(int64_t, Precision p, int) {
  return kMaxRows / terms_of(p).count / 32 * 32;
}

// ---- Blocks of C -----------------------------------------------------------------

// A block of C, (rows, n): row m onwards of the columns from n0. By fp16: what its sums are to be
// multiplied by.
struct Block {
  int64_t m, rows, n0, n;
  float* c;
  const float* of_rows = nullptr;
  Vec of_columns[2] = {};

  void scale_by(const Scales& rows, const Scales& columns) {
    of_rows = rows.inverse;
    of_columns[0] = Vec::load(columns.inverse);
    of_columns[1] = Vec::load(columns.inverse + Vec::kLanes);
  }
};

// Rows of a block, two after two, times their factors.
struct ScaledSums {
  static constexpr bool kScales = true;
  FloatSums sums;
  const float* of_rows;
  Vec of_columns[2];

  explicit ScaledSums(const Block& b)
      : sums{b.c}, of_rows(b.of_rows), of_columns{b.of_columns[0], b.of_columns[1]} {}
  [[gnu::always_inline]] Pair operator()() {
    Pair rows = sums();
    for (auto& row : rows.v) {
      const Vec by = Vec::set(*of_rows++);
      for (int64_t i = 0; i < 2; ++i) row[i] = row[i] * of_columns[i] * by;
    }
    return rows;
  }
};

constexpr int64_t kBlockFloats = kTileRows * kNR;

// Per thread, in floats: a group of converted panels, and two blocks of C.
inline int64_t gemm_scratch(int64_t, int64_t K, Precision p) {
  return max(kGroupBytes, panel_bytes(K, terms_of(p))) / 4 + 2 * kBlockFloats;
}

inline const char* packed_panel(const Weights& w, int64_t panel) {
  const Terms terms = terms_of(w.precision);
  return static_cast<const char*>(w.data) +
         (w.first_row / kNR + panel) * panel_bytes(w.pitch, terms) +
         w.first_step / kSteps * terms.count * kPairBytes;
}

// What an element of A W^T + bias can be at most in row m of A, by Cauchy and Schwarz; W is packed.
class ProductBound {
 public:
  ProductBound(const Weights& w, const float* bias) {
    const Terms terms = terms_of(w.precision);
    Vec most = Vec::set(0);
    for (int64_t panel = 0; panel < ceil_div(w.N, kNR); ++panel) {
      const Scales& scales = scales_of(packed_panel(w, panel), w.K, terms);
      for (int64_t i = 0; i < kNR; i += 16) most = greater(Vec::load(scales.norm + i), most);
    }
    weight_ = most.largest();
    if (bias) bias_ = largest_magnitude(bias, w.N);
  }
  float operator()(const Left& A, int64_t m) const { return A.norm(m) * weight_ + bias_; }

 private:
  float weight_, bias_ = 0;
};

inline int64_t panels_in_group(int64_t bytes) { return max(1, kGroupBytes / max(bytes, 1)); }

// The panels [first, last) of a packed weight, a group of them at most.
inline Fetch group_of(const Weights& w, int64_t first, int64_t last) {
  const Terms terms = terms_of(w.precision);
  const int64_t bytes = tile_bytes(w.K, terms);
  return {packed_panel(w, first), panel_bytes(w.pitch, terms), bytes,
          min(panels_in_group(bytes), last - first)};
}

// Of a GEMM whose K is cut into parts: sums over the parts so far, in blocks as tiles store them.
//
//   [32 rows of C][panel][32 rows][32 columns]
//
// Accumulators start with them, but for three terms of bf16, where the small pairs are added first,
// to nothing larger: there the vector units add the parts.
template <class Last>
struct PartEpilogue {
  const Last& last;  // of the sum over all parts
  float* sums;
  int64_t panels;
  Precision precision;
  bool is_first, is_last;

  bool by_tiles() const { return terms_of(precision).count < 3; }
  float* block(int64_t m, int64_t n0) const {
    return sums + (m / kTileRows * panels + n0 / kNR) * kBlockFloats;
  }
  // Where a block's accumulators come from, and where they go.
  Result from(const Block& b) const { return {block(b.m, b.n0), kNR, by_tiles() && !is_first}; }
  Block to(const Block& b) const {
    if (is_last || !by_tiles()) return b;
    return {b.m, 0, b.n0, 0, block(b.m, b.n0)};  // no rows for the epilogue
  }

  template <auto kTerms, class Work>
  [[gnu::always_inline]] bool with_pairs(int64_t m, int64_t n0, const Work& work) const {
    return by_tiles() && last.template with_pairs<kTerms>(m, n0, work);
  }
  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    if (add_rows(m, n0, c)) last(m, n0, n, c);
  }
  // The next block's sums.
  RowLines lines(int64_t m, int64_t n0) const {
    return {reinterpret_cast<const char*>(block(m, n0) + kBlockFloats), kNR * 4};
  }

 private:
  // Adds what the tile unit did not: to c for the last part, and else to the sums.
  bool add_rows(int64_t m, int64_t n0, float* c) const {
    if (by_tiles()) return true;
    float* const sum = block(m, n0) + m % kTileRows * kNR;
    for (int64_t i = 0; i < kNR; i += Vec::kLanes) {
      const Vec v = Vec::load(c + i);
      (is_first ? v : Vec::load(sum + i) + v).store((is_last ? c : sum) + i);
    }
    return is_last;
  }
};

inline int64_t part_floats(int64_t M, int64_t N) {
  return ceil_div(M, kTileRows) * ceil_div(N, kNR) * kBlockFloats;
}
template <class Last>
PartEpilogue<Last> part_epilogue(const Last& last, Precision p, float* sums, int64_t N,
                                 bool is_first, bool is_last) {
  return {last, sums, ceil_div(N, kNR), p, is_first, is_last};
}

// The blocks of C that a thread makes: each is multiplied while the one before it goes through its
// epilogue.
template <Terms terms, class Epilogue>
struct Blocks {
  const Epilogue& epilogue;
  float* c;         // the sums of two blocks
  int64_t at_once;  // pairs of rows at a step: 1, or more where steps are few
  Fetch fetch = {};
  Block before = {};

  // of_rows, of_columns: of fp16, else null.
  void next(int64_t m, int64_t R, int64_t n0, int64_t n, const Steps& steps, const Scales* of_rows,
            const Scales* of_columns) {
    Block now{m, R, n0, n, before.c == c ? c + kBlockFloats : c};
    Result from{now.c, kNR, false};
    if constexpr (requires { epilogue.from(now); }) {  // a part of K
      from = epilogue.from(now);
      now = epilogue.to(now);
    }
    if constexpr (terms.halves) now.scale_by(*of_rows, *of_columns);
    const Result to{now.c, kNR, false};
    const auto run = [&](const auto& pairs, int64_t count) {
      const auto lines = lines_of(epilogue, m, n0);
      const Between work{sums(), pairs, lines, count, at_once, fetch};
      fetch = multiply_between<terms>(R, steps, from, to, work);
    };
    if (before.rows == 0)
      run(NoPairs{}, kTileRows / 2);
    else if (!with_pairs([&](const auto& pairs) { run(pairs, before.rows / 2); }))
      run(any_pairs(), ceil_div(before.rows, 2));
    else if (before.rows % 2)
      finish_last_row();
    before = now;
  }
  void finish() {
    if (before.rows == 0) return;
    scale_rows(0);
    finish_rows<kNR>(epilogue, {before.m, before.m + before.rows}, before.n0, before.n, before.c);
  }

 private:
  auto sums() const {
    if constexpr (terms.halves)
      return ScaledSums(before);
    else
      return FloatSums{before.c};
  }
  // Where no step takes the sums: rows from r on, an even number, in place.
  void scale_rows(int64_t r) const {
    if constexpr (terms.halves) {
      Block rest = before;
      rest.c += r * kNR, rest.of_rows += r;
      ScaledSums sums(rest);
      FloatRows to{reinterpret_cast<char*>(rest.c), kNR * 4};
      for (; r < before.rows; r += 2) to(sums());
    }
  }
  template <class Work>
  bool with_pairs(const Work& work) const {
    if constexpr (requires { epilogue.template with_pairs<terms>(before.m, before.n0, work); })
      return before.n == kNR && epilogue.template with_pairs<terms>(before.m, before.n0, work);
    else
      return false;
  }
  AnyPairs<kNR, Epilogue> any_pairs() const {
    return {epilogue, before.m, before.m + before.rows, before.n0, before.n, before.c};
  }
  void finish_last_row() const {
    const int64_t r = before.rows - 1, m = before.m + r;
    scale_rows(r);
    finish_rows<kNR>(epilogue, {m, m + 1}, before.n0, before.n, before.c + r * kNR);
  }
};

template <Terms terms, class Epilogue>
void gemm_terms(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
                const Epilogue& epilogue) {
  const int64_t tiles = ceil_div(w.K, kSteps), bytes = panel_bytes(w.K, terms);
  const int64_t group = panels_in_group(bytes);
  const int64_t pitch = w.packed ? panel_bytes(w.pitch, terms) : bytes;
  const int64_t blocks = ceil_div(rows.end - rows.begin, kTileRows);
  Weights whole = w;  // all of its steps: panels' scales come after them
  if (w.packed) whole.first_step = 0, whole.K = w.pitch;
  char* const converted = reinterpret_cast<char*>(scratch + 2 * kBlockFloats);
  Blocks<terms, Epilogue> work{epilogue, scratch, ceil_div(kTileRows / 2, max(tiles, 1))};
  for (int64_t first = panels.begin; first < panels.end; first += group) {
    const int64_t count = min(group, panels.end - first), last = first + count;
    const char* const b = w.packed ? packed_panel(w, first) : converted;
    if (!w.packed)
      for (int64_t p = 0; p < count; ++p) convert_panel(w, first + p, converted + p * bytes);
    if (w.packed && last < panels.end) {
      work.fetch = group_of(w, last, panels.end);
    } else if (w.packed && w.next) {  // this thread's share of it begins about there
      const int64_t all = ceil_div(w.next->N, kNR);
      work.fetch = group_of(*w.next, panels.begin * all / ceil_div(w.N, kNR), all);
    }
    Fetch& fetch = work.fetch;
    fetch.lines = min(8, ceil_div(fetch.panels * fetch.bytes / 64, max(1, blocks * count * tiles)));
    for (int64_t m = rows.begin; m < rows.end; m += kTileRows)
      for (int64_t p = first; p < last; ++p) {
        const bool backwards = (w.first_row / kNR + p) % 2 != 0;
        const char* const panel = b + (p - first) * pitch;
        const Scales *of_rows = nullptr, *of_columns = nullptr;
        if constexpr (terms.halves) {
          of_rows = &A.scales(m);
          of_columns = &scales_of(w.packed ? packed_panel(whole, p) : panel, whole.K, terms);
        }
        work.next(m, min(kTileRows, rows.end - m), p * kNR, min(kNR, w.N - p * kNR),
                  {A.block(m), panel, tiles, backwards}, of_rows, of_columns);
      }
  }
  work.finish();
}

// Rows [begin, end) of C for the panels [first, last), by one thread; begin is a multiple of
// kTileRows. epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  with_gemm_terms(A.terms,
                  [&]<Terms terms>() { gemm_terms<terms>(A, rows, w, panels, scratch, epilogue); });
}

// c (R, kNR) = or += the first R <= kTileRows rows of a (R, K) times the steps [steps) of a panel,
// inside attention. Whole tiles of c are written.
inline void multiply_panel(const Left& a, int64_t R, const float* panel, Range steps, Result to) {
  const auto nothing = [] {};
  const int64_t tiles = ceil_div(steps.end - steps.begin, kSteps);
  with_head_terms(a.terms, [&]<Terms terms>() {
    const char* const b =
        reinterpret_cast<const char*>(panel) + steps.begin / kSteps * terms.count * kPairBytes;
    multiply_block<terms>(R, {a.data, b, tiles, false}, to, to, nothing);
  });
}

}  // namespace amx_tiles
}  // namespace
