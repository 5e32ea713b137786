// The integer tiles of every instruction set against plain loops: not one bit may differ. The patch
// embedding of an engine without blocks is one linear layer, whose rows are the tokens.
#include <cmath>
#include <stdexcept>

#include "checks.hpp"
#include "cpu/engine.hpp"

using namespace vitkern;

namespace native_test {
namespace {

// One channel, patches of 1 x K pixels: token m is row m of the image times the weight (N, K).
EngineConfig one_layer(int64_t N, int64_t K) {
  return {1,
          1,
          K,
          N,
          1,
          1,
          0,
          1e-6f,
          Activation::gelu,
          false,
          0,
          false,
          Precision::int8,
          NormKind::layer,
          Order::pre_norm};
}

struct QuantisedRow {
  std::vector<int32_t> integers;
  float scale;
};

QuantisedRow quantised(const float* x, int64_t K) {
  float low = 0, high = 0;
  for (int64_t k = 0; k < K; ++k) low = std::fmin(low, x[k]), high = std::fmax(high, x[k]);
  QuantisedRow row{std::vector<int32_t>(static_cast<size_t>(K)), high / 255 - low / 255};
  if (!(row.scale >= 1e-30f)) return {row.integers, 0};
  const float inverse = 1 / row.scale, zero = std::rint(-low * inverse);
  for (int64_t k = 0; k < K; ++k) {
    const float q = std::rint(x[k] * inverse) + zero;
    row.integers[static_cast<size_t>(k)] =
        static_cast<int32_t>(std::fmin(std::fmax(q, 0.0f), 255.0f) - zero);
  }
  return row;
}

}  // namespace

// M rows of K elements times N columns; `largest` weights are as large as they may be.
void test_int8(const Case& c, int64_t M, int64_t K, int64_t N, bool largest) {
  Array image(DType::f32, M * K), y(DType::f32, M * N, false), scales(DType::f32, N);
  std::vector<signed char> weight(static_cast<size_t>(N * K));
  for (signed char& w : weight)  // four of one sign are at most 128
    w = static_cast<signed char>(largest ? (uniform() > 0 ? 32 : -32) : std::lrint(uniform() * 32));
  if (largest)
    for (size_t i = 0; i < weight.size() / 2; ++i) weight[i] = 32;
  Engine engine(c.isa, one_layer(N, K));
  engine.set_matrix("patch_embed.proj.weight", DType::i8, weight.data(), N, K, scales.f.data());
  engine.finish();
  engine.forward({.threads = c.threads,
                  .dtype = DType::f32,
                  .image = image.data(),
                  .B = 1,
                  .Y = M,
                  .X = K,
                  .strides = {M * K, M * K, K, 1},
                  .prefix = nullptr,
                  .T = 0,
                  .position = nullptr,
                  .mean = nullptr,
                  .std = nullptr,
                  .biases = {},
                  .turns = {},
                  .pool = Pool::tokens,
                  .head = false,
                  .y = y.f.data(),
                  .blocks = 0,
                  .norm = true,
                  .kept = {},
                  .norm_kept = false});
  bool same = true;
  for (int64_t m = 0; m < M; ++m) {
    const QuantisedRow row = quantised(image.f.data() + m * K, K);
    for (int64_t n = 0; n < N; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < K; ++k)
        sum += row.integers[static_cast<size_t>(k)] * weight[static_cast<size_t>(n * K + k)];
      const auto at = static_cast<size_t>(n);
      same &= y.f[static_cast<size_t>(m * N) + at] ==
              static_cast<float>(sum) * scales.f[at] * row.scale;
    }
  }
  expect(same, c.name("int8") + ": " + std::to_string(M) + " x " + std::to_string(K) + " x " +
                   std::to_string(N));
}

void test_int8_refusals(const Case& c) {
  const signed char integer = 1;
  const float scale = 1;
  const auto refused = [&](const char* what, DType dtype, const float* scales, int64_t K) {
    Engine engine(c.isa, one_layer(1, 1));
    bool threw = false;
    try {
      engine.set_matrix("patch_embed.proj.weight", dtype, &integer, 1, K, scales);
    } catch (const std::invalid_argument&) {
      threw = true;
    }
    expect(threw, c.name("int8") + " with " + what);
  };
  refused("another dtype", DType::u8, &scale, 1);
  refused("no scales", DType::i8, nullptr, 1);
  refused("sums beyond 32 bits", DType::i8, &scale, 66312);
}

}  // namespace native_test
