// The packed engine: a ViT's weights in the layout its kernels want, and one call per forward.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dispatch.hpp"

namespace vitkern {

struct EngineConfig {
  int64_t channels, patch_y, patch_x, width, heads, mlp_width, depth;
  float eps;
  Activation activation;
  Precision precision;
};

// What a forward needs besides the weights; pointers stay the caller's.
struct EngineInput {
  int threads;
  DType dtype;        // f32, bf16 or u8
  const void* image;  // (B, C, Y, X) by strides
  int64_t B, Y, X, strides[4];
  const float* prefix;  // (T, D) or null
  int64_t T;
  const float* position;             // (patches, D) or null
  const float *mean, *std;           // (C) or null
  std::vector<const float*> biases;  // of attention, (H, S, S) per block; empty for none
  Pool pool;
  bool head;  // apply it to the pooled row
  float* y;
};

// Weights are set by their state-dict names, then finish() checks that all are there. After that
// forward() may be called from any number of threads at once: it changes nothing here.
class Engine {
 public:
  Engine(Isa isa, const EngineConfig& config);
  void set_matrix(const std::string& name, DType dtype, const void* data, int64_t N, int64_t K);
  void set_vector(const std::string& name, const float* data, int64_t n);
  void finish();  // throws std::invalid_argument for a missing or misshapen weight
  void forward(const EngineInput& input) const;

  int64_t classes() const { return head_.N; }
  size_t packed_bytes() const;
  Isa isa() const { return isa_; }

 private:
  struct Panels {
    std::unique_ptr<void, void (*)(void*)> memory;
    size_t bytes;
    int64_t N, K;
  };
  const float* vector(const std::string& name, int64_t n, bool required) const;
  NormVectors norm(const std::string& name, int64_t n, bool required) const;
  PackedLinear linear(const std::string& name, int64_t N, int64_t K, bool required) const;

  Isa isa_;
  EngineConfig config_;
  std::map<std::string, Panels> matrices_;
  std::map<std::string, std::vector<float>> vectors_;
  std::vector<BlockWeights> blocks_;
  PackedLinear patch_, head_;
  NormVectors norm_pre_, norm_, fc_norm_;
};

}  // namespace vitkern
