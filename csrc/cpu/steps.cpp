#include "steps.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace vitkern {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> profiling{false};
std::array<std::atomic<int64_t>, kSteps> nanoseconds{};
thread_local Clock::time_point spoke;  // when this thread did last

}  // namespace

void steps_begin() {
  if (profiling.load(std::memory_order_relaxed)) spoke = Clock::now();
}

void step_done(Step step) {
  if (!profiling.load(std::memory_order_relaxed)) return;
  const Clock::time_point now = Clock::now();
  const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(now - spoke).count();
  nanoseconds[static_cast<size_t>(step)].fetch_add(took, std::memory_order_relaxed);
  spoke = now;
}

std::array<double, kSteps> profile_steps(bool on) {
  profiling.store(false);
  std::array<double, kSteps> seconds;
  for (int i = 0; i < kSteps; ++i)
    seconds[i] = 1e-9 * static_cast<double>(nanoseconds[i].exchange(0));
  profiling.store(on);
  return seconds;
}

}  // namespace vitkern
