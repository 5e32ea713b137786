// A launch list as a CUDA graph: the driver starts all launches of a forward in one call, and the
// GPU goes from one to the next without the host. The graph is made of the list's own launches, so
// nothing is copied: what changes from call to call, the slots, is written into the few launches
// that use them.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "launch_list.hpp"

namespace vitkern::cuda {

class Graph {
 public:
  // Of a list that is closed (frozen). Throws DriverError where the driver has no graphs (HIP's are
  // not used) or refuses this one. Allowed while another stream is captured, not on one that is.
  Graph(std::shared_ptr<LaunchList> list, const std::vector<int64_t>& slots);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Checks all slots before it starts anything. Launches of earlier calls keep their slots, in
  // flight or not. On a stream that is captured the launches are made one by one: a graph of the
  // caller's own takes these. Callable from several threads at once.
  void run(Handle stream, const std::vector<int64_t>& slots);

  size_t launches() const { return list_->launches(); }

 private:
  struct Moved {
    const LaunchList::Step* step;
    Handle node;
  };
  void build(const std::vector<int64_t>& slots);
  void destroy() noexcept;

  std::shared_ptr<LaunchList> list_;
  Handle graph_ = nullptr, executable_ = nullptr;
  std::vector<Moved> moved_;    // launches with slots
  std::vector<int64_t> slots_;  // that they have now; empty: unknown
  std::mutex mutex_;            // the driver's executable graphs are not thread-safe
};

}  // namespace vitkern::cuda
