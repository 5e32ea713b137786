// A team of threads that runs one function together (SPMD): each takes its share, sync() separates
// steps.
#pragma once
#include "simd.hpp"
#if defined(VITKERN_AMX)
#include "amx.hpp"
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

struct Range {
  int64_t begin, end;
};

// Part i of [0, count): the parts differ by one at most, the larger ones first.
inline Range even_part(int64_t count, int64_t i, int64_t parts) {
  const int64_t size = count / parts, larger = count % parts;
  return {i * size + min(i, larger), (i + 1) * size + min(i + 1, larger)};
}

struct Team {
  int rank, size;

  // Part `rank` of [0, count), cut at multiples of `grain`; the parts differ by one grain at most.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t grains = ceil_div(count, grain);
    return {min(grains * rank / size * grain, count),
            min(grains * (rank + 1) / size * grain, count)};
  }
  void sync() const {
    if (size == 1) return;
#if defined(_OPENMP)
#pragma omp barrier
#endif
  }
};

// What a thread must set up before it runs kernels.
#if defined(VITKERN_AMX)
using ThreadState = TileState;
#else
struct ThreadState {};
#endif

// body(Team) on `threads` threads of the pool that PyTorch uses too.
template <class Body>
void run_team(int threads, const Body& body) {
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      [[maybe_unused]] const ThreadState state{};
      body(Team{omp_get_thread_num(), omp_get_num_threads()});
    }
    return;
  }
#endif
  (void)threads;
  [[maybe_unused]] const ThreadState state{};
  body(Team{0, 1});
}

}  // namespace
