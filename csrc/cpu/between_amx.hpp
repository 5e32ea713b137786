// What the vector units do while the tile unit multiplies a block: at each step of its K loop, two
// rows of the block before go through their epilogue, and memory is prefetched.
//
// All of it is in registers: an epilogue says once for a block where its rows go (with_pairs), and
// a step takes the next two. Called for each two rows with their place in the matrix, a step of fc1
// took 49 ns where it takes 45, and the tile unit alone 28.
#pragma once
#include "parallel.hpp"

namespace {
namespace amx_tiles {

// Panels of W that will be read soon: into L2, some lines at each step.
struct Fetch {
  const char* panel = nullptr;
  int64_t pitch = 0, bytes = 0, panels = 0;  // from panel to panel; of each; how many
  int64_t at = 0, lines = 0;

  [[gnu::always_inline]] void operator()() {
    if (panels <= 0) return;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(panel + at + i * 64, 0, 2);
    at += lines * 64;
    if (at < bytes) return;
    at = 0;
    panel += pitch;
    --panels;
  }
};

// Two rows of 32 columns, as floats.
struct Pair {
  Vec v[2][2];
};

// Rows of a block of sums, two after two, as they are.
struct FloatSums {
  static constexpr bool kScales = false;  // are as they lie there
  const float* c;
  [[gnu::always_inline]] Pair operator()() {
    constexpr int64_t L = Vec::kLanes;
    const float* const from = c;
    c += 4 * L;
    return {{{Vec::load(from), Vec::load(from + L)},
             {Vec::load(from + 2 * L), Vec::load(from + 3 * L)}}};
  }
};

// Where pairs of rows go, each call to the next two. The stride is in bytes.
struct FloatRows {
  char* to;
  int64_t stride;
  [[gnu::always_inline]] void operator()(const Pair& rows) {
    for (int64_t r = 0; r < 2; ++r, to += stride)
      for (int64_t i = 0; i < 2; ++i)
        rows.v[r][i].store(reinterpret_cast<float*>(to) + i * Vec::kLanes);
  }
};
struct Bf16Rows {
  char* to;
  int64_t stride;
  [[gnu::always_inline]] void operator()(const Pair& rows) {
    for (int64_t r = 0; r < 2; ++r, to += stride)
      _mm512_storeu_si512(to, bf16_pair(rows.v[r][0], rows.v[r][1]));
  }
};
// The same of a run-time dtype, or nowhere; the stride is in elements.
struct SavedRows {
  DType dtype;
  const void* to;
  int64_t stride;
  [[gnu::always_inline]] void operator()(const Pair& rows) {
    if (!to) return;
    char* const at = static_cast<char*>(const_cast<void*>(to));
    if (dtype == DType::f32)
      FloatRows{at, stride * 4}(rows);
    else
      Bf16Rows{at, stride * 2}(rows);
    to = offset(dtype, to, 2 * stride);
  }
};

// Memory that the rows of a block will touch: two lines of each.
struct RowLines {
  const char* at;
  int64_t stride;
  [[gnu::always_inline]] void operator()() {
    for (int64_t r = 0; r < 2; ++r, at += stride)
      __builtin_prefetch(at), __builtin_prefetch(at + 64);
  }
};
struct NoLines {
  void operator()() {}
};

// The work itself: `left` pairs of `sums` to `pairs`, some at each step, and lines of as many.
template <class Sums, class Pairs, class Lines>
struct Between {
  Sums sums;
  Pairs pairs;
  Lines lines;
  int64_t left, at_once;
  Fetch fetch;

  [[gnu::always_inline]] void operator()() {
    for (int64_t i = 0; i < at_once && left > 0; ++i) next();
    fetch();
  }
  [[gnu::always_inline]] void finish() {
    while (left > 0) next();
  }

 private:
  [[gnu::always_inline]] void next() {
    --left;
    pairs(sums);
    lines();
  }
};

// Nothing to do for rows, which may be prefetched all the same.
struct NoPairs {
  template <class Sums>
  void operator()(Sums&) {}
};

// Rows by an epilogue's general form: those that with_pairs leaves.
template <int64_t kNR, class Epilogue>
struct AnyPairs {
  const Epilogue& epilogue;
  int64_t m, end, n0, n;
  float* c;

  template <class Sums>
  [[gnu::noinline]] void operator()(Sums& sums) {
    const int64_t last = min(m + 2, end);
    if constexpr (Sums::kScales) FloatRows{reinterpret_cast<char*>(c), kNR * 4}(sums());
    finish_rows<kNR>(epilogue, {m, last}, n0, n, c);
    m = last;
    c += 2 * kNR;
  }
};

// The lines that the epilogue will touch at the block (m, n0), or none.
template <class Epilogue>
[[gnu::always_inline]] inline auto lines_of(const Epilogue& epilogue, int64_t m, int64_t n0) {
  if constexpr (requires { epilogue.lines(m, n0); })
    return epilogue.lines(m, n0);
  else
    return NoLines{};
}

}  // namespace amx_tiles
}  // namespace
