// A few elements of every weight, by their bits: whether anybody wrote to the weights since.
//
// A write that leaves no trace elsewhere (through PyTorch's `.data`) mostly changes every element:
// a scale, a shift, a step of an average, other weights. Four elements of each array show it at
// the cost of a cache miss each. Non-zero ones are taken where there are any, as 0 does not show a
// scale. A write to a part of an array may miss all four.
#pragma once
#include <cstdint>
#include <vector>

namespace vitkern {

struct WatchedArray {
  const void* data;
  int64_t element;  // bytes: 2 or 4, sign bit first
  std::vector<int64_t> sizes, strides;
};

class Fingerprint {
 public:
  explicit Fingerprint(const std::vector<WatchedArray>& arrays);
  bool matches() const;  // the arrays must still be there

 private:
  struct Sample {
    const void* at;
    uint32_t bits;
    bool wide;  // 4 bytes, else 2
  };
  std::vector<Sample> samples_;
};

}  // namespace vitkern
