// calibrate: how fast this machine multiplies and reads, by loops of this instruction set alone.
//
// multiply: c[kRows][3] += a[kRows] * b[3] over elements in L1, the inner loop of a GEMM without
// its
//           memory traffic: 2 flops for each lane of a multiply-add. By tiles with AMX, where a
//           fp32 multiply-add takes six in bf16 and a tf32 one three; by pairs of integers where
//           the set has them.
// read:     every thread sums its own part of `data` again and again: the bytes of each pass.
//
// The team starts together after a warm pass; each thread counts its work until `seconds` are over
// by its own clock, so that one that is held up lowers its own rate and no other's.
#include <time.h>

#include "gemm.hpp"
#include "kernels.hpp"

namespace {

// Enough sums to hide the latency of a multiply-add (4 cycles, 2 a cycle: 8 sums), and no more than
// the registers hold beside 3 columns and 1 broadcast: 24 of 32 with AVX-512, 12 of 16 with AVX2.
// Without a fused multiply-add the result of the multiplication takes one more register.
constexpr int64_t kRows = Vec::kLanes == 16 ? 8 : Vec::kLanes == 8 ? 4 : 3;
constexpr int64_t kColumns = 3;
constexpr int64_t kDepth = 128;  // 24 KiB of b and 4 KiB of a with AVX-512: in an L1 of 32 KiB
constexpr int64_t kPasses = 32;  // between two looks at the clock: 10 to 20 us
constexpr int64_t kReadBlock = 1 << 16;  // floats between two looks: 256 KiB, 2 to 20 us

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Factors {
  alignas(64) float a[kDepth * kRows];
  alignas(64) float b[kDepth * kColumns * Vec::kLanes];

  // Uniform in [-1, 1): zeros and small integers toggle fewer wires and flatter the clock.
  explicit Factors(uint32_t seed) {
    fill(a, kDepth * kRows, seed);
    fill(b, kDepth * kColumns * Vec::kLanes, seed + 1);
  }
  static void fill(float* x, int64_t n, uint32_t state) {
    for (int64_t i = 0; i < n; ++i) {
      state = state * 1664525u + 1013904223u;
      x[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    }
  }
};

#if defined(VITKERN_INT8)

// A tile of the engine's own on a block of bytes: any bits will do.
int64_t multiply_bytes(const Factors& f, Vec& total) {
  constexpr int64_t kSteps = sizeof(f.b) / kNR / kRowBytes * kRowBytes;
  alignas(64) float c[kTileRows * kNR];
  for (int64_t pass = 0; pass < kPasses; ++pass)
    multiply_rows(kTileRows, {.a = reinterpret_cast<const char*>(f.a),
                              .a_stride = 0,
                              .block = reinterpret_cast<const char*>(f.b),
                              .steps = kSteps,
                              .c = c,
                              .add = false,
                              .ahead = {}});
  total = total + Vec::load(c);
  return kPasses * kTileRows * kNR * kSteps * 2;
}

#elif !defined(VITKERN_INT16) && !defined(VITKERN_BF16) && !defined(VITKERN_AMX)

// kPasses passes over the factors; returns their flops. The sums go into `total`, so that the
// compiler leaves no multiply-add out.
int64_t multiply(const Factors& f, Vec& total) {
  Vec c[kRows][kColumns];
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int64_t j = 0; j < kColumns; ++j) c[r][j] = Vec::set(0);
  for (int64_t pass = 0; pass < kPasses; ++pass)
    for (int64_t k = 0; k < kDepth; ++k) {
      Vec b[kColumns];
#pragma GCC unroll 3
      for (int64_t j = 0; j < kColumns; ++j)
        b[j] = Vec::load(f.b + (k * kColumns + j) * Vec::kLanes);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; ++r) {
        const Vec a = Vec::set(f.a[k * kRows + r]);
#pragma GCC unroll 3
        for (int64_t j = 0; j < kColumns; ++j) c[r][j] = fma(a, b[j], c[r][j]);
      }
    }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int64_t j = 0; j < kColumns; ++j) total = total + c[r][j];
  return kPasses * kDepth * kRows * kColumns * Vec::kLanes * 2;
}

#elif defined(VITKERN_INT16) || defined(VITKERN_BF16)

// The same on pairs of integers, or of bf16: any bits will do, and the floats' are as random as
// others.
int64_t multiply_pairs(const Factors& f, Vec& total) {
  Sums c[kRows][kColumns];
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int64_t j = 0; j < kColumns; ++j) c[r][j] = zero();
  for (int64_t pass = 0; pass < kPasses; ++pass)
    for (int64_t k = 0; k < kDepth; ++k) {
      const char* const b = reinterpret_cast<const char*>(f.b + k * kColumns * Vec::kLanes);
      const Ints held = load_ints(b);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; ++r) {
        const Ints a = broadcast(reinterpret_cast<const char*>(f.a + k * kRows + r));
        c[r][0] = Kind::add(c[r][0], a, held);
#pragma GCC unroll 3
        for (int64_t j = 1; j < kColumns; ++j)
          c[r][j] = Kind::add(c[r][j], a, b + j * sizeof(Ints));
      }
    }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int64_t j = 0; j < kColumns; ++j) total = total + to_floats(c[r][j]);
  return kPasses * kDepth * kRows * kColumns * Vec::kLanes * 4;
}

#elif defined(VITKERN_AMX)

// The same on tiles: c (32, 32) += a (32, 32) * b (32, 32), tiles 0-3 += 4, 5 times 6, 7. Four
// loads of 8 cycles hide behind four multiplications of 16.
constexpr int64_t kTileSteps = 8;  // 16 KiB of a and of b

struct TileFactors {
  static constexpr int64_t kTileElements = kTileSteps * 4 * kTileBytes / 2;
  alignas(64) uint16_t tiles[kTileElements];

  TileFactors(const Factors& f, bool halves) {  // random elements: their order does not matter
    constexpr int64_t kFrom = kDepth * kColumns * Vec::kLanes;
    for (int64_t i = 0; i < kTileElements; ++i) {
      const Vec x = Vec::set(f.b[i % kFrom]);
      const __m256i half = halves ? _mm512_cvtps_ph(x.v, _MM_FROUND_NO_EXC)
                                  : reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
      tiles[i] = static_cast<uint16_t>(_mm256_extract_epi16(half, 0));
    }
  }
};

template <bool halves>
int64_t multiply_tiles(const TileFactors& f) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t pass = 0; pass < kPasses; ++pass)
#pragma GCC unroll 1  // 32 addresses would not fit into the registers
    for (int64_t k = 0; k < kTileSteps; ++k) {
      const char* at = reinterpret_cast<const char*>(f.tiles) + k * 4 * kTileBytes;
      tile_load<4>(at), tile_load<6>(at + 2 * kTileBytes);
      tile_dot<halves, 0, 4, 6>();
      tile_load<7>(at + 3 * kTileBytes);
      tile_dot<halves, 1, 4, 7>();
      tile_load<5>(at + kTileBytes);
      tile_dot<halves, 2, 5, 6>(), tile_dot<halves, 3, 5, 7>();
    }
  return kPasses * kTileSteps * 4 * (16 * 16 * 32) * 2;
}

#endif

void read(const float* x, int64_t n, Vec& total) {
  constexpr int64_t kSums = 8;  // an addition takes 4 cycles, 2 start in each
  Vec sums[kSums];
#pragma GCC unroll 8
  for (int64_t j = 0; j < kSums; ++j) sums[j] = Vec::set(0);
  int64_t i = 0;
  for (; i + kSums * Vec::kLanes <= n; i += kSums * Vec::kLanes)
#pragma GCC unroll 8
    for (int64_t j = 0; j < kSums; ++j) sums[j] = sums[j] + Vec::load(x + i + j * Vec::kLanes);
  for (; i < n; i += Vec::kLanes) sums[0] = sums[0] + Vec::load(x + i, n - i);
#pragma GCC unroll 8
  for (int64_t j = 0; j < kSums; ++j) total = total + sums[j];
}

// work(total) does a little and says how much: once untimed by `warm`, then until the time is over.
template <class Warm, class Work>
double rate(const Team& team, double seconds, const Warm& warm, const Work& work) {
  Vec total = Vec::set(0);
  warm(total);
  team.sync();
  const double start = now();
  double done = 0, elapsed = 0;
  do {
    done += static_cast<double>(work(total));
    elapsed = now() - start;
  } while (elapsed < seconds);
  volatile float used = total.sum();  // the compiler may not leave the work out
  (void)used;
  return done / elapsed;
}

}  // namespace

namespace vitkern::VITKERN_ISA {

void calibrate(const calibrate_args& a) {
  run_team(a.threads, [&](const Team& team) {
    if (!a.data) {
      const Factors factors(static_cast<uint32_t>(2 * team.rank));
#if defined(VITKERN_INT8)
      const auto pass = [&](Vec& total) { return multiply_bytes(factors, total); };
#elif defined(VITKERN_AMX)
      const Terms terms = terms_of(a.precision);
      const TileFactors tiles(factors, terms.halves);
      const int pairs = terms.count * (terms.count + 1) / 2;  // 1, 3 or 6 GEMMs
      const auto pass = [&](Vec&) {
        return (terms.halves ? multiply_tiles<true>(tiles) : multiply_tiles<false>(tiles)) / pairs;
      };
#elif defined(VITKERN_INT16) || defined(VITKERN_BF16)
      const auto pass = [&](Vec& total) { return multiply_pairs(factors, total); };
#else
      const auto pass = [&](Vec& total) { return multiply(factors, total); };
#endif
      a.rates[team.rank] = rate(team, a.seconds, pass, pass);
      return;
    }
    const Range part = team.share(a.floats, 16);
    const auto all = [&](Vec& total) { read(a.data + part.begin, part.end - part.begin, total); };
    int64_t at = part.begin;
    const auto block = [&](Vec& total) {
      const int64_t n = min(kReadBlock, part.end - at);
      read(a.data + at, n, total);
      at = at + n == part.end ? part.begin : at + n;
      return n * static_cast<int64_t>(sizeof(float));
    };
    a.rates[team.rank] = rate(team, a.seconds, all, block);
  });
}

}  // namespace vitkern::VITKERN_ISA
