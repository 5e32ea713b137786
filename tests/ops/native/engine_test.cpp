// The engine and what it refuses, without Python: on exact buffers a bad call that were let through
// would be a report of ASan or UBSan.
#include "cpu/engine.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checks.hpp"
#include "cpu/fingerprint.hpp"
#include "cpu/schedule.hpp"

using namespace vitkern;

namespace native_test {
namespace {

constexpr int64_t C = 3, p = 4, Y = 12, X = 8, D = 30, H = 3, F = 50, T = 2, kClasses = 7,
                  kDepth = 2, kPatches = Y / p * (X / p), S = T + kPatches;

constexpr float kElements[4] = {1, 2, 3, 4};

EngineConfig config(const Case& c) {
  return {C,
          p,
          p,
          D,
          H,
          F,
          kDepth,
          1e-6f,
          Activation::gelu,
          false,
          0,
          false,
          c.precision(),
          NormKind::layer,
          Order::pre_norm};
}

// A tiny ViT of random weights, not finished.
void fill(Engine& engine) {
  const auto matrix = [&](const std::string& name, int64_t N, int64_t K) {
    Array w(DType::f32, N * K), b(DType::f32, N);
    engine.set_matrix(name + ".weight", DType::f32, w.data(), N, K);
    engine.set_vector(name + ".bias", b.f.data(), N);
  };
  const auto norm = [&](const std::string& name, int64_t n) {
    Array w(DType::f32, n), b(DType::f32, n);
    engine.set_vector(name + ".weight", w.f.data(), n);
    engine.set_vector(name + ".bias", b.f.data(), n);
  };
  matrix("patch_embed.proj", D, C * p * p);
  for (int64_t i = 0; i < kDepth; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    norm(at + "norm1", D), norm(at + "norm2", D), norm(at + "attn.q_norm", D / H),
        norm(at + "attn.k_norm", D / H);
    matrix(at + "attn.qkv", 3 * D, D), matrix(at + "attn.proj", D, D);
    matrix(at + "mlp.fc1", F, D), matrix(at + "mlp.fc2", D, F);
  }
  norm("norm", D), matrix("head", kClasses, D);
}

// The buffers of a forward, each of exactly its size.
struct Buffers {
  Array image, prefix, position, bias, y;

  explicit Buffers(int64_t B)
      : image(DType::f32, B * C * Y * X),
        prefix(DType::f32, T * D),
        position(DType::f32, kPatches * D),
        bias(DType::f32, H * S * S),
        y(DType::f32, B * kClasses, false) {}

  EngineInput input(const Case& c, int64_t B) {
    return {.threads = c.threads,
            .dtype = DType::f32,
            .image = image.data(),
            .B = B,
            .Y = Y,
            .X = X,
            .strides = {C * Y * X, Y * X, X, 1},
            .prefix = prefix.f.data(),
            .T = T,
            .position = position.f.data(),
            .mean = nullptr,
            .std = nullptr,
            .biases = {bias.f.data(), bias.f.data()},
            .turns = {},
            .pool = Pool::token,
            .head = true,
            .y = y.f.data(),
            .blocks = kDepth,
            .norm = true,
            .kept = {},
            .norm_kept = false};
  }
};

void refused(const Case& c, const std::string& what, const std::function<void()>& call) {
  std::string outcome = "went through";
  try {
    call();
  } catch (const std::logic_error&) {  // invalid_argument too
    outcome.clear();
  } catch (const std::overflow_error&) {
    outcome.clear();
  } catch (const std::exception& error) {
    outcome = error.what();
  }
  expect(outcome.empty(), c.name(what.c_str()) + ": " + outcome);
}

void refused_inputs(const Case& c, const Engine& engine) {
  constexpr int64_t kHuge = int64_t{1} << 61;
  const std::pair<const char*, void (*)(EngineInput&)> bad[] = {
      {"B", [](EngineInput& in) { in.B = int64_t{1} << 40; }},
      {"B < 0", [](EngineInput& in) { in.B = -1; }},
      {"Y", [](EngineInput& in) { in.Y = kHuge; }},
      {"Y < 0", [](EngineInput& in) { in.Y = -16; }},
      {"Y = 0", [](EngineInput& in) { in.Y = 0; }},
      {"X % patch", [](EngineInput& in) { in.X = X - 1; }},
      {"T < 0", [](EngineInput& in) { in.T = -1; }},
      {"T", [](EngineInput& in) { in.T = kHuge; }},
      {"stride < 0", [](EngineInput& in) { in.strides[2] = -X; }},
      {"stride", [](EngineInput& in) { in.strides[0] = kHuge; }},
      {"threads", [](EngineInput& in) { in.threads = 0; }},
      {"many threads", [](EngineInput& in) { in.threads = 1 << 30; }},
      {"dtype", [](EngineInput& in) { in.dtype = static_cast<DType>(9); }},
      {"pool", [](EngineInput& in) { in.pool = static_cast<Pool>(-1); }},
      {"image", [](EngineInput& in) { in.image = nullptr; }},
      {"prefix", [](EngineInput& in) { in.prefix = nullptr; }},
      {"y", [](EngineInput& in) { in.y = nullptr; }},
      {"mean", [](EngineInput& in) { in.mean = kElements; }},
      {"one bias", [](EngineInput& in) { in.biases.pop_back(); }},
      {"null bias", [](EngineInput& in) { in.biases[1] = nullptr; }},
      {"blocks < 0", [](EngineInput& in) { in.blocks = -1; }},
      {"blocks", [](EngineInput& in) { in.blocks = kDepth + 1; }},
      {"kept, pooled", [](EngineInput& in) { in.kept = {in.y, nullptr}; }},
      {"one kept", [](EngineInput& in) { in.pool = Pool::tokens, in.kept = {in.y}; }},
      {"turns", [](EngineInput& in) { in.turns = in.biases; }},
  };
  Buffers buffers(3);
  for (const auto& [what, change] : bad) {
    EngineInput in = buffers.input(c, 3);
    change(in);
    refused(c, std::string("forward with a bad ") + what, [&] { engine.forward(in); });
  }
}

void refused_weights(const Case& c) {
  const auto with = [&](const char* what, void (*change)(Engine&)) {
    Engine engine(c.isa, config(c));
    fill(engine);
    refused(c, std::string("an engine with ") + what, [&] {
      change(engine);
      engine.finish();
    });
    refused(c, "a forward after that", [&] { engine.forward(Buffers(1).input(c, 1)); });
  };
  with("an unknown vector", [](Engine& e) { e.set_vector("head.gain", kElements, 4); });
  with("an unknown matrix",
       [](Engine& e) { e.set_matrix("head.bias", DType::f32, kElements, 1, 4); });
  with("a short bias", [](Engine& e) { e.set_vector("blocks.1.mlp.fc2.bias", kElements, 4); });
  with("half a norm", [](Engine& e) { e.set_vector("fc_norm.bias", kElements, 4); });
  with("a null vector", [](Engine& e) { e.set_vector("head.bias", nullptr, 4); });
  with("a negative vector", [](Engine& e) { e.set_vector("head.bias", kElements, -1); });
  with("a null matrix", [](Engine& e) { e.set_matrix("head.weight", DType::f32, nullptr, 1, 4); });
  with("a negative matrix",
       [](Engine& e) { e.set_matrix("head.weight", DType::f32, kElements, -1, 4); });
  with("a matrix of bytes",
       [](Engine& e) { e.set_matrix("head.weight", DType::u8, kElements, 1, 4); });
}

}  // namespace

// Not compared with loops here (Python does that), but every buffer is exact, and a batch must give
// the bits that its images give alone.
void test_engine(const Case& c, int64_t B) {
  Engine engine(c.isa, config(c));
  fill(engine);
  engine.finish();
  Buffers buffers(B);
  EngineInput in = buffers.input(c, B);
  engine.forward(in);
  Array single(DType::f32, B * kClasses, false);
  for (int64_t b = 0; b < B; ++b) {
    in.B = 1;
    in.image = buffers.image.f.data() + b * C * Y * X;
    in.y = single.f.data() + b * kClasses;
    engine.forward(in);
  }
  expect(buffers.y.f == single.f, c.name("engine") + ": a batch differs from its images");
}

// Images of three sizes in one call give the bits that they give alone.
void test_mixed_sizes(const Case& c) {
  Engine engine(c.isa, config(c));
  fill(engine);
  engine.finish();
  constexpr std::pair<int64_t, int64_t> kSizes[] = {{4, 4}, {12, 8}, {4, 12}, {20, 16}, {12, 8}};
  std::vector<Array> pixels, positions, results;
  Array prefix(DType::f32, T * D);
  std::vector<EngineInput> inputs;
  for (const auto& [y, x] : kSizes) {
    pixels.emplace_back(DType::f32, C * y * x);
    positions.emplace_back(DType::f32, y / p * (x / p) * D);
    results.emplace_back(DType::f32, kClasses, false);
    EngineInput in = Buffers(1).input(c, 1);
    in.image = pixels.back().data(), in.Y = y, in.X = x, in.strides = {0, y * x, x, 1};
    in.prefix = prefix.f.data(), in.position = positions.back().f.data();
    in.biases = {}, in.y = results.back().f.data();
    inputs.push_back(in);
  }
  engine.forward(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Array alone(DType::f32, kClasses, false);
    inputs[i].y = alone.f.data();
    engine.forward(inputs[i]);
    expect(alone.f == results[i].f, c.name("engine") + ": an image differs among others");
  }
  inputs.back().T = 1;
  refused(c, "inputs that differ", [&] { engine.forward(inputs); });
  engine.forward(std::span<const EngineInput>{});
}

// Every image is in one group, and threads end together where the images allow it.
void test_schedule() {
  const std::vector<std::vector<int64_t>> lists = {
      {197, 197, 197, 197, 197},
      {401, 325, 257, 257, 197, 197, 145, 101},
      {1601, 17, 17, 17, 17, 5},
      {65, 65, 65, 65, 50, 50, 37, 37, 17, 17, 5, 2, 2},
      {197},
      {577, 197, 196},
      {400, 390, 380, 370, 360, 350}};
  for (const std::vector<int64_t>& tokens : lists)
    for (const int threads : {1, 2, 3, 8, 64}) {
      std::vector<int64_t> rows{0};
      double work = 0;
      for (const int64_t n : tokens) {
        rows.push_back(rows.back() + n);
        const auto length = static_cast<double>(n);
        work += length * 768 * (4 * 768 + 2 * 3072 + 3 * length);
      }
      forward_args a{};
      a.rows = rows.data(), a.B = static_cast<int64_t>(tokens.size());
      a.D = 768, a.F = 3072;
      const Schedule schedule(a, threads, 192);
      std::vector<int> taken(tokens.size());
      for (int64_t s = 0; s < schedule.stages().count; ++s) {
        const Stage& stage = schedule.stages().first[s];
        expect(threads % stage.team_size == 0, "schedule: a thread has no team");
        for (int64_t i = 0; i < stage.count; ++i)
          for (int64_t b = stage.groups[i].begin; b < stage.groups[i].end; ++b) ++taken[b];
      }
      expect(taken == std::vector<int>(tokens.size(), 1),
             "schedule: an image is left out or twice");
      expect(schedule.time() <= 1.25 * work / threads, "schedule: a thread is left at work alone");
    }
}

void test_refusals(const Case& c) {
  Engine engine(c.isa, config(c));
  Buffers buffers(2);
  const EngineInput in = buffers.input(c, 2);
  refused(c, "a forward before finish", [&] { engine.forward(in); });
  fill(engine);
  engine.finish();
  engine.forward(in);
  const std::vector<float> before = buffers.y.f;
  refused(c, "a vector after finish", [&] { engine.set_vector("head.bias", kElements, 1); });
  refused(c, "a matrix after finish",
          [&] { engine.set_matrix("head.weight", DType::f32, kElements, 1, 1); });
  refused(c, "a second finish", [&] { engine.finish(); });
  refused_inputs(c, engine);
  refused_weights(c);
  engine.forward(in);
  expect(buffers.y.f == before, c.name("engine") + ": refused calls changed it");

  EngineConfig bad = config(c);
  bad.patch_y = bad.patch_x = int64_t{1} << 40;
  refused(c, "patches for no memory", [&] { Engine(c.isa, bad); });
  bad = config(c);
  bad.activation = static_cast<Activation>(99);
  refused(c, "an unknown activation", [&] { Engine(c.isa, bad); });
  double rate = 0;
  for (const double seconds : {-1.0, std::nan(""), 1e300, std::numeric_limits<double>::infinity()})
    refused(c, "calibrate",
            [&] { calibrate(c.isa, {1, c.precision(), nullptr, 0, seconds, &rate}); });
}

void test_fingerprint() {
  std::vector<float> matrix(6 * 10, 0.0f), row(7, 2.0f);
  std::vector<uint16_t> narrow(5, 0x3f80);
  matrix[4 * 10 + 3] = 0.5f;   // not in the view, which has the even columns
  matrix[5 * 10 + 8] = -3.0f;  // its only element that a scale changes
  const Fingerprint watched({{matrix.data(), 4, {5, 6}, {2, 10}},
                             {row.data(), 4, {7}, {1}},
                             {narrow.data(), 2, {5}, {1}},
                             {row.data() + 6, 4, {1, 1}, {999, 999}},
                             {nullptr, 4, {0}, {1}}});
  expect(watched.matches(), "fingerprint: nothing was written");
  const auto sees = [&](auto& elements, const auto& write, const char* what) {
    const auto before = elements;
    for (auto& x : elements) x = write(x);
    expect(!watched.matches(), std::string("fingerprint: ") + what);
    std::copy(before.begin(), before.end(), elements.begin());  // in place: addresses are kept
    expect(watched.matches(), std::string("fingerprint: back from ") + what);
  };
  sees(matrix, [](float x) { return 2 * x; }, "a scale of elements that are nearly all zero");
  sees(row, [](float x) { return -x; }, "a change of sign");
  sees(narrow, [](uint16_t x) { return static_cast<uint16_t>(x + 1); }, "the last bit");
}

}  // namespace native_test
