// exp, erf and the activations on a vector. Constants are minimax fits (tools/fit_math.py prints
// them again).
#pragma once
#include <cfloat>

#include "simd.hpp"

namespace {

using vitkern::Activation;

// e^x: x = n ln2 + r, |r| <= ln2 / 2, a polynomial of degree 6 in r (3e-9), then 2^n. NaN stays
// NaN.
inline Vec exp(Vec x) {
  // Inf and 0 beyond; NaN passes as second operand.
  x = lesser(Vec::set(89.0f), greater(Vec::set(-104.0f), x));
  const Vec n = nearest(x * Vec::set(1.44269504f));
  Vec r = fma(n, Vec::set(-0.693359375f), x);  // ln2 in two parts, the first exact in 9 bits
  r = fma(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(0.001381459878757596f);
  p = fma(p, r, Vec::set(0.008368716575205326f));
  p = fma(p, r, Vec::set(0.04166838899254799f));
  p = fma(p, r, Vec::set(0.1666652113199234f));
  p = fma(p, r, Vec::set(0.4999999403953552f));
  p = fma(p * r, r, r) + Vec::set(1.0f);
  return scaled(p, n);
}

#if defined(__AVX2__)

// What scores differ by from their maximum, d <= 0, to the weights of a softmax: e^(d * scale), and
// 0 below 2^-126.5. NaN stays NaN.
//
// d * scale / ln2 = n + r, |r| <= 1/2, then a polynomial of degree 6 in r (2e-9), times 2^n. Half
// the instructions of exp: 1.5 * 2^23 in the sum leaves n in its lowest bits, with the exponent's
// offset already added, and there is no other end of the range. Several vectors in step: each
// instruction waits for the one before it, and a scheduler holds few that wait.
class SoftmaxPower {
 public:
  explicit SoftmaxPower(float scale)
      : factor_(Vec::set(scale * 1.44269504f)),
        lowest_(Vec::set(scale > 0 ? -127 / (scale * 1.44269504f) : -INFINITY)) {}

  template <int N>
  void operator()(Vec (&d)[N]) const {
    constexpr float coefficients[] = {0.0013398887822404504f, 0.009618437848985195f,
                                      0.055503323674201965f,  0.24022647738456726f,
                                      0.6931471824645996f,    1.0f};
    const Vec shift = Vec::set(12582912.0f + 127);
    Vec shifted[N], p[N];
    const auto each = [](const auto& f) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) f(i);
    };
    each([&](int i) { d[i] = greater(lowest_, d[i]); });
    each([&](int i) { shifted[i] = fma(d[i], factor_, shift); });
    each([&](int i) { d[i] = fma(d[i], factor_, shift - shifted[i]); });
    each([&](int i) { p[i] = Vec::set(0.00015353351773228496f); });
    for (const float c : coefficients) each([&](int i) { p[i] = fma(p[i], d[i], Vec::set(c)); });
    each([&](int i) { d[i] = p[i] * low_bits_as_exponent(shifted[i]); });
  }

 private:
  Vec factor_, lowest_;
};

#else

// The same by exp: without fused multiply-adds r is not exact enough.
class SoftmaxPower {
 public:
  explicit SoftmaxPower(float scale) : scale_(Vec::set(scale)) {}

  template <int N>
  void operator()(Vec (&d)[N]) const {
    for (int i = 0; i < N; ++i) d[i] = exp(d[i] * scale_);
  }

 private:
  Vec scale_;
};

#endif

// erf(x), error 6.4e-8: x + x P(x^2) below 0.925, 1 - e^-Q(|x|) above; exactly +-1 from 4 on.
inline Vec erf(Vec x) {
  const Vec a = magnitude(x), t = x * x;
  Vec p = Vec::set(-0.0005976588581688702f);
  p = fma(p, t, Vec::set(0.004990412387996912f));
  p = fma(p, t, Vec::set(-0.026764754205942154f));
  p = fma(p, t, Vec::set(0.1128176599740982f));
  p = fma(p, t, Vec::set(-0.37612488865852356f));
  p = fma(p, t, Vec::set(0.12837915122509003f));
  const Vec b = lesser(Vec::set(4.0f), a);
  Vec q = Vec::set(0.00019547487318050116f);
  q = fma(q, b, Vec::set(-0.003038679249584675f));
  q = fma(q, b, Vec::set(0.022208819165825844f));
  q = fma(q, b, Vec::set(-0.10389401763677597f));
  q = fma(q, b, Vec::set(-0.6372250914573669f));
  q = fma(q, b, Vec::set(-1.1276501417160034f));
  q = fma(q, b, Vec::set(-0.00020184644381515682f));
  const Vec far = with_sign(Vec::set(1.0f) - exp(q), x);
  return select_less(a, Vec::set(0.925f), fma(p, x, x), far);
}

// tanh(x): an odd polynomial below 0.65 (7e-9), 1 - 2 / (1 + e^2|x|) with x's sign above.
inline Vec tanh(Vec x) {
  const Vec one = Vec::set(1.0f), a = magnitude(x), t = x * x;
  Vec p = Vec::set(-0.0055151632986962795f);
  p = fma(p, t, Vec::set(0.02046941965818405f));
  p = fma(p, t, Vec::set(-0.05368802323937416f));
  p = fma(p, t, Vec::set(0.1333083063364029f));
  p = fma(p, t, Vec::set(-0.3333325982093811f));
  const Vec far = with_sign(one - Vec::set(2.0f) / (one + exp(a + a)), x);
  return select_less(a, Vec::set(0.65f), fma(p * t, x, x), far);
}

#if defined(__AVX512F__)

// A function of t >= 0 that is constant from 6 on, by 32 quartics of equal width; NaN as from 6 on.
[[gnu::always_inline]] inline Vec by_quartics(const float (&table)[5][32], Vec t) {
  const Vec place = lesser(t, Vec::set(5.99999f)) * Vec::set(32.0f / 6);
  const __m512i i = _mm512_cvttps_epi32(place.v);
  const Vec u = place - Vec{_mm512_cvtepi32_ps(i)};
  const auto look_up = [&](int power) {
    const float* const row = table[power];
    return Vec{_mm512_permutex2var_ps(_mm512_load_ps(row), i, _mm512_load_ps(row + 16))};
  };
  Vec p = look_up(4);
  p = fma(p, u, look_up(3));
  p = fma(p, u, look_up(2));
  p = fma(p, u, look_up(1));
  return fma(p, u, look_up(0));
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|): the second part from a table, error 3e-8. Half the
// instructions of erf's. -inf gives NaN as PyTorch's formula does.
[[gnu::always_inline]] inline Vec gelu(Vec x) {
  alignas(64) static const float kTable[5][32] = {
#include "gelu_table.inc"
  };
  const Vec a = magnitude(x), half = Vec::set(0.5f);
  return fma(a, half, x * half) + by_quartics(kTable, a);
}

// The same for results that are rounded to bf16 or to fewer bits: x / 2 + (|x| / 2 - |x|
// Phi(-|x|)), error 1.4e-5, in half the instructions. An infinite x stays what it is.
[[gnu::always_inline]] inline Vec short_gelu(Vec x) {
  alignas(64) static const float kTable[3][32] = {
#include "gelu_short_table.inc"
  };
  constexpr int kLesserSize = 0x0a;  // vrangeps: the lesser of both magnitudes, positive
  constexpr float kWhole = 1 << 23;  // a number added to it is rounded, into the lowest bits
  const Vec t{_mm512_range_ps(x.v, _mm512_set1_ps(FLT_MAX), kLesserSize)};
  const Vec place = fma(t, Vec::set(30.5f / 4.6f), Vec::set(kWhole));
  const __m512i i = _mm512_castps_si512(lesser(place, Vec::set(kWhole + 31)).v);
  const auto look_up = [&](int power) __attribute__((always_inline)) {
    const float* const row = kTable[power];
    return Vec{_mm512_permutex2var_ps(_mm512_load_ps(row), i, _mm512_load_ps(row + 16))};
  };
  return fma(x, Vec::set(0.5f), fma(fma(look_up(2), t, look_up(1)), t, look_up(0)));
}

#else

inline Vec gelu(Vec x) {
  return x * Vec::set(0.5f) * (Vec::set(1.0f) + erf(x * Vec::set(0.70710678f)));
}

#endif

inline Vec gelu_tanh(Vec x) {  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
  const Vec one = Vec::set(1.0f);
  const Vec u = x * fma(x * x, Vec::set(0.044715f), one) * Vec::set(-2 * 0.79788456f);
  return x / (one + exp(u));
}

// work(f), where f(Vec) is the activation of that name: known to the compiler in loops of work.
template <class Work>
inline auto with_activation(Activation name, const Work& work) {
  switch (name) {
    case Activation::none:
      break;
    case Activation::gelu:
      return work([](Vec x) __attribute__((always_inline)) { return gelu(x); });
    case Activation::gelu_tanh:
      return work([](Vec x) __attribute__((always_inline)) { return gelu_tanh(x); });
    case Activation::quick_gelu:
      return work([](Vec x) __attribute__((always_inline)) {
        return x / (Vec::set(1.0f) + exp(x * Vec::set(-1.702f)));
      });
    case Activation::silu:
      return work([](Vec x) __attribute__((always_inline)) {
        return x / (Vec::set(1.0f) + exp(Vec::set(0) - x));
      });
    case Activation::tanh:
      return work([](Vec x) __attribute__((always_inline)) { return tanh(x); });
  }
  return work([](Vec x) __attribute__((always_inline)) { return x; });
}

inline Vec activate(Activation name, Vec x) {
  return with_activation(name, [&](const auto& activated) { return activated(x); });
}

}  // namespace
