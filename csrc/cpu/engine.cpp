#include "engine.hpp"

#include <cstdlib>
#include <stdexcept>

#include "arena.hpp"

namespace vitkern {
namespace {

[[noreturn]] void complain(const std::string& name, const std::string& what) {
  throw std::invalid_argument("vitkern engine: weight '" + name + "' " + what);
}

std::string shape(int64_t N, int64_t K) {
  std::string text = std::to_string(N);
  return text.insert(0, "(").append(", ").append(std::to_string(K)).append(")");
}

}  // namespace

Engine::Engine(Isa isa, const EngineConfig& config) : isa_(isa), config_(config) {
  const EngineConfig& c = config;
  if (c.channels < 1 || c.patch_y < 1 || c.patch_x < 1 || c.width < 1 || c.heads < 1 ||
      c.mlp_width < 1 || c.depth < 0)
    throw std::invalid_argument("vitkern engine: sizes must be positive");
  if (c.width % c.heads)
    throw std::invalid_argument("vitkern engine: width must be a multiple of heads");
}

void Engine::set_matrix(const std::string& name, DType dtype, const void* data, int64_t N,
                        int64_t K) {
  size_t bytes = 0;
  pack(isa_, {config_.precision, dtype, data, nullptr, N, K, &bytes});
  Panels p{{allocate_pages(bytes), std::free}, bytes, N, K};
  pack(isa_, {config_.precision, dtype, data, p.memory.get(), N, K, &bytes});
  matrices_.insert_or_assign(name, std::move(p));
}

void Engine::set_vector(const std::string& name, const float* data, int64_t n) {
  vectors_[name].assign(data, data + n);
}

const float* Engine::vector(const std::string& name, int64_t n, bool required) const {
  const auto found = vectors_.find(name);
  if (found == vectors_.end()) {
    if (required) complain(name, "is missing");
    return nullptr;
  }
  if (static_cast<int64_t>(found->second.size()) != n)
    complain(name, "has " + std::to_string(found->second.size()) + " elements, expected " +
                       std::to_string(n));
  return found->second.data();
}

NormVectors Engine::norm(const std::string& name, int64_t n, bool required) const {
  return {vector(name + ".weight", n, required), vector(name + ".bias", n, required)};
}

PackedLinear Engine::linear(const std::string& name, int64_t N, int64_t K, bool required) const {
  const auto found = matrices_.find(name + ".weight");
  if (found == matrices_.end()) {
    if (required) complain(name + ".weight", "is missing");
    return {};
  }
  const Panels& p = found->second;
  if ((N && p.N != N) || p.K != K)
    complain(name + ".weight",
             "has shape " + shape(p.N, p.K) + ", expected " + shape(N ? N : p.N, K));
  return {p.memory.get(), vector(name + ".bias", p.N, false), p.N, p.K};
}

void Engine::finish() {
  const EngineConfig& c = config_;
  patch_ = linear("patch_embed.proj", c.width, c.channels * c.patch_y * c.patch_x, true);
  norm_pre_ = norm("norm_pre", c.width, false);
  norm_ = norm("norm", c.width, false);
  fc_norm_ = norm("fc_norm", c.width, false);
  head_ = linear("head", 0, c.width, false);
  blocks_.clear();
  for (int64_t i = 0; i < c.depth; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    BlockWeights b;
    b.norm1 = norm(at + "norm1", c.width, true);
    b.qkv = linear(at + "attn.qkv", 3 * c.width, c.width, true);
    b.q_norm = norm(at + "attn.q_norm", c.width / c.heads, false);
    b.k_norm = norm(at + "attn.k_norm", c.width / c.heads, b.q_norm.weight != nullptr);
    b.proj = linear(at + "attn.proj", c.width, c.width, true);
    b.gamma1 = vector(at + "ls1.gamma", c.width, false);
    b.norm2 = norm(at + "norm2", c.width, true);
    b.fc1 = linear(at + "mlp.fc1", c.mlp_width, c.width, true);
    b.fc2 = linear(at + "mlp.fc2", c.width, c.mlp_width, true);
    b.gamma2 = vector(at + "ls2.gamma", c.width, false);
    blocks_.push_back(b);
  }
}

size_t Engine::packed_bytes() const {
  size_t total = 0;
  for (const auto& [name, panels] : matrices_) total += panels.bytes;
  for (const auto& [name, values] : vectors_) total += values.size() * sizeof(float);
  return total;
}

void Engine::forward(const EngineInput& in) const {
  const EngineConfig& c = config_;
  if (!patch_.panels) throw std::logic_error("vitkern engine: finish() was not called");
  if (!in.biases.empty() && in.biases.size() != blocks_.size())
    throw std::invalid_argument("vitkern engine: attention biases for every block or for none");
  vitkern::forward(isa_, {.threads = in.threads > 0 ? in.threads : 1,
                          .image_dtype = in.dtype,
                          .precision = c.precision,
                          .image = in.image,
                          .prefix = in.prefix,
                          .position = in.position,
                          .mean = in.mean,
                          .std = in.std,
                          .biases = in.biases.empty() ? nullptr : in.biases.data(),
                          .y = in.y,
                          .B = in.B,
                          .C = c.channels,
                          .Y = in.Y,
                          .X = in.X,
                          .py = c.patch_y,
                          .px = c.patch_x,
                          .D = c.width,
                          .T = in.T,
                          .H = c.heads,
                          .F = c.mlp_width,
                          .depth = c.depth,
                          .b_stride = in.strides[0],
                          .c_stride = in.strides[1],
                          .y_stride = in.strides[2],
                          .x_stride = in.strides[3],
                          .patch = patch_,
                          .head = in.head ? head_ : PackedLinear{},
                          .norm_pre = norm_pre_,
                          .norm = norm_,
                          .fc_norm = in.pool == Pool::tokens ? NormVectors{} : fc_norm_,
                          .blocks = blocks_.data(),
                          .eps = c.eps,
                          .activation = c.activation,
                          .pool = in.pool});
}

}  // namespace vitkern
