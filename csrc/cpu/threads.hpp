// The threads of a call: how many it gets while other calls run, who runs them, where they meet.
//
// They are OpenMP's, of the runtime that PyTorch uses: a second pool would compete with the first,
// whose threads spin for milliseconds after their work. Nothing is pinned to a CPU.
#pragma once
#include <cstdint>

namespace vitkern {

// The CPUs that this process may use: those of its affinity mask, until set_cpus says how many of
// them (a container's quota).
void set_cpus(int count);
int cpus();

// The right of one call to so many threads. Calls of several threads, for any number of models,
// share the CPUs of the process:
//
//   one thread wanted    starts at once: it is the caller's own
//   several wanted       all of them for a lone call, whatever the number of CPUs. While others
//                        run, what they leave, if that is a fair share; otherwise the call waits,
//                        in the order of arrival, and calls that wait together share what is free
class Grant {
 public:
  explicit Grant(int wanted);
  ~Grant();
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;

  int threads() const;
  // Whether there are more threads than CPUs, those of other calls included.
  bool crowded() const;

 private:
  int threads_;
  bool crowded_;
};

// Where the threads of a team wait for each other: they spin, give way, then sleep; where they are
// crowded, they sleep almost at once. All zeros at first but for that; may be used by a team of
// another size after all have left.
struct Barrier {
  alignas(64) uint32_t arrived;
  alignas(64) uint32_t generation;  // how often all have met
  uint32_t sleepers;
  bool crowded;
};
void meet(Barrier* barrier, int size);

// member(context, rank, size) on the threads of a grant at once: size is their number.
void run_threads(int threads, void (*member)(void* context, int rank, int size), void* context);

// *counter, which is then one more: shares of work that go to whoever is free.
int64_t take_next(int64_t* counter);

// What a thread would do, in a build that counts instead of computing (tools/cpu_schedule.cpp).
enum class Work { rows, matmul, heads };  // rows, elements; rows, columns, steps, bytes; queries
void note(Work work, int64_t count, int64_t by = 1, int64_t steps = 1, int64_t bytes = 0);
#if defined(VITKERN_COUNTED)
constexpr bool kCounted = true;
#else
constexpr bool kCounted = false;
#endif

}  // namespace vitkern
