// Which images of a forward a thread takes through all layers by itself, and which ones all threads
// compute together.
#pragma once
#include "kernels.hpp"

namespace vitkern {

// Images [begin, end) of a forward: the rows of all of them go through a GEMM together.
struct ImageGroup {
  int64_t begin, end;
};

struct ImageGroups {
  const ImageGroup* first;
  int64_t count;
};

// Groups have about group_rows rows, so that a panel of weights is used often before the next is
// fetched; an image of more tokens is a group of its own.
class Schedule {
 public:
  struct Plan;
  Schedule(const forward_args& a, int64_t group_rows);
  ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  ImageGroups alone() const;  // each by one thread, the longest first; no thread waits for another
  ImageGroups together() const;  // each by all threads, after those
  double time() const;           // of all, in multiply-adds of one thread

 private:
  const Plan* const plan_;
};

}  // namespace vitkern
