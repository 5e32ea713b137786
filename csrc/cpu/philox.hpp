// Dropout as a pure function of (seed, stream, element index): Philox-4x32-10, as in
// vitkern/philox.py.
#pragma once
#include <cstdint>

#include "kernels.hpp"

namespace {

using vitkern::Dropout;

enum Stream : uint32_t { kElements = 0, kPath = 1, kHidden = 2 };

struct PhiloxBlock {
  uint32_t word[4];
};

inline PhiloxBlock philox(uint64_t seed, uint32_t stream, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32),
           c2 = stream, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// x[i] is element first + i of its stream: times scale when kept, else 0.
inline void drop(const Dropout& d, uint32_t stream, uint64_t first, float* x, int64_t n) {
  if (!d.threshold) return;
  PhiloxBlock block{};
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t element = first + i;
    if (i == 0 || element % 4 == 0) block = philox(d.seed, stream, element / 4);
    x[i] = (block.word[element % 4] >> 8) >= d.threshold ? x[i] * d.scale : 0.0f;
  }
}

// What a sample's whole branch is multiplied by: 1 without drop-path, else scale or 0.
inline float path_factor(const Dropout& d, int64_t sample) {
  float factor = 1.0f;
  drop(d, kPath, sample, &factor, 1);
  return factor;
}

}  // namespace
