// Tiles of the AMX unit: bf16 factors, fp32 accumulators. Included by gemm.hpp.
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
// An element is the sum of up to three bf16 terms (terms_amx.hpp). Of the pairs of terms those that
// matter are multiplied and added; hi hi, the largest, comes last, after all of K:
//   bf16   hi hi
//   tf32   mid hi + hi hi + hi mid
//   fp32   lo hi + mid hi + mid mid + hi mid + hi lo, then hi hi
//
// A result depends on its own row of A and its column of W only: not on M, its tile or its thread.
#pragma once
#include "between_amx.hpp"
#include "terms_amx.hpp"

namespace {
namespace amx_tiles {

constexpr int64_t kGroupBytes = 192 << 10;  // 4 panels at K = 768, beside the next 4 and A in L2
constexpr int64_t kMaxRows = 416;           // rows of A: 25 tiles of two images; 624 KiB at K = 768

// Rows of the engine's groups of images: two of 197 tokens fill 25 tiles in bf16.
inline int64_t group_rows(Precision p) { return 384 / terms_of(p); }
inline DType row_dtype(Precision p) { return p == Precision::bf16 ? DType::bf16 : DType::f32; }

// The MLP's hidden columns at a time: at most 768, so that those of hidden_rows stay in L2 (624 KiB
// of bf16). They cut fc2's sum, so they depend on F alone.
inline int64_t hidden_columns(int64_t F) {
  constexpr int64_t kMost = 768;
  return min(F, round_up(ceil_div(F, max(ceil_div(F, kMost), 1)), kSteps));
}
inline int64_t hidden_rows(int64_t, Precision p, int) { return kMaxRows / terms_of(p) / 32 * 32; }

// ---- Multiplication --------------------------------------------------------------

// C += A[i] B[j] for one tile of steps and one pair of terms (i, j). `rows` is 1 or 2: tiles of
// rows. A factor that is the same as for the pair before is not loaded again. All loads come before
// the multiplications: a GEMM is a tenth slower with each load just before its first use.
template <int rows, bool load_a, bool load_b>
inline void multiply_term(const char* a, const char* b) {
  if constexpr (load_b) tile_stream<6>(b), tile_stream<7>(b + kTileBytes);
  if constexpr (load_a) tile_load<4>(a);
  if constexpr (load_a && rows == 2) tile_load<5>(a + kTileBytes);
  tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>();
  if constexpr (rows == 2) tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
}

template <int rows, int terms>
inline void multiply_step(const char* a, const char* b) {
  constexpr int64_t hi = 0, mid = kPairBytes, lo = 2 * kPairBytes;
  if constexpr (terms == 1) {
    multiply_term<rows, true, true>(a, b);
  } else if constexpr (terms == 2) {
    multiply_term<rows, true, true>(a + mid, b + hi);
    multiply_term<rows, true, false>(a + hi, b + hi);
    multiply_term<rows, false, true>(a + hi, b + mid);
  } else {
    multiply_term<rows, true, true>(a + lo, b + hi);
    multiply_term<rows, true, false>(a + mid, b + hi);
    multiply_term<rows, false, true>(a + mid, b + mid);
    multiply_term<rows, true, false>(a + hi, b + mid);
    multiply_term<rows, false, true>(a + hi, b + lo);
  }
}

// Tiles of steps of A and of a panel of W, and whether they are walked from the last to the first.
struct Steps {
  const char *a, *b;
  int64_t tiles;
  bool backwards;
};

// The accumulators: zero, or what is in c (32 or 16 rows, 32) already.
template <int rows>
[[gnu::always_inline]] inline void begin_tiles(const Result& from) {
  const int64_t bytes = from.stride * 4, below = 16 * from.stride;
  if (from.add) {
    tile_load<0>(from.c, bytes), tile_load<1>(from.c + 16, bytes);
    if constexpr (rows == 2)
      tile_load<2>(from.c + below, bytes), tile_load<3>(from.c + below + 16, bytes);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (rows == 2) tile_zero<2>(), tile_zero<3>();
  }
}
template <int rows>
[[gnu::always_inline]] inline void store_tiles(const Result& to) {
  const int64_t bytes = to.stride * 4, below = 16 * to.stride;
  tile_store<0>(to.c, bytes), tile_store<1>(to.c + 16, bytes);
  if constexpr (rows == 2)
    tile_store<2>(to.c + below, bytes), tile_store<3>(to.c + below + 16, bytes);
}

// The steps of A times those of a panel, added to what `from` says, to `to`: 32 or 16 rows of 32
// columns. between() runs at each step.
template <int rows, int terms, class Between>
inline void multiply_tiles(const Steps& steps, const Result& from, const Result& to,
                           Between& between) {
  const char *a = steps.a, *b = steps.b;
  const int64_t tiles = steps.tiles;
  begin_tiles<rows>(from);
  int64_t step = terms * kPairBytes;
  if (steps.backwards && tiles) {
    a += (tiles - 1) * step;
    b += (tiles - 1) * step;
    step = -step;
  }
  for (int64_t k = 0; k < tiles; ++k, a += step, b += step) {
    multiply_step<rows, terms>(a, b);
    between();
  }
  if constexpr (terms == 3)  // hi hi last, and back the way it came
    for (int64_t k = 0; k < tiles; ++k) {
      a -= step;
      b -= step;
      multiply_term<rows, true, true>(a, b);
    }
  store_tiles<rows>(to);
}

template <int terms, class Between>
inline void multiply_block(int64_t R, const Steps& steps, const Result& from, const Result& to,
                           Between& between) {
  if (R > 16)
    multiply_tiles<2, terms>(steps, from, to, between);
  else
    multiply_tiles<1, terms>(steps, from, to, between);
}

// The same, not inlined: so all that `work` is has registers. Returns what is left to fetch.
template <int terms, class Between>
[[gnu::always_inline]] inline Fetch multiply_between(int64_t R, const Steps& steps,
                                                     const Result& from, const Result& to,
                                                     const Between& work) {
  Between between = work;
  multiply_block<terms>(R, steps, from, to, between);
  between.finish();
  return between.fetch;
}

// A block of C, (rows, n): row m onwards of the columns from n0.
struct Block {
  int64_t m, rows, n0, n;
  float* c;
};

constexpr int64_t kBlockFloats = kTileRows * kNR;

// Per thread, in floats: a group of converted panels, and two blocks of C.
inline int64_t gemm_scratch(int64_t, int64_t K, Precision p) {
  return max(kGroupBytes, panel_bytes(K, terms_of(p))) / 4 + 2 * kBlockFloats;
}

inline const char* packed_panel(const Weights& w, int64_t panel) {
  const int terms = terms_of(w.precision);
  return static_cast<const char*>(w.data) +
         (w.first_row / kNR + panel) * panel_bytes(w.pitch, terms) +
         w.first_step / kSteps * terms * kPairBytes;
}

inline int64_t panels_in_group(int64_t bytes) { return max(1, kGroupBytes / max(bytes, 1)); }

// The panels [first, last) of a packed weight, a group of them at most.
inline Fetch group_of(const Weights& w, int64_t first, int64_t last) {
  const int terms = terms_of(w.precision);
  const int64_t bytes = panel_bytes(w.K, terms);
  return {packed_panel(w, first), panel_bytes(w.pitch, terms), bytes,
          min(panels_in_group(bytes), last - first)};
}

// Of a GEMM whose K is cut into parts: sums over the parts so far, in blocks as tiles store them.
//
//   [32 rows of C][panel][32 rows][32 columns]
//
// Accumulators start with them, but for fp32: there the small pairs of terms are added first, to
// nothing larger, and the vector units add the parts.
template <class Last>
struct PartEpilogue {
  const Last& last;  // of the sum over all parts
  float* sums;
  int64_t panels;
  Precision precision;
  bool is_first, is_last;

  bool by_tiles() const { return terms_of(precision) < 3; }
  float* block(int64_t m, int64_t n0) const {
    return sums + (m / kTileRows * panels + n0 / kNR) * kBlockFloats;
  }
  // Where a block's accumulators come from, and where they go.
  Result from(const Block& b) const { return {block(b.m, b.n0), kNR, by_tiles() && !is_first}; }
  Block to(const Block& b) const {
    if (is_last || !by_tiles()) return b;
    return {b.m, 0, b.n0, 0, block(b.m, b.n0)};  // no rows for the epilogue
  }

  template <int kTerms, class Work>
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
template <int terms, class Epilogue>
struct Blocks {
  const Epilogue& epilogue;
  float* c;         // the sums of two blocks
  int64_t at_once;  // pairs of rows at a step: 1, or more where steps are few
  Fetch fetch = {};
  Block before = {};

  void next(int64_t m, int64_t R, int64_t n0, int64_t n, const Steps& steps) {
    Block now{m, R, n0, n, before.c == c ? c + kBlockFloats : c};
    Result from{now.c, kNR, false};
    if constexpr (requires { epilogue.from(now); }) {  // a part of K
      from = epilogue.from(now);
      now = epilogue.to(now);
    }
    const Result to{now.c, kNR, false};
    const auto run = [&](const auto& pairs, int64_t count) {
      const auto lines = lines_of(epilogue, m, n0);
      const Between work{FloatSums{before.c}, pairs, lines, count, at_once, fetch};
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
    if (before.rows)
      finish_rows<kNR>(epilogue, {before.m, before.m + before.rows}, before.n0, before.n, before.c);
  }

 private:
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
    finish_rows<kNR>(epilogue, {m, m + 1}, before.n0, before.n, before.c + r * kNR);
  }
};

template <int terms, class Epilogue>
void gemm_terms(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
                const Epilogue& epilogue) {
  const int64_t tiles = ceil_div(w.K, kSteps), bytes = panel_bytes(w.K, terms);
  const int64_t group = panels_in_group(bytes);
  const int64_t pitch = w.packed ? panel_bytes(w.pitch, terms) : bytes;
  const int64_t blocks = ceil_div(rows.end - rows.begin, kTileRows);
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
        work.next(m, min(kTileRows, rows.end - m), p * kNR, min(kNR, w.N - p * kNR),
                  {A.block(m), b + (p - first) * pitch, tiles, backwards});
      }
  }
  work.finish();
}

// Rows [begin, end) of C for the panels [first, last), by one thread; begin is a multiple of
// kTileRows. epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  with_terms(A.terms,
             [&]<int terms>() { gemm_terms<terms>(A, rows, w, panels, scratch, epilogue); });
}

// c (R, kNR) = or += the first R <= kTileRows rows of a (R, K) times the steps [steps) of a panel.
// Whole tiles of c are written.
inline void multiply_panel(const Left& a, int64_t R, const float* panel, Range steps, Result to) {
  const auto nothing = [] {};
  const int64_t tiles = ceil_div(steps.end - steps.begin, kSteps);
  with_terms(a.terms, [&]<int terms>() {
    const char* const b =
        reinterpret_cast<const char*>(panel) + steps.begin / kSteps * terms * kPairBytes;
    multiply_block<terms>(R, {a.data, b, tiles, false}, to, to, nothing);
  });
}

}  // namespace amx_tiles
}  // namespace
