// Tiles of the AMX unit: bf16 products, fp32 sums. Included by gemm.hpp.
//
//   for each group of panels, about kGroupBytes   W's part stays in L2, the next one is prefetched
//     for each part of A, about kLeftBytes          stays in L2 for the whole group
//       for each block of 32 rows                     in L1 for the group: 48 KiB at K = 768
//         for each panel of 32 columns                  streamed past L1
//           for each 32 steps of K
//
//             B0 B1      tmm6 tmm7        four accumulators, four loads for four products; a panel
//         A0  C0 C1    4 tmm0 tmm1        with an odd number walks K backwards, so that it starts
//         A1  C2 C3    5 tmm2 tmm3        with the part of A that L1 still has
//
// The rows of one finished block go through the epilogue inside the next block's K loop, a few at
// each step: the vector units work while the tile unit does.
//
// A number is the sum of up to three bf16 terms (terms_amx.hpp). Products of terms that matter are
// added, the small ones over all of K before the large one:
//   bf16   hi hi
//   tf32   mid hi + hi hi + hi mid
//   fp32   lo hi + mid hi + mid mid + hi mid + hi lo, then hi hi
//
// A result depends on its own row of A and its column of W only: not on M, its tile or its thread.
#pragma once
#include "terms_amx.hpp"

namespace {
namespace amx_tiles {

constexpr int64_t kGroupBytes = 384 << 10;  // 8 panels of K = 768; with the next one and A, 1.4
constexpr int64_t kLeftBytes = 640 << 10;   //   of L2's 2 MiB
constexpr int64_t kMaxRows = 416;           // kLeftBytes at K = 768

// Rows of the engine's groups of images: two of 197 tokens fill 25 tiles in bf16.
inline int64_t group_rows(Precision p) { return 384 / terms_of(p); }
inline DType row_dtype(Precision p) { return p == Precision::bf16 ? DType::bf16 : DType::f32; }

// The MLP's hidden columns at a time: at most 768, so that those of hidden_rows stay in L2. They
// cut fc2's sum, so they depend on F alone.
inline int64_t hidden_columns(int64_t F) {
  constexpr int64_t kMost = 768;
  return min(F, round_up(ceil_div(F, max(ceil_div(F, kMost), 1)), kSteps));
}
inline int64_t hidden_rows(int64_t, Precision p, int) { return kMaxRows / terms_of(p) / 32 * 32; }

// ---- Products --------------------------------------------------------------------

// The products of one tile of steps: C += A[i] B[j] for (i, j) in the order of the header. `rows`
// is 1 or 2: tiles of rows. Only what differs from the last pair is loaded.
template <int rows, bool load_a, bool load_b>
inline void multiply_term(const char* a, const char* b) {
  if constexpr (load_b) tile_stream<6>(b);
  if constexpr (load_a) tile_load<4>(a);
  tile_dot<0, 4, 6>();
  if constexpr (load_b) tile_stream<7>(b + kTileBytes);
  tile_dot<1, 4, 7>();
  if constexpr (rows == 2) {
    if constexpr (load_a) tile_load<5>(a + kTileBytes);
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
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

// c (32 or 16 rows, 32) = or += `tiles` tiles of steps of a times a panel; between() runs at each.
template <int rows, int terms, class Between>
inline void multiply_tiles(const char* a, const char* b, int64_t tiles, bool backwards, float* c,
                           int64_t c_stride, bool add, Between& between) {
  const int64_t bytes = c_stride * 4, below = 16 * c_stride;
  if (add) {
    tile_load<0>(c, bytes);
    tile_load<1>(c + 16, bytes);
    if constexpr (rows == 2) {
      tile_load<2>(c + below, bytes);
      tile_load<3>(c + below + 16, bytes);
    }
  } else {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (rows == 2) {
      tile_zero<2>();
      tile_zero<3>();
    }
  }
  int64_t step = terms * kPairBytes;
  if (backwards) {
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
  tile_store<0>(c, bytes);
  tile_store<1>(c + 16, bytes);
  if constexpr (rows == 2) {
    tile_store<2>(c + below, bytes);
    tile_store<3>(c + below + 16, bytes);
  }
}

template <int terms, class Between>
inline void multiply_block(int64_t R, const char* a, const char* b, int64_t tiles, bool backwards,
                           float* c, int64_t c_stride, bool add, Between& between) {
  if (R > 16)
    multiply_tiles<2, terms>(a, b, tiles, backwards, c, c_stride, add, between);
  else
    multiply_tiles<1, terms>(a, b, tiles, backwards, c, c_stride, add, between);
}

// What the vector units do during a block's K loop: the rows of the block before it, and
// prefetches.
template <class Epilogue>
struct Meanwhile {
  const Epilogue& epilogue;
  int64_t m = 0, end = 0, n0 = 0, n = 0, at_once = 0;
  float* c = nullptr;
  const char* ahead = nullptr;  // of W, to be in L2 when its turn comes
  const char* ahead_end = nullptr;
  int64_t lines = 0;  // at each step

  void row() {
    epilogue(m++, n0, n, c);
    c += kNR;
  }
  void operator()() {
    for (int64_t i = 0; i < at_once && m < end; ++i) row();
    for (int64_t i = 0; i < lines && ahead < ahead_end; ++i, ahead += 64)
      __builtin_prefetch(ahead, 0, 2);
  }
  void finish() {
    while (m < end) row();
  }
};

constexpr int64_t kBlockFloats = kTileRows * kNR;

// Per thread, in floats: a group of converted panels, and two blocks of C.
inline int64_t gemm_scratch(int64_t, int64_t K, Precision p) {
  return max(kGroupBytes, panel_bytes(K, terms_of(p))) / 4 + 2 * kBlockFloats;
}

template <int terms, class Epilogue>
void gemm_terms(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
                const Epilogue& epilogue) {
  const int64_t tiles = ceil_div(w.K, kSteps), bytes = panel_bytes(w.K, terms);
  const int64_t pitch = w.packed ? panel_bytes(w.pitch, terms) : bytes;
  const int64_t group = max(1, kGroupBytes / max(bytes, 1)), M = rows.end - rows.begin;
  const int64_t part_rows = max(1, kLeftBytes / max(Left::block_bytes(w.K, terms), 1)) * kTileRows;
  const int64_t column = w.first_row / kNR;
  const char* const packed = static_cast<const char*>(w.data) + column * pitch +
                             w.first_step / kSteps * terms * kPairBytes;
  char* const converted = reinterpret_cast<char*>(scratch + 2 * kBlockFloats);
  Meanwhile<Epilogue> meanwhile{epilogue};
  float* c = scratch;
  for (int64_t first = panels.begin; first < panels.end; first += group) {
    const int64_t count = min(group, panels.end - first);
    const char* const b = w.packed ? packed + first * pitch : converted;
    if (w.packed) {
      const bool last = first + group >= panels.end;
      meanwhile.ahead = last ? static_cast<const char*>(w.next) : b + count * pitch;
      meanwhile.ahead_end = meanwhile.ahead ? meanwhile.ahead + count * bytes : nullptr;
      meanwhile.lines = min(8, ceil_div(bytes / 64, max(1, ceil_div(M, kTileRows) * tiles)));
    } else {
      for (int64_t p = 0; p < count; ++p) convert_panel(w, first + p, converted + p * bytes);
    }
    for (int64_t m0 = rows.begin; m0 < rows.end; m0 += part_rows)
      for (int64_t m = m0; m < min(rows.end, m0 + part_rows); m += kTileRows)
        for (int64_t p = 0; p < count; ++p) {
          const int64_t R = min(kTileRows, rows.end - m), n0 = (first + p) * kNR;
          const bool backwards = (column + first + p) % 2 != 0;
          multiply_block<terms>(R, A.block(m), b + p * pitch, tiles, backwards, c, kNR, false,
                                meanwhile);
          meanwhile.finish();
          meanwhile.m = m;
          meanwhile.end = m + R;
          meanwhile.n0 = n0;
          meanwhile.n = min(kNR, w.N - n0);
          meanwhile.at_once = ceil_div(kTileRows, max(tiles, 1));
          meanwhile.c = c;
          c = c == scratch ? scratch + kBlockFloats : scratch;
        }
  }
  meanwhile.finish();
}

// Rows [begin, end) of C for the panels [first, last), by one thread; begin is a multiple of
// kTileRows. epilogue(m, n0, n, c): c holds C[m][n0 .. n0 + n), n <= kNR, and may be overwritten.
template <class Epilogue>
void gemm_part(const Left& A, Range rows, const Weights& w, Range panels, float* scratch,
               const Epilogue& epilogue) {
  with_terms(A.terms,
             [&]<int terms>() { gemm_terms<terms>(A, rows, w, panels, scratch, epilogue); });
}

// c (R, kNR) = or += the first R <= kTileRows rows of a (R, K) times steps k0 .. k0 + K of a panel.
// Whole tiles of c are written.
inline void multiply_panel(const Left& a, int64_t R, const float* panel, int64_t k0, int64_t K,
                           float* c, int64_t c_stride, bool add) {
  const auto nothing = [] {};
  with_terms(a.terms, [&]<int terms>() {
    const char* const b = reinterpret_cast<const char*>(panel) + k0 / kSteps * terms * kPairBytes;
    multiply_block<terms>(R, a.data, b, ceil_div(K, kSteps), false, c, c_stride, add, nothing);
  });
}

}  // namespace amx_tiles
}  // namespace
