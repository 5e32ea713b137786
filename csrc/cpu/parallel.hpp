// A team of threads that runs one function together (SPMD): each takes its share, sync() separates
// steps.
#pragma once
#include "simd.hpp"
#include "threads.hpp"
#if defined(VITKERN_AMX)
#include "amx.hpp"
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
  vitkern::Barrier* barrier = nullptr;  // of a team of several

  // Part `rank` of [0, count), cut at multiples of `grain`; the parts differ by one grain at most.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t grains = ceil_div(count, grain);
    return {min(grains * rank / size * grain, count),
            min(grains * (rank + 1) / size * grain, count)};
  }
  void sync() const {
    if (size > 1) vitkern::meet(barrier, size);
  }
};

// What a thread must set up before it runs kernels.
#if defined(VITKERN_AMX) && !defined(VITKERN_COUNTED)
using ThreadState = TileState;
#else
struct ThreadState {};
#endif

// body(Team) on the threads of a grant.
template <class Body>
void run_team(const vitkern::Grant& grant, const Body& body) {
  struct Context {
    const Body& body;
    vitkern::Barrier barrier;
  } context{body, {0, 0, 0, grant.crowded()}};
  const auto member = [](void* of, int rank, int size) {
    [[maybe_unused]] const ThreadState state{};
    Context& c = *static_cast<Context*>(of);
    const Team team{rank, size, &c.barrier};
    c.body(team);
    team.sync();  // OpenMP's own barrier at the end would spin without giving way
  };
  vitkern::run_threads(grant.threads(), member, &context);
}

template <class Body>
void run_team(int threads, const Body& body) {
  run_team(vitkern::Grant(threads), body);
}

}  // namespace
