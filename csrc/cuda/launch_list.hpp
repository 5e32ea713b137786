// A forward pass as a list of launches that are ready to go: everything is checked and packed once,
// and run() only starts kernels, so that it can be captured in a graph.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernel.hpp"

namespace vitkern::cuda {

// After the first run() nothing can be added, and run() may be called from several threads at once.
// Memory behind the pointers in the list stays the caller's to keep.
class LaunchList {
 public:
  void add(std::shared_ptr<const Kernel> kernel, const Grid& grid,
           const std::vector<Value>& values);

  // Checks all slots before it starts anything. `slots[i]` is what Slot(i, offset) counts from.
  void run(Handle stream, const std::vector<int64_t>& slots) const;

  void freeze() { frozen_ = true; }
  size_t launches() const { return steps_.size(); }
  size_t slots() const { return slots_; }

 private:
  struct Step {
    std::shared_ptr<const Kernel> kernel;
    Grid grid;
    Packed packed;
  };
  std::vector<Step> steps_;
  size_t slots_ = 0;  // one more than the largest index used
  bool frozen_ = false;
};

}  // namespace vitkern::cuda
