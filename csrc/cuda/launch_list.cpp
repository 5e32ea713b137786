#include "launch_list.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace vitkern::cuda {

void LaunchList::add(std::shared_ptr<const Kernel> kernel, const Grid& grid,
                     const std::vector<Value>& values) {
  if (!kernel)
    throw std::invalid_argument("vitkern: a launch list is made of kernels, not of None");
  if (frozen_)
    throw std::invalid_argument("vitkern: a launch list that has run cannot be added to");
  if (!steps_.empty() && (kernel->driver() != steps_[0].kernel->driver() ||
                          kernel->device().ordinal != steps_[0].kernel->device().ordinal))
    throw std::invalid_argument("vitkern: all kernels of a launch list must be on one device");
  Packed packed = kernel->pack(grid, values);
  for (const auto& [parameter, slot] : packed.slots)
    slots_ = std::max(slots_, static_cast<size_t>(slot.index) + 1);
  steps_.push_back({std::move(kernel), grid, std::move(packed)});
}

void LaunchList::check(const std::vector<int64_t>& slots) const {
  if (slots.size() != slots_)
    throw std::invalid_argument("vitkern: the launch list has " + std::to_string(slots_) +
                                " slots, not " + std::to_string(slots.size()));
  for (const Step& step : steps_)
    for (const auto& [parameter, slot] : step.packed.slots)
      step.kernel->check_slot(parameter, slots[slot.index], slot.offset);
}

void LaunchList::run(Handle stream, const std::vector<int64_t>& slots) const {
  check(slots);
  if (steps_.empty()) return;
  const Current current(driver(), device());
  for (const Step& step : steps_) {
    Cells cells = step.cells(slots);  // of this call's own: others may run at the same time
    step.kernel->start(step.grid, stream, cells);
  }
}

Cells LaunchList::Step::cells(const std::vector<int64_t>& slots) const {
  Cells found = packed.cells;
  for (const auto& [parameter, slot] : packed.slots)
    found[parameter] = static_cast<uint64_t>(slots[slot.index] + slot.offset);
  return found;
}

}  // namespace vitkern::cuda
