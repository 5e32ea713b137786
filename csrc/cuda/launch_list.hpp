// A forward pass as a list of launches that are ready to go: everything is checked and packed once,
// and run() only starts kernels, so that it can be captured in a graph.
#pragma once
#include <cstddef>
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

  // Throws std::invalid_argument unless these are its slots: `slots[i]` is what Slot(i, offset)
  // counts from.
  void check(const std::vector<int64_t>& slots) const;

  // Checks all slots before it starts anything.
  void run(Handle stream, const std::vector<int64_t>& slots) const;

  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  size_t launches() const { return steps_.size(); }
  size_t slots() const { return slots_; }

  struct Step {
    std::shared_ptr<const Kernel> kernel;
    Grid grid;
    Packed packed;
    Cells cells(const std::vector<int64_t>& slots) const;  // with the addresses of one call
  };
  const std::vector<Step>& steps() const { return steps_; }
  const Driver& driver() const { return *steps_[0].kernel->driver(); }
  const Device& device() const { return steps_[0].kernel->device(); }

 private:
  std::vector<Step> steps_;
  size_t slots_ = 0;  // one more than the largest index used
  bool frozen_ = false;
};

}  // namespace vitkern::cuda
