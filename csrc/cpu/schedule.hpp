// Which images of a forward a thread takes through all layers by itself, and which ones teams of
// threads compute together.
#pragma once
#include "kernels.hpp"

namespace vitkern {

// Images [begin, end) of a forward: the rows of all of them go through a GEMM together.
struct ImageGroup {
  int64_t begin, end;
};

// Groups that all threads compute in teams of equal size, those of the most work first.
struct Stage {
  const ImageGroup* groups;
  int64_t count;
  int team_size;  // 1: a thread takes the next group when it is free; otherwise teams take turns
};

struct Stages {
  const Stage* first;
  int64_t count;
};

// A group of a thread alone has about group_rows rows, so that a panel of weights is used often
// before the next is fetched; a team's has as many for each of its threads. An image of more tokens
// is a group of its own.
class Schedule {
 public:
  struct Plan;
  Schedule(const forward_args& a, int threads, int64_t group_rows);
  ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  Stages stages() const;  // one after another; at most one of threads alone
  double time() const;    // of all, in multiply-adds of one thread

 private:
  const Plan* const plan_;
};

}  // namespace vitkern
