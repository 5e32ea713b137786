// The packed engine: a ViT's weights in the layout its kernels want, and one call per forward.
#pragma once
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "packed.hpp"

namespace vitkern {

using Strides = std::array<int64_t, 4>;
using Biases = std::vector<const float*>;
using Kept = std::vector<float*>;

#define STRUCT(name) struct name {
#define FIELD(type, name) type name;
#define END \
  }         \
  ;
#include "engine_arguments.inc"
#undef END
#undef FIELD
#undef STRUCT

// Weights are set by their state-dict names, then finish() checks that all are there and that none
// is left over: after it no weight can be set. forward() may then be called from any number of
// threads at once: it changes nothing here.
class Engine {
 public:
  Engine(Isa isa, const EngineConfig& config);
  void set_matrix(const std::string& name, DType dtype, const void* data, int64_t N, int64_t K,
                  const float* scales = nullptr);              // (N) of i8
  void set_packed(const std::string& name, PackedPtr matrix);  // in this engine's layout
  void set_vector(const std::string& name, const float* data, int64_t n);
  void finish();  // throws std::invalid_argument for a missing, misshapen or unknown weight
  // Inputs may differ in their images, the images' sizes and what depends on these; in nothing
  // else.
  void forward(std::span<const EngineInput> inputs) const;
  void forward(const EngineInput& input) const { forward({&input, 1}); }

  int64_t classes() const;
  size_t packed_bytes() const;
  Isa isa() const { return isa_; }

 private:
  struct Layers {  // pointers into matrices_ and vectors_
    PackedLinear patch, head;
    NormVectors norm_pre, norm, fc_norm;
    std::vector<BlockWeights> blocks;
  };
  class Reader;
  void check_open() const;
  void add_images(const EngineInput& in, int64_t width, std::vector<ForwardImage>& images) const;

  const Isa isa_;
  const EngineConfig config_;
  mutable std::mutex mutex_;  // weights may be set by several threads; guards all that follow
  std::map<std::string, PackedPtr> matrices_;
  std::map<std::string, std::vector<float>> vectors_;
  std::optional<Layers> layers_;  // by finish(); never changes again
};

}  // namespace vitkern
