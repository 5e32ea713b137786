// The backward kernels without Python, for ASan and UBSan, beside plain loops in double. What a
// forward would have saved (a norm's mean and 1/sigma, pre-activations) is drawn like the rest: the
// formulas hold for any.
#include "checks.hpp"
#include "matrix.hpp"

using namespace vitkern;

namespace native_test {
namespace {

double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }
double gelu_slope(double x) {
  return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
}

// The gradients of y = xhat * weight + bias by that of y, and y itself.
struct NormWant {
  Matrix dx, y;
  Doubles dweight, dbias;

  NormWant(const Matrix& dy, const Array& x, const Array& stats, const Array& w, const Array& b)
      : dx(dy), y(dy) {
    const int64_t D = dy.columns;
    const Matrix xhat = Matrix(x, dy.rows, D).mapped([&](double v, int64_t m, int64_t) {
      return (v - stats[2 * m]) * stats[2 * m + 1];
    });
    y = xhat.mapped([&](double v, int64_t, int64_t n) { return v * w[n] + b[n]; });
    dweight = dy.mapped([&](double v, int64_t m, int64_t n) { return v * xhat.at(m, n); }).sums();
    dbias = dy.sums();
    for (int64_t m = 0; m < dy.rows; ++m) {
      double mean = 0, slope = 0;
      for (int64_t n = 0; n < D; ++n) {
        mean += dy.at(m, n) * w[n] / static_cast<double>(D);
        slope += dy.at(m, n) * w[n] * xhat.at(m, n) / static_cast<double>(D);
      }
      for (int64_t n = 0; n < D; ++n)
        dx.at(m, n) = stats[2 * m + 1] * (dy.at(m, n) * w[n] - mean - xhat.at(m, n) * slope);
    }
  }
};

void test_layernorm(const Case& c, int64_t M, int64_t D) {
  Array grad(c.dtype, M * D), x(c.dtype, M * D), stats(DType::f32, 2 * M), w(DType::f32, D),
      b(DType::f32, D), onto(c.dtype, M * D);
  Array dx(c.dtype, M * D, false), dw(DType::f32, D, false), db(DType::f32, D, false),
      y(DType::f32, M * D, false);
  layernorm_backward(
      c.isa, {c.threads, c.dtype, c.dtype, grad.data(), x.data(), stats.f.data(), w.f.data(),
              b.f.data(), onto.data(), dx.data(), dw.f.data(), db.f.data(), y.f.data(), M, D, D});
  NormWant want(Matrix(grad, M, D), x, stats, w, b);
  for (int64_t i = 0; i < M * D; ++i) want.dx.v[i] += onto[i];
  check(c.name("layernorm_backward dx"), dx, want.dx.v);
  check(c.name("layernorm_backward dweight"), dw, want.dweight);
  check(c.name("layernorm_backward dbias"), db, want.dbias);
  check(c.name("layernorm_backward y"), y, want.y.v);
}

void test_norm_linear(const Case& c, int64_t M, int64_t K, int64_t N) {
  Array grad(c.dtype, M * N), x(c.dtype, M * K), stats(DType::f32, 2 * M), nw(DType::f32, K),
      nb(DType::f32, K), w(c.dtype, N * K), pre(c.dtype, M * N);
  Array dx(c.dtype, M * K, false), dnw(DType::f32, K, false), dnb(DType::f32, K, false),
      dw(c.dtype, N * K, false), db(DType::f32, N, false);
  norm_linear_backward(c.isa, {c.threads,
                               c.dtype,
                               c.dtype,
                               grad.data(),
                               x.data(),
                               stats.f.data(),
                               nw.f.data(),
                               nb.f.data(),
                               w.data(),
                               pre.data(),
                               dx.data(),
                               dnw.f.data(),
                               dnb.f.data(),
                               dw.data(),
                               db.f.data(),
                               M,
                               K,
                               N,
                               K,
                               Activation::gelu});
  const Matrix g = Matrix(grad, M, N).mapped([&](double v, int64_t m, int64_t n) {
    return v * gelu_slope(pre[m * N + n]);
  });
  const NormWant want(g * Matrix(w, N, K), x, stats, nw, nb);
  check(c.name("norm_linear_backward dx"), dx, want.dx.v);
  check(c.name("norm_linear_backward dnorm_weight"), dnw, want.dweight);
  check(c.name("norm_linear_backward dnorm_bias"), dnb, want.dbias);
  check(c.name("norm_linear_backward dweight"), dw, (g.transposed() * want.y).v);
  check(c.name("norm_linear_backward dbias"), db, g.sums());
}

// What y = residual + gamma * (x weight^T + bias) leaves, where g is the gradient of y.
struct BranchWant {
  Matrix scaled, dx, dweight;
  Doubles dgamma;

  BranchWant(const Matrix& g, const Matrix& x, const Matrix& w, const Array& b, const Array& gamma)
      : scaled(g.mapped([&](double v, int64_t, int64_t n) { return v * gamma[n]; })),
        dx(scaled * w),
        dweight(scaled.transposed() * x) {
    const Matrix y = x * w.transposed();
    dgamma =
        g.mapped([&](double v, int64_t m, int64_t n) { return v * (y.at(m, n) + b[n]); }).sums();
  }
};

void test_linear_residual(const Case& c, int64_t B, int64_t S, int64_t K, int64_t N) {
  const int64_t M = B * S;
  Array grad(c.dtype, M * N), x(c.dtype, M * K), w(c.dtype, N * K), b(DType::f32, N),
      gamma(DType::f32, N);
  Array dx(c.dtype, M * K, false), dw(c.dtype, N * K, false), db(DType::f32, N, false),
      dgamma(DType::f32, N, false);
  linear_residual_backward(c.isa, {c.threads,
                                   c.dtype,
                                   c.dtype,
                                   c.dtype,
                                   grad.data(),
                                   x.data(),
                                   w.data(),
                                   b.f.data(),
                                   gamma.f.data(),
                                   dx.data(),
                                   dw.data(),
                                   db.f.data(),
                                   dgamma.f.data(),
                                   B,
                                   S,
                                   K,
                                   N,
                                   K,
                                   kOff,
                                   kOff});
  const BranchWant want(Matrix(grad, M, N), Matrix(x, M, K), Matrix(w, N, K), b, gamma);
  check(c.name("linear_residual_backward dx"), dx, want.dx.v);
  check(c.name("linear_residual_backward dweight"), dw, want.dweight.v);
  check(c.name("linear_residual_backward dbias"), db, want.scaled.sums());
  check(c.name("linear_residual_backward dgamma"), dgamma, want.dgamma);
}

void test_mlp(const Case& c, int64_t B, int64_t S, int64_t D, int64_t F) {
  const int64_t M = B * S;
  Array grad(c.dtype, M * D), x(c.dtype, M * D), stats(DType::f32, 2 * M), pre(c.dtype, M * F),
      nw(DType::f32, D), nb(DType::f32, D), w1(c.dtype, F * D), w2(c.dtype, D * F),
      b2(DType::f32, D), gamma(DType::f32, D);
  Array dx(c.dtype, M * D, false), dnw(DType::f32, D, false), dnb(DType::f32, D, false),
      dw1(c.dtype, F * D, false), db1(DType::f32, F, false), dw2(c.dtype, D * F, false),
      db2(DType::f32, D, false), dgamma(DType::f32, D, false);
  mlp_backward(c.isa, {c.threads,
                       c.dtype,
                       c.dtype,
                       grad.data(),
                       x.data(),
                       stats.f.data(),
                       pre.data(),
                       nw.f.data(),
                       nb.f.data(),
                       w1.data(),
                       w2.data(),
                       b2.f.data(),
                       gamma.f.data(),
                       dx.data(),
                       dnw.f.data(),
                       dnb.f.data(),
                       dw1.data(),
                       db1.f.data(),
                       dw2.data(),
                       db2.f.data(),
                       dgamma.f.data(),
                       B,
                       S,
                       D,
                       F,
                       D,
                       Activation::gelu,
                       kOff,
                       kOff});
  const Matrix g(grad, M, D), inner(pre, M, F);
  const Matrix hidden = inner.mapped([](double v, int64_t, int64_t) { return gelu(v); });
  const BranchWant second(g, hidden, Matrix(w2, D, F), b2, gamma);
  const Matrix dpre = second.dx.mapped(
      [&](double v, int64_t m, int64_t n) { return v * gelu_slope(inner.at(m, n)); });
  NormWant first(dpre * Matrix(w1, F, D), x, stats, nw, nb);
  for (int64_t i = 0; i < M * D; ++i) first.dx.v[i] += grad[i];
  check(c.name("mlp_backward dx"), dx, first.dx.v);
  check(c.name("mlp_backward dnorm_weight"), dnw, first.dweight);
  check(c.name("mlp_backward dnorm_bias"), dnb, first.dbias);
  check(c.name("mlp_backward dfc1_weight"), dw1, (dpre.transposed() * first.y).v);
  check(c.name("mlp_backward dfc1_bias"), db1, dpre.sums());
  check(c.name("mlp_backward dfc2_weight"), dw2, second.dweight.v);
  check(c.name("mlp_backward dfc2_bias"), db2, second.scaled.sums());
  check(c.name("mlp_backward dgamma"), dgamma, second.dgamma);
}

void test_attention(const Case& c, int64_t B, int64_t S, int64_t H, int64_t E) {
  const float scale = 0.3f;
  Array grad(c.dtype, B * S * H * E), qkv(c.dtype, B * S * 3 * H * E), bias(DType::f32, H * S * S),
      dqkv(c.dtype, B * S * 3 * H * E, false);
  attention_backward(c.isa, {.threads = c.threads,
                             .dtype = c.dtype,
                             .grad = grad.data(),
                             .qkv = qkv.data(),
                             .bias = bias.f.data(),
                             .offsets = nullptr,
                             .dqkv = dqkv.data(),
                             .B = B,
                             .S = S,
                             .H = H,
                             .E = E,
                             .sequences = 1,
                             .b_stride = S * 3 * H * E,
                             .s_stride = 3 * H * E,
                             .part_stride = H * E,
                             .h_stride = E,
                             .bias_b_stride = 0,
                             .bias_h_stride = S * S,
                             .bias_s_stride = S,
                             .scale = scale,
                             .dropout = kOff});
  Doubles want(B * S * 3 * H * E);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h) {
      const auto place = [&](int64_t s, int64_t part, int64_t e) {
        return (((b * S + s) * 3 + part) * H + h) * E + e;
      };
      const auto part = [&](int64_t which) {
        return Matrix(S, E).mapped(
            [&](double, int64_t s, int64_t e) { return qkv[place(s, which, e)]; });
      };
      const Matrix q = part(0), k = part(1), v = part(2);
      const Matrix dy = Matrix(S, E).mapped(
          [&](double, int64_t s, int64_t e) { return grad[((b * S + s) * H + h) * E + e]; });
      Matrix p = (q * k.transposed()).mapped([&](double x, int64_t i, int64_t j) {
        return std::exp(x * scale + bias[(h * S + i) * S + j]);
      });
      Matrix ds = dy * v.transposed();
      for (int64_t i = 0; i < S; ++i) {
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < S; ++j) sum += p.at(i, j);
        for (int64_t j = 0; j < S; ++j) delta += (p.at(i, j) /= sum) * ds.at(i, j);
        for (int64_t j = 0; j < S; ++j) ds.at(i, j) = p.at(i, j) * (ds.at(i, j) - delta) * scale;
      }
      const Matrix of[] = {ds * k, ds.transposed() * q, p.transposed() * dy};
      for (int64_t which = 0; which < 3; ++which)
        for (int64_t s = 0; s < S; ++s)
          for (int64_t e = 0; e < E; ++e) want[place(s, which, e)] = of[which].at(s, e);
    }
  check(c.name("attention_backward"), dqkv, want);
}

void test_swiglu(const Case& c, int64_t M, int64_t F) {
  Array grad(c.dtype, M * F), x(c.dtype, M * 2 * F), dx(c.dtype, M * 2 * F, false);
  swiglu_backward(c.isa, {c.threads, c.dtype, grad.data(), x.data(), dx.data(), M, F, 2 * F});
  const Matrix want = Matrix(x, M, 2 * F).mapped([&](double, int64_t m, int64_t n) {
    const double gate = x[m * 2 * F + n % F], g = grad[m * F + n % F],
                 s = 1 / (1 + std::exp(-gate));
    return n < F ? g * x[m * 2 * F + F + n] * s * (1 + gate * (1 - s)) : g * gate * s;
  });
  check(c.name("swiglu_backward"), dx, want.v);
}

void test_hidden_rows(const Case& c, int64_t M, int64_t F) {
  Array pre(c.dtype, M * F), hidden(DType::f32, M * F, false), d(DType::f32, M * F),
      db(DType::f32, F, false);
  const Matrix want = Matrix(d, M, F).mapped(
      [&](double v, int64_t m, int64_t n) { return v * gelu_slope(pre[m * F + n]); });
  hidden_rows(c.isa, {c.threads, c.dtype, pre.data(), hidden.f.data(), d.f.data(), db.f.data(), M,
                      F, Activation::gelu, kOff});
  check(c.name("hidden_rows d"), d, want.v);
  check(c.name("hidden_rows dbias"), db, want.sums());
  check(c.name("hidden_rows hidden"), hidden,
        Matrix(pre, M, F).mapped([](double v, int64_t, int64_t) { return gelu(v); }).v);
}

void test_branch_rows(const Case& c, int64_t M, int64_t N) {
  Array x(DType::f32, M * N, false), gamma(DType::f32, N), grad(c.dtype, M * N),
      scaled(DType::f32, M * N, false);
  branch_rows(c.isa, {c.threads, c.dtype, x.f.data(), nullptr, gamma.f.data(), nullptr, nullptr,
                      grad.data(), scaled.f.data(), M, N, 1, N, kOff, kOff});
  const Matrix raw(grad, M, N);
  check(c.name("branch_rows x"), x, raw.v);
  check(c.name("branch_rows scaled"), scaled,
        raw.mapped([&](double v, int64_t, int64_t n) { return v * gamma[n]; }).v);
}

void test_patch_embed(const Case& c, int64_t B, int64_t C, int64_t Y, int64_t X, int64_t p,
                      int64_t D, int64_t T) {
  const int64_t gx = X / p, patches = Y / p * gx, P = C * p * p, S = T + patches;
  Array grad(c.dtype, B * S * D), image(c.dtype, B * C * Y * X);
  Array dw(c.dtype, D * P, false), db(DType::f32, D, false), dprefix(DType::f32, T * D, false),
      dposition(DType::f32, patches * D, false);
  patch_embed_backward(c.isa, {c.threads,
                               c.dtype,
                               c.dtype,
                               grad.data(),
                               image.data(),
                               nullptr,
                               nullptr,
                               dw.data(),
                               db.f.data(),
                               dprefix.f.data(),
                               dposition.f.data(),
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
  Matrix g(B * patches, D), pixels(B * patches, P);
  Doubles of_prefix(T * D), of_position(patches * D);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t s = 0; s < S; ++s) {
      const int64_t place = s - T, row = b * patches + place;
      for (int64_t d = 0; d < D; ++d) {
        const double v = grad[(b * S + s) * D + d];
        (s < T ? of_prefix[s * D + d] : of_position[place * D + d]) += v;
        if (s >= T) g.at(row, d) = v;
      }
      for (int64_t k = 0; s >= T && k < P; ++k)
        pixels.at(row, k) = image[((b * C + k / (p * p)) * Y + place / gx * p + k / p % p) * X +
                                  place % gx * p + k % p];
    }
  check(c.name("patch_embed_backward dweight"), dw, (g.transposed() * pixels).v);
  check(c.name("patch_embed_backward dbias"), db, g.sums());
  check(c.name("patch_embed_backward dprefix"), dprefix, of_prefix);
  check(c.name("patch_embed_backward dposition"), dposition, of_position);
}

}  // namespace

void test_gradients(const Case& c) {
  for (const int64_t M : {1, 17, 45}) {
    for (const int64_t D : {1, 15, 33, 130}) {
      test_layernorm(c, M, D);
      test_swiglu(c, M, D);
      test_hidden_rows(c, M, D);
      test_branch_rows(c, M, D);
    }
    test_norm_linear(c, M, 19, 37);
    test_norm_linear(c, M, 100, 3);
  }
  for (const int64_t B : {1, 3}) {
    test_linear_residual(c, B, 11, 67, 35);
    test_mlp(c, B, 9, 21, 70);
    test_attention(c, B, 13, 2, 5);
    test_patch_embed(c, B, 2, 9, 6, 3, 35, 2);
  }
  test_attention(c, 1, 290, 1, 40);  // more queries than a tile has
}

}  // namespace native_test
