// The CPU kernels without Python, for ASan and UBSan: every instruction set, both storage types,
// odd sizes, and buffers of exactly the size a kernel may touch. The sums are compared with plain
// loops in double.
#include <cmath>

#include "checks.hpp"
#include "cpu/arena.hpp"
#include "cpu/packed.hpp"

using namespace vitkern;
using namespace native_test;

namespace {

Doubles normalised(const Array& x, const Array& w, const Array& b, int64_t M, int64_t D,
                   double eps) {
  Doubles y(M * D);
  for (int64_t m = 0; m < M; ++m) {
    double mean = 0, var = 0;
    for (int64_t i = 0; i < D; ++i) mean += x[m * D + i] / static_cast<double>(D);
    for (int64_t i = 0; i < D; ++i)
      var += std::pow(x[m * D + i] - mean, 2) / static_cast<double>(D);
    for (int64_t i = 0; i < D; ++i)
      y[m * D + i] = (x[m * D + i] - mean) / std::sqrt(var + eps) * w[i] + b[i];
  }
  return y;
}

template <class X>
Doubles matmul(const X& x, const Array& w, const Array& bias, int64_t M, int64_t N, int64_t K) {
  Doubles y(M * N);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      y[m * N + n] = bias[n];
      for (int64_t k = 0; k < K; ++k) y[m * N + n] += x[m * K + k] * w[n * K + k];
    }
  return y;
}

double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

void test_layernorm(const Case& c, int64_t M, int64_t D) {
  Array x(c.dtype, M * D), w(DType::f32, D), b(DType::f32, D), y(c.dtype, M * D, false),
      stats(DType::f32, 2 * M, false);
  layernorm(c.isa, {c.threads, c.dtype, x.data(), w.f.data(), b.f.data(), y.data(), stats.f.data(),
                    M, D, D, 1e-6f});
  check(c.name("layernorm"), y, normalised(x, w, b, M, D, 1e-6));
}

// A weight as an operator takes it: as it is, or in panels, from which it must come back.
struct Operand {
  std::unique_ptr<Packed> panels;
  const void* at;

  Operand(const Case& c, Array& w, int64_t N, int64_t K, bool packed) : at(w.data()) {
    if (!packed) return;
    panels = std::make_unique<Packed>(operator_layout(c.isa, c.dtype), c.dtype, at, N, K);
    at = panels->panels();
    Array back(c.dtype, N * K, false);
    expect(panels->unpack(c.dtype, back.data()) && back.f == w.f && back.h == w.h,
           c.name("unpack"));
  }
};

void test_norm_linear(const Case& c, int64_t M, int64_t K, int64_t N, bool packed) {
  Array x(c.dtype, M * K), nw(DType::f32, K), nb(DType::f32, K), w(c.dtype, N * K),
      b(DType::f32, N);
  Array y(c.dtype, M * N, false), pre(c.dtype, M * N, false), stats(DType::f32, 2 * M, false);
  const Operand weight(c, w, N, K, packed);
  norm_linear(c.isa, {c.threads, c.dtype, c.dtype, x.data(), nw.f.data(), nb.f.data(), weight.at,
                      packed, b.f.data(), y.data(), stats.f.data(), pre.data(), M, K, N, K, 1e-6f,
                      Activation::gelu});
  Doubles want = matmul(normalised(x, nw, nb, M, K, 1e-6), w, b, M, N, K);
  check(c.name("norm_linear pre"), pre, want);
  for (double& v : want) v = gelu(v);
  check(c.name("norm_linear"), y, want);
}

void test_linear_residual(const Case& c, int64_t B, int64_t S, int64_t K, int64_t N, bool packed) {
  const int64_t M = B * S;
  Array x(c.dtype, M * K), w(c.dtype, N * K), b(DType::f32, N), r(c.dtype, M * N), g(DType::f32, N);
  Array y(c.dtype, M * N, false);
  const Operand weight(c, w, N, K, packed);
  linear_residual(c.isa,
                  {c.threads, c.dtype, c.dtype, c.dtype, x.data(), weight.at, packed, b.f.data(),
                   r.data(), g.f.data(), y.data(), B, S, K, N, K, N, kOff, kOff});
  Doubles want = matmul(x, w, b, M, N, K);
  for (int64_t i = 0; i < M * N; ++i) want[i] = r[i] + g[i % N] * want[i];
  check(c.name("linear_residual"), y, want);
}

void test_mlp(const Case& c, int64_t B, int64_t S, int64_t D, int64_t F, bool packed) {
  const int64_t M = B * S;
  Array x(c.dtype, M * D), nw(DType::f32, D), nb(DType::f32, D), w1(c.dtype, F * D),
      b1(DType::f32, F);
  Array w2(c.dtype, D * F), b2(DType::f32, D), g(DType::f32, D), y(c.dtype, M * D, false);
  Array stats(DType::f32, 2 * M, false), pre(c.dtype, M * F, false);
  const Operand up(c, w1, F, D, packed), down(c, w2, D, F, packed);
  mlp(c.isa,
      {c.threads,        c.dtype, c.dtype, x.data(),    nw.f.data(), nb.f.data(), up.at,
       b1.f.data(),      down.at, packed,  b2.f.data(), g.f.data(),  y.data(),    stats.f.data(),
       pre.data(),       B,       S,       D,           F,           D,           1e-6f,
       Activation::gelu, kOff,    kOff});
  Doubles hidden = matmul(normalised(x, nw, nb, M, D, 1e-6), w1, b1, M, F, D);
  for (double& v : hidden) v = gelu(v);
  Doubles want = matmul(hidden, w2, b2, M, D, F);
  for (int64_t i = 0; i < M * D; ++i) want[i] = x[i] + g[i % D] * want[i];
  check(c.name("mlp"), y, want);
}

void test_attention(const Case& c, int64_t B, int64_t S, int64_t H, int64_t E) {
  Array qkv(c.dtype, B * S * 3 * H * E), bias(DType::f32, H * S * S),
      y(c.dtype, B * S * H * E, false);
  Array lse(DType::f32, B * H * S, false);
  attention(c.isa, {c.threads,
                    c.dtype,
                    qkv.data(),
                    bias.f.data(),
                    nullptr,
                    y.data(),
                    lse.f.data(),
                    B,
                    S,
                    H,
                    E,
                    1,
                    S * 3 * H * E,
                    3 * H * E,
                    H * E,
                    E,
                    0,
                    S * S,
                    S,
                    0.3f,
                    kOff});
  Doubles want(B * S * H * E), want_lse(B * H * S);
  const auto at = [&](int64_t b, int64_t s, int part, int64_t h, int64_t e) {
    return qkv[(((b * S + s) * 3 + part) * H + h) * E + e];
  };
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < S; ++i) {
        Doubles p(S);
        double sum = 0;
        for (int64_t j = 0; j < S; ++j) {
          for (int64_t e = 0; e < E; ++e) p[j] += at(b, i, 0, h, e) * at(b, j, 1, h, e);
          p[j] = std::exp(p[j] * 0.3f + bias[(h * S + i) * S + j]);
          sum += p[j];
        }
        want_lse[(b * H + h) * S + i] = std::log(sum);
        for (int64_t e = 0; e < E; ++e)
          for (int64_t j = 0; j < S; ++j)
            want[((b * S + i) * H + h) * E + e] += p[j] / sum * at(b, j, 2, h, e);
      }
  check(c.name("attention"), y, want);
  check(c.name("attention lse"), lse, want_lse);
}

void test_patch_embed(const Case& c, int64_t B, int64_t C, int64_t Y, int64_t X, int64_t p,
                      int64_t D, int64_t T, bool packed) {
  const int64_t gx = X / p, patches = Y / p * gx, P = C * p * p, S = T + patches;
  Array image(c.dtype, B * C * Y * X), w(c.dtype, D * P), b(DType::f32, D),
      prefix(DType::f32, T * D);
  Array position(DType::f32, patches * D), y(c.dtype, B * S * D, false);
  const Operand weight(c, w, D, P, packed);
  patch_embed(c.isa, {c.threads,
                      c.dtype,
                      c.dtype,
                      image.data(),
                      weight.at,
                      packed,
                      b.f.data(),
                      prefix.f.data(),
                      position.f.data(),
                      nullptr,
                      nullptr,
                      y.data(),
                      B,
                      C,
                      Y,
                      X,
                      p,
                      p,
                      D,
                      T,
                      C * Y * X,
                      Y * X,
                      X,
                      1,
                      kOff});
  Doubles want(B * S * D);
  for (int64_t n = 0; n < B; ++n)
    for (int64_t s = 0; s < S; ++s)
      for (int64_t d = 0; d < D; ++d) {
        double& v = want[(n * S + s) * D + d];
        if (s < T) {
          v = prefix[s * D + d];
          continue;
        }
        const int64_t py = (s - T) / gx * p, px = (s - T) % gx * p;
        v = b[d] + position[(s - T) * D + d];
        for (int64_t k = 0; k < P; ++k)
          v += image[((n * C + k / (p * p)) * Y + py + k / p % p) * X + px + k % p] * w[d * P + k];
      }
  check(c.name("patch_embed"), y, want);
}

// Nothing to compare a speed with, but each thread must report one and read no further than its
// part.
void test_calibrate(const Case& c) {
  std::vector<float> data(c.threads * 16 + 21, 1.0f);
  for (const float* read : {static_cast<float*>(nullptr), data.data()}) {
    std::vector<double> rates(c.threads, 0);
    const int64_t floats = read ? static_cast<int64_t>(data.size()) : 0;
    calibrate(c.isa, {c.threads, c.precision(), read, floats, 1e-4, rates.data()});
#if !defined(_OPENMP)
    rates.resize(1);  // the only thread there is
#endif
    for (const double rate : rates)
      expect(rate > 0 && rate < 1e15, c.name("calibrate") + ": a rate of " + std::to_string(rate));
  }
}

void test_pipes() {
  const auto two = [](const char* vendor, unsigned family, unsigned model) {
    return pairs_in_two_pipes(vendor, family, model);
  };
  expect(!two("GenuineIntel", 6, 0x3f) && !two("GenuineIntel", 6, 0x4f), "Haswell, Broadwell");
  expect(two("GenuineIntel", 6, 0x5e) && two("GenuineIntel", 6, 0x97), "Skylake, Alder Lake");
  expect(!two("AuthenticAMD", 0x17, 0x31) && two("AuthenticAMD", 0x19, 1), "Zen 2, Zen 3");
  expect(!two("HygonGenuine", 0x18, 1), "what is not known");
}

}  // namespace

int main() {
  test_fingerprint();
  test_schedule();
  test_pipes();
  for (const std::string& isa : available_isas()) {
    const int before = checks;
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int threads : {1, 3}) {
        const Case c{isa_named(isa), dtype, threads};
        for (const int64_t M : {0, 1, 17, 45})
          for (const int64_t D : {1, 15, 33, 130}) test_layernorm(c, M, D);
        for (const int64_t B : {0, 1, 3}) {
          test_attention(c, B, 13, 2, 5);
          test_engine(c, B);
        }
        for (const bool packed : {false, true}) {
          for (const int64_t M : {0, 1, 17, 45}) {
            test_norm_linear(c, M, 19, 37, packed);
            test_norm_linear(c, M, 300, 3, packed);
          }
          for (const int64_t B : {0, 1, 3}) {
            test_linear_residual(c, B, 11, 67, 35, packed);
            test_mlp(c, B, 9, 21, 70, packed);
            test_patch_embed(c, B, 2, 9, 6, 3, 35, 2, packed);
          }
        }
        test_attention(c, 1, 290, 1, 40);
        test_gradients(c);
        test_patch_embed(c, 1, 1, 5, 5, 5, 1, 0, false);
        test_engine(c, 7);
        test_mixed_sizes(c);
        test_calibrate(c);
        test_refusals(c);
        for (const int64_t M : {1, 15, 16, 17, 49})
          for (const int64_t K : {1, 7, 64, 65, 801}) test_int8(c, M, K, M + 16, K == 801);
        test_int8_refusals(c);
      }
    std::printf("%s: %d checks\n", isa.c_str(), checks - before);
  }
  arena_trim();
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return failures != 0;
}
