// The innermost loop of every tile without AMX: sums += A B, where the sums stay in registers.
//
//   A [kRows]: a unit of steps of each row, broadcast     4 bytes: fp32, two or four integers
//   B [kVectors] of columns: the same unit of each        one panel, or two side by side
//
// What a unit is and how it is multiplied a Kind says: Sum, Factor, zero(), load(p), broadcast(p),
// add(sum, x, y), kPanelVectors in a panel and kHeld, the vectors of B that stay in registers for
// all rows; the others are operands in memory, add(sum, x, p).
#pragma once
#include <type_traits>

#include "loops.hpp"

namespace {

// The rows of a tile of A, read in step. One pointer for four rows: [p], [p + s], [p + 2 s],
// [p + 3 s] are addressing modes, and 14 pointers are more than there are registers. (GCC keeps the
// others in vector registers, and fetching them costs a tenth of the multiply-adds' issue slots.)
template <int R>
struct TileReader {
  static constexpr int kPointers = (R + 3) / 4;
  const char* p[kPointers];
  int64_t s, s3;

  TileReader(const void* first, int64_t stride) : s(stride), s3(3 * stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      p[i] = static_cast<const char*>(first) + static_cast<int64_t>(4 * i) * stride;
      asm("" : "+r"(p[i]));  // each in a register of its own: GCC would compute them as a vector
    }
    asm("" : "+r"(s), "+r"(s3));  // the compiler must not make other multiples of them
  }
  const char* row(int r) const {
    const int part = r % 4;
    return p[r / 4] + (part == 3 ? s3 : part * s);
  }
  const char* at(int r, int unit) const { return row(r) + 4 * unit; }
  void advance_units(int64_t units) { advance(4 * units); }
  void advance(int64_t bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) {
      p[i] += bytes;
      asm("" : "+r"(p[i]));
    }
  }
};

// The same of the transpose of A, whose rows are next to each other.
struct TransposeReader {
  const char* p;
  int64_t s;

  TransposeReader(const void* first, int64_t stride)
      : p(static_cast<const char*>(first)), s(stride) {}
  const char* at(int r, int unit) const { return p + unit * s + 4 * r; }
  void advance_units(int64_t units) { p += units * s; }
};

template <int R, bool kTransposed>
using ReaderOfA = std::conditional_t<kTransposed, TransposeReader, TileReader<R>>;

// Of two panels each one's next unit; the second is not read by tiles of one.
struct PanelReader {
  const char *first, *second;

  template <class Kind>
  const char* at(int vector, int unit) const {
    constexpr int kOne = Kind::kPanelVectors;
    const char* const panel = vector < kOne ? first : second;
    return panel + (unit * kOne + vector % kOne) * sizeof(typename Kind::Factor);
  }
  template <class Kind>
  void advance_units(int64_t units) {
    const int64_t bytes = units * Kind::kPanelVectors * sizeof(typename Kind::Factor);
    first += bytes;
    second += bytes;
    asm("" : "+r"(first), "+r"(second));
  }
};

template <class Kind, int kVectors, int R, int kRoom, class Reader>
[[gnu::always_inline]] inline void add_unit(typename Kind::Sum (&sums)[R][kRoom], const Reader& a,
                                            const PanelReader& b, int unit) {
  constexpr int kHeld = kVectors < Kind::kHeld ? kVectors : Kind::kHeld;
  typename Kind::Factor held[kHeld];
#pragma GCC unroll 4
  for (int v = 0; v < kHeld; ++v) held[v] = Kind::load(b.at<Kind>(v, unit));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const typename Kind::Factor x = Kind::broadcast(a.at(r, unit));
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      if constexpr (kHeld == kVectors)
        sums[r][v] = Kind::add(sums[r][v], x, held[v]);
      else
        sums[r][v] = v < kHeld ? Kind::add(sums[r][v], x, held[v])
                               : Kind::add(sums[r][v], x, b.at<Kind>(v, unit));
  }
}

// `units` of them, from which on both readers are moved; two at a time, since moving them takes a
// sixth of a unit's instructions. Four at a time GCC has no registers for the addresses.
template <class Kind, int kVectors, int R, int kRoom, class Reader>
[[gnu::always_inline]] inline void add_units(typename Kind::Sum (&sums)[R][kRoom], Reader& a,
                                             PanelReader& b, int64_t units) {
  for (; units >= 2; units -= 2) {
#pragma GCC unroll 2
    for (int unit = 0; unit < 2; ++unit) add_unit<Kind, kVectors>(sums, a, b, unit);
    a.advance_units(2);
    b.advance_units<Kind>(2);
  }
  if (units > 0) {
    add_unit<Kind, kVectors>(sums, a, b, 0);
    a.advance_units(1);
    b.advance_units<Kind>(1);
  }
}

}  // namespace
