// Activations with their slopes, for the backward kernels.
#pragma once
#include "math.hpp"

namespace {

struct ValueAndSlope {
  Vec value, slope;
};

#if defined(__AVX512F__)

// The slope of x Phi(x) is T(|x|) below zero and 1 - T(|x|) above, where T(t) = Phi(-t) - t phi(t)
// comes from a table of quartics as the value does (the fit's error is 4e-8), without an
// exponential and a quotient.
inline ValueAndSlope gelu_with_slope(Vec x) {
  alignas(64) static const float kTable[5][32] = {
#include "gelu_slope_table.inc"
  };
  const Vec tail = by_quartics(kTable, magnitude(x));
  const Vec wrong = x * Vec::set(0);  // NaN of NaN and of infinities, as x phi(x) is
  return {gelu(x), select_less(x, Vec::set(0), tail, Vec::set(1.0f) - tail) + wrong};
}

#else

// Phi(-a) for a >= 0, where e = e^(-a^2 / 2) is known: e t P(t) with t = 1 / (1 + 0.35 a), error
// 1e-8 (tools/fit_math.py).
inline Vec normal_tail(Vec a, Vec e) {
  const Vec one = Vec::set(1.0f), t = one / fma(a, Vec::set(0.35f), one);
  Vec p = Vec::set(0.03208461031317711f);
  p = fma(p, t, Vec::set(-0.12606698274612427f));
  p = fma(p, t, Vec::set(0.09900572896003723f));
  p = fma(p, t, Vec::set(0.12243156880140305f));
  p = fma(p, t, Vec::set(0.07927267998456955f));
  p = fma(p, t, Vec::set(0.1558007150888443f));
  p = fma(p, t, Vec::set(0.13747169077396393f));
  return p * t * e;
}

inline ValueAndSlope gelu_with_slope(Vec x) {  // Phi(x) + x phi(x)
  const Vec e = exp(x * x * Vec::set(-0.5f)), tail = normal_tail(magnitude(x), e);
  const Vec below = select_less(x, Vec::set(0), tail, Vec::set(1.0f) - tail);
  return {x * below, fma(x * e, Vec::set(0.39894228f), below)};
}

#endif

// s(z) = 1 / (1 + e^-z), and s(z) s(-z), its derivative, without the cancellation of 1 - s.
struct Logistic {
  Vec value, slope;
  explicit Logistic(Vec z) {
    const Vec one = Vec::set(1.0f), e = exp(Vec::set(0) - magnitude(z)), r = one / (one + e);
    value = select_less(z, Vec::set(0), e * r, r);
    slope = e * r * r;
  }
};

inline ValueAndSlope gelu_tanh_with_slope(Vec x) {
  constexpr float kScale = 2 * 0.79788456f, kCube = 0.044715f;
  const Vec one = Vec::set(1.0f), square = x * x;
  const Logistic s(x * fma(square, Vec::set(kCube), one) * Vec::set(kScale));
  const Vec inner = fma(square, Vec::set(3 * kCube), one) * Vec::set(kScale);
  return {x * s.value, fma(x * s.slope, inner, s.value)};
}

inline ValueAndSlope quick_gelu_with_slope(Vec x) {
  const Logistic s(x * Vec::set(1.702f));
  return {x * s.value, fma(x * s.slope, Vec::set(1.702f), s.value)};
}

inline ValueAndSlope silu_with_slope(Vec x) {
  const Logistic s(x);
  return {x * s.value, fma(x, s.slope, s.value)};
}

// 1 - t^2, where it does not cancel; 2 s(2x) - 1 has the same slope.
inline ValueAndSlope tanh_with_slope(Vec x) {
  const Vec t = tanh(x), far = Logistic(x + x).slope * Vec::set(4.0f);
  return {t, select_less(magnitude(t), Vec::set(0.5f), Vec::set(1.0f) - t * t, far)};
}

// work(f), where f(Vec) is the activation of that name with its slope, as with_activation.
template <class Work>
inline auto with_slope(Activation name, const Work& work) {
  switch (name) {
    case Activation::none:
      break;
    case Activation::gelu:
      return work([](Vec x) { return gelu_with_slope(x); });
    case Activation::gelu_tanh:
      return work([](Vec x) { return gelu_tanh_with_slope(x); });
    case Activation::quick_gelu:
      return work([](Vec x) { return quick_gelu_with_slope(x); });
    case Activation::silu:
      return work([](Vec x) { return silu_with_slope(x); });
    case Activation::tanh:
      return work([](Vec x) { return tanh_with_slope(x); });
  }
  return work([](Vec x) { return ValueAndSlope{x, Vec::set(1.0f)}; });
}

}  // namespace
