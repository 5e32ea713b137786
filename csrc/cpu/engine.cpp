#include "engine.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "checks.hpp"

namespace vitkern {
namespace {

[[noreturn]] void complain(const std::string& name, const std::string& what) {
  throw std::invalid_argument("vitkern engine: weight '" + name + "' " + what);
}

std::string shape(int64_t N, int64_t K) {
  std::string text = std::to_string(N);
  return text.insert(0, "(").append(", ").append(std::to_string(K)).append(")");
}

void check_alike(const EngineInput& a, const EngineInput& b) {
  if (a.threads != b.threads || a.dtype != b.dtype || a.T != b.T || a.mean != b.mean ||
      a.std != b.std || a.pool != b.pool || a.head != b.head || a.blocks != b.blocks ||
      a.norm != b.norm || a.norm_kept != b.norm_kept)
    throw std::invalid_argument(
        "vitkern engine: the inputs of a forward differ in threads, dtype, T, mean, std, pool,"
        " head, blocks or norms");
}

}  // namespace

Engine::Engine(Isa isa, const EngineConfig& config) : isa_(isa), config_(config) {
  const Check c("engine");
  c.size("channels", config.channels, 1), c.size("width", config.width, 1);
  c.size("patch_y", config.patch_y, 1), c.size("patch_x", config.patch_x, 1);
  c.size("heads", config.heads, 1), c.multiple("width", config.width, "heads", config.heads);
  c.size("mlp_width", config.mlp_width, 1), c.size("depth", config.depth);
  c.count("a patch", {config.channels, config.patch_y, config.patch_x});
  c.activation(config.activation), c.precision(config.precision);
  c.norm(config.norm), c.order(config.order);
  c.size("rotary_heads", config.rotary_heads);
  if (config.rotary_heads > 1 && config.rotary_heads != config.heads)
    c.refuse("rotary_heads must be 0, 1 or heads");
  if (config.rotary_heads && (config.width / config.heads) % 2)
    c.refuse("channels of a head are turned in pairs, and there is an odd number of them");
}

void Engine::check_open() const {
  if (layers_) throw std::logic_error("vitkern engine: finish() was called: make a new engine");
}

void Engine::set_matrix(const std::string& name, DType dtype, const void* data, int64_t N,
                        int64_t K, const float* scales) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
  }
  const Layout layout = engine_layout(isa_, config_.precision);
  set_packed(name, std::make_shared<Packed>(layout, dtype, data, N, K, scales));
}

void Engine::set_packed(const std::string& name, PackedPtr matrix) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  if (!matrix) complain(name, "is null");
  if (matrix->layout() != engine_layout(isa_, config_.precision))
    complain(name, "is packed for another instruction set or precision");
  matrices_.insert_or_assign(name, std::move(matrix));
}

void Engine::set_vector(const std::string& name, const float* data, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  const Check c("engine");
  c.size("n", n), c.array(name.c_str(), data, sizeof(float), {n});
  vectors_[name].assign(data, data + n);
}

// Weights by name, for finish(): each is checked, and those nobody asked for are known at the end.
class Engine::Reader {
 public:
  explicit Reader(const Engine& engine) : e_(engine) {}

  const float* vector(const std::string& name, int64_t n, bool required) {
    vectors_.insert(name);
    const auto found = e_.vectors_.find(name);
    if (found == e_.vectors_.end()) {
      if (required) complain(name, "is missing");
      return nullptr;
    }
    if (static_cast<int64_t>(found->second.size()) != n)
      complain(name, "has " + std::to_string(found->second.size()) + " elements, expected " +
                         std::to_string(n));
    return found->second.data();
  }

  bool has_norm(const std::string& name) const {
    return e_.vectors_.count(name + ".weight") || e_.vectors_.count(name + ".bias");
  }

  bool has_matrix(const std::string& name) const { return e_.matrices_.count(name + ".weight"); }

  NormVectors norm(const std::string& name, int64_t n, bool required) {
    if (!required && !has_norm(name)) return {};
    const bool shifts = e_.config_.norm == NormKind::layer;
    return {vector(name + ".weight", n, true), vector(name + ".bias", n, shifts)};
  }

  // N = 0 takes any number of rows.
  PackedLinear linear(const std::string& name, int64_t N, int64_t K, bool required) {
    matrices_.insert(name + ".weight");
    const auto found = e_.matrices_.find(name + ".weight");
    if (found == e_.matrices_.end()) {
      if (required) complain(name + ".weight", "is missing");
      return {};
    }
    const Packed& p = *found->second;
    const Precision engines = e_.config_.precision;
    const bool floats = engines == Precision::int8 && p.precision() != engines;
    if (floats && name.rfind("blocks.", 0) == 0)
      complain(name + ".weight",
               "is not quantised, and int8 leaves no weight of a block in floats");
    if ((N && p.N() != N) || p.K() != K)
      complain(name + ".weight",
               "has shape " + shape(p.N(), p.K()) + ", expected " + shape(N ? N : p.N(), K));
    return {p.panels(), vector(name + ".bias", p.N(), false), p.N(), p.K(),
            floats ? p.precision() : engines};
  }

  void check_all_used() const {
    const char* const unknown = "is no weight of this engine, or has the wrong number of axes";
    for (const auto& [name, panels] : e_.matrices_)
      if (!matrices_.count(name)) complain(name, unknown);
    for (const auto& [name, values] : e_.vectors_)
      if (!vectors_.count(name)) complain(name, unknown);
  }

 private:
  const Engine& e_;
  std::set<std::string> matrices_, vectors_;  // names that were asked for
};

void Engine::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  const EngineConfig& c = config_;
  Reader read(*this);
  Layers layers;
  layers.patch = read.linear("patch_embed.proj", c.width, c.channels * c.patch_y * c.patch_x, true);
  layers.norm_pre = read.norm("norm_pre", c.width, false);
  layers.norm = read.norm("norm", c.width, false);
  layers.fc_norm = read.norm("fc_norm", c.width, false);
  layers.head = read.linear("head", 0, c.width, false);
  for (int64_t i = 0; i < c.depth; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    const bool qk_norm = read.has_norm(at + "attn.q_norm") || read.has_norm(at + "attn.k_norm");
    BlockWeights b;
    b.norm1 = read.norm(at + "norm1", c.width, true);
    b.qkv = read.linear(at + "attn.qkv", 3 * c.width, c.width, true);
    b.q_norm = read.norm(at + "attn.q_norm", c.width / c.heads, qk_norm);
    b.k_norm = read.norm(at + "attn.k_norm", c.width / c.heads, qk_norm);
    b.proj = read.linear(at + "attn.proj", c.width, c.width, true);
    b.gamma1 = read.vector(at + "ls1.gamma", c.width, false);
    b.norm2 = read.norm(at + "norm2", c.width, true);
    b.attention_norm = read.norm(at + "attn.norm", c.width, false);
    b.mlp_norm = read.norm(at + "mlp.norm", c.mlp_width, false);
    if (c.gated && read.has_matrix(at + "mlp.fc1_g")) {
      b.gate = read.linear(at + "mlp.fc1_g", c.mlp_width, c.width, true);
      b.fc1 = read.linear(at + "mlp.fc1_x", c.mlp_width, c.width, true);
    } else {
      b.fc1 = read.linear(at + "mlp.fc1", (c.gated ? 2 : 1) * c.mlp_width, c.width, true);
    }
    b.fc2 = read.linear(at + "mlp.fc2", c.width, c.mlp_width, true);
    b.gamma2 = read.vector(at + "ls2.gamma", c.width, false);
    layers.blocks.push_back(b);
  }
  read.check_all_used();
  layers_ = std::move(layers);
}

int64_t Engine::classes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return layers_ ? layers_->head.N : 0;
}

size_t Engine::packed_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t total = 0;
  for (const auto& [name, matrix] : matrices_) total += matrix->bytes();
  for (const auto& [name, values] : vectors_) total += values.size() * sizeof(float);
  return total;
}

void Engine::forward(std::span<const EngineInput> inputs) const {
  const EngineConfig& c = config_;
  const Layers& layers = [&]() -> const Layers& {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!layers_) throw std::logic_error("vitkern engine: finish() was not called");
    return *layers_;
  }();
  if (inputs.empty()) return;
  const EngineInput& in = inputs.front();
  const PackedLinear head = in.head ? layers.head : PackedLinear{};
  std::vector<ForwardImage> images;
  for (const EngineInput& other : inputs) {
    check_alike(in, other);
    if (!other.biases.empty() && other.biases.size() != layers.blocks.size())
      throw std::invalid_argument("vitkern engine: attention biases for every block or for none");
    if (other.blocks < 0 || other.blocks > c.depth)
      throw std::invalid_argument("vitkern engine: blocks must be between 0 and depth");
    if (!other.kept.empty() &&
        (other.kept.size() != layers.blocks.size() || other.pool != Pool::tokens))
      throw std::invalid_argument(
          "vitkern engine: kept has a place for every block or is empty, and pool is tokens");
    if (other.turns.size() != (c.rotary_heads ? layers.blocks.size() : 0))
      throw std::invalid_argument(
          "vitkern engine: turns for every block, if rotary_heads says so, else for none");
    add_images(other, head.panels ? head.N : c.width, images);
  }
  const auto patches = [&](const ForwardImage& i) { return (i.Y / c.patch_y) * (i.X / c.patch_x); };
  std::stable_sort(images.begin(), images.end(), [&](const ForwardImage& a, const ForwardImage& b) {
    return patches(a) > patches(b);
  });
  std::vector<int64_t> rows{0};
  for (const ForwardImage& i : images) rows.push_back(rows.back() + in.T + patches(i));
  vitkern::forward(isa_, {.threads = in.threads,
                          .image_dtype = in.dtype,
                          .precision = c.precision,
                          .images = images.data(),
                          .rows = rows.data(),
                          .mean = in.mean,
                          .std = in.std,
                          .B = static_cast<int64_t>(images.size()),
                          .C = c.channels,
                          .py = c.patch_y,
                          .px = c.patch_x,
                          .D = c.width,
                          .T = in.T,
                          .H = c.heads,
                          .F = c.mlp_width,
                          .depth = in.blocks,
                          .patch = layers.patch,
                          .head = head,
                          .norm_pre = layers.norm_pre,
                          .norm = in.norm ? layers.norm : NormVectors{},
                          .fc_norm = in.pool == Pool::tokens ? NormVectors{} : layers.fc_norm,
                          .kept_norm = in.norm_kept ? layers.norm : NormVectors{},
                          .blocks = layers.blocks.data(),
                          .eps = c.eps,
                          .activation = c.activation,
                          .pool = in.pool,
                          .norm_kind = c.norm,
                          .order = c.order,
                          .gated = c.gated,
                          .rotary_heads = layers.blocks.empty() ? 0 : c.rotary_heads,
                          .rotary_half = c.rotary_half});
}

// The images of an input, one by one, after a look at the batch as a whole; width: of y's rows.
void Engine::add_images(const EngineInput& in, int64_t width,
                        std::vector<ForwardImage>& images) const {
  const EngineConfig& c = config_;
  const Check check("forward");
  check.size("B", in.B), check.size("T", in.T), check.size("Y", in.Y, 1), check.size("X", in.X, 1);
  check.image_dtype(in.dtype);
  const int64_t element = bytes_of(in.dtype);
  const auto [b, ch, y, x] = in.strides;
  check.array("image", in.image, element, {Axis{in.B, b}, {c.channels, ch}, {in.Y, y}, {in.X, x}});
  const int64_t patches = check.count("patches", {in.Y / c.patch_y, in.X / c.patch_x});
  check.count("B * S", {in.B, in.T + patches});
  const int64_t each =
      in.pool == Pool::tokens ? check.count("y", {in.T + patches, c.width}) : width;
  check.array("y", in.y, sizeof(float), {in.B, each});
  for (const float* rows : in.kept)
    if (rows) check.array("kept", rows, sizeof(float), {in.B, each});
  for (int64_t i = 0; i < in.B; ++i)
    images.push_back({.pixels = static_cast<const char*>(in.image) + i * b * element,
                      .Y = in.Y,
                      .X = in.X,
                      .c_stride = ch,
                      .y_stride = y,
                      .x_stride = x,
                      .prefix = in.prefix,
                      .position = in.position,
                      .biases = in.biases.empty() ? nullptr : in.biases.data(),
                      .turns = in.turns.empty() ? nullptr : in.turns.data(),
                      .y = in.y + i * each,
                      .kept = in.kept.empty() ? nullptr : in.kept.data(),
                      .kept_at = i * each});
}

}  // namespace vitkern
