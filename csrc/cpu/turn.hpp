// Rotary positions of one head's row: its channels turned in pairs.
#pragma once
#include "parallel.hpp"

namespace {

// x (E) in place: (a, b) becomes (a cos - b sin, b cos + a sin), where b is E/2 channels after a
// (half) or the next one. table (E): E/2 cosines, then E/2 sines, which `sign` multiplies: -1 turns
// back. Compilers make vectors of both loops.
inline void turn(float* x, const float* table, int64_t E, bool half, float sign) {
  const int64_t pairs = E / 2;
  const float *const cosines = table, *const sines = table + pairs;
  if (half) {
    float *const first = x, *const second = x + pairs;
    for (int64_t e = 0; e < pairs; ++e) {
      const float a = first[e], b = second[e], c = cosines[e], s = sign * sines[e];
      first[e] = a * c - b * s;
      second[e] = b * c + a * s;
    }
  } else {
    for (int64_t e = 0; e < pairs; ++e) {
      const float a = x[2 * e], b = x[2 * e + 1], c = cosines[e], s = sign * sines[e];
      x[2 * e] = a * c - b * s;
      x[2 * e + 1] = b * c + a * s;
    }
  }
}

}  // namespace
