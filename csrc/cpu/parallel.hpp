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

// [0, count) in parts that differ by one at most, the larger ones first. In a loop over short parts
// this is made once: a division takes 40 to 90 cycles before Ice Lake.
struct EvenParts {
  int64_t size, larger;

  EvenParts(int64_t count, int64_t parts)
      : size(count / max(parts, 1)), larger(count % max(parts, 1)) {}
  Range operator[](int64_t i) const {
    return {i * size + min(i, larger), (i + 1) * size + min(i + 1, larger)};
  }
};
inline Range even_part(int64_t count, int64_t i, int64_t parts) {
  return EvenParts(count, parts)[i];
}

// What is left of a thread's part of a step, [begin, end). The thread takes from its front; those
// that are done with their own parts from its back. Empty at first, and after each step.
struct Share {
  alignas(64) uint64_t left;  // begin in the lower half, end in the upper one

  void open(Range part) { __atomic_store_n(&left, packed(part.begin, part.end), __ATOMIC_RELAXED); }
  // The first few, and fewer towards the end: a quarter of what is left, at most so many.
  Range take_first(int64_t most) {
    return take([=](int64_t begin, int64_t end) {
      return Range{begin + max(1, min(most, (end - begin) / 4)), end};
    });
  }
  Range take_all() {
    return take([](int64_t, int64_t end) { return Range{end, end}; });
  }
  Range take_last() {
    return take([](int64_t begin, int64_t end) { return Range{begin, max(begin, end - 1)}; });
  }

 private:
  static uint64_t packed(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) | static_cast<uint64_t>(end) << 32;
  }
  // remain(begin, end): what the taker leaves of it.
  template <class Remain>
  Range take(const Remain& remain) {
    uint64_t seen = __atomic_load_n(&left, __ATOMIC_RELAXED);
    for (;;) {
      const Range all{static_cast<int64_t>(seen & UINT32_MAX), static_cast<int64_t>(seen >> 32)};
      if (all.begin >= all.end) return {0, 0};
      const Range rest = remain(all.begin, all.end);
      if (__atomic_compare_exchange_n(&left, &seen, packed(rest.begin, rest.end), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return rest.begin > all.begin ? Range{all.begin, rest.begin} : Range{rest.end, all.end};
    }
  }
};

struct Team {
  int rank, size;
  vitkern::Barrier* barrier = nullptr;  // of a team of several
  Share* shares = nullptr;              // of each thread, if they help each other

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
