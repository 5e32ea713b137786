#include "threads.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace vitkern {
namespace {

// A thread that waits spins for kSpin, about as long as OpenMP's own barriers do: one that gives
// way sooner loses its CPU to other processes, 3 % of a forward beside a busy one. Then it gives
// way to others on its CPU until kYield: the one that is waited for may be among them. It does not
// sleep at once: the system would wake it on the waker's CPU, and both would stay there.
constexpr int64_t kSpin = 4'000'000, kYield = 8'000'000;  // nanoseconds
// Where threads outnumber CPUs, it is all but certain that this CPU is needed.
constexpr int64_t kSpinWhenCrowded = 2'000;

struct Calls {
  std::mutex mutex;
  std::condition_variable changed;
  int cpus = 0;
  int in_use = 0;        // threads of all calls
  int teams = 0;         // calls of several threads that run
  int64_t arrived = 0;   // of those: tickets given out
  int64_t admitted = 0;  // and the first that waits
};

int cpus_of_mask() {
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// A forked child starts afresh: calls of threads that it does not have would never end. The old
// ones leak, since a locked mutex cannot be destroyed; so do the last ones, which a daemon thread
// may use while the process exits.
Calls* new_calls(int cpus) {
  Calls* const made = new Calls;
  made->cpus = cpus;
  return made;
}
Calls* calls = new_calls(cpus_of_mask());

// The thread that forked, in the child: OpenMP still thinks that it leads its parent's threads.
thread_local bool leads_no_more = false;

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  calls = new_calls(calls->cpus);
  leads_no_more = true;
});
#endif

// What OpenMP gives this thread if it asks for more: OMP_THREAD_LIMIT, or one inside a team.
int most_threads() {
#if defined(_OPENMP)
  return omp_get_active_level() < omp_get_max_active_levels() ? omp_get_thread_limit() : 1;
#else
  return 1;
#endif
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // some 10 ns; "yield" does nothing on most
#endif
}

// Waits a while for the word to change.
bool changes_soon(const uint32_t* word, uint32_t from, bool crowded) {
  using Clock = std::chrono::steady_clock;
  const auto changed = [=] { return __atomic_load_n(word, __ATOMIC_ACQUIRE) != from; };
  const auto spin = [=] {
    for (int i = 0; i < 64; ++i) {
      if (changed()) return true;
      pause();
    }
    return false;
  };
  if (spin()) return true;  // most waits end here, and ask for no time
  const auto start = Clock::now();
  const auto after = [=](int64_t ns) {
    return Clock::now() - start > std::chrono::nanoseconds(ns);
  };
  while (!after(crowded ? kSpinWhenCrowded : kSpin))
    if (spin()) return true;
  if (crowded) return false;
  while (!after(kYield)) {
    if (changed()) return true;
    std::this_thread::yield();
  }
  return false;
}

void sleep_while(const uint32_t* word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  (void)word, (void)value;
  std::this_thread::yield();
#endif
}

void wake_all(const uint32_t* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

void set_cpus(int count) {
  const std::lock_guard<std::mutex> lock(calls->mutex);
  calls->cpus = std::clamp(count, 1, cpus_of_mask());
}

int cpus() {
  const std::lock_guard<std::mutex> lock(calls->mutex);
  return calls->cpus;
}

Grant::Grant(int wanted) {
  wanted = std::clamp(wanted, 1, most_threads());
  threads_ = wanted;
  std::unique_lock<std::mutex> lock(calls->mutex);
  if (threads_ > 1) {
    const int64_t ticket = calls->arrived++;
    const int budget = std::max(calls->cpus, wanted);
    const auto waiting = [&] { return static_cast<int>(calls->arrived - ticket); };
    calls->changed.wait(lock, [&] {
      if (ticket != calls->admitted) return false;
      const int fair = std::max(1, budget / (calls->teams + waiting()));
      return calls->teams == 0 || budget - calls->in_use >= fair;
    });
    threads_ = std::clamp((budget - calls->in_use) / waiting(), 1, wanted);
    ++calls->admitted;
    ++calls->teams;
    calls->changed.notify_all();
  }
  calls->in_use += threads_;
  crowded_ = calls->in_use > calls->cpus;
  if (wanted > 1 && threads_ == 1) --calls->teams;  // nobody need wait for it: it is a lone thread
}

Grant::~Grant() {
  const std::lock_guard<std::mutex> lock(calls->mutex);
  calls->in_use -= threads_;
  if (threads_ > 1) --calls->teams;
  calls->changed.notify_all();
}

int Grant::threads() const { return threads_; }
bool Grant::crowded() const { return crowded_; }

void meet(Barrier* b, int size) {
  const uint32_t now = __atomic_load_n(&b->generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == static_cast<uint32_t>(size)) {
    __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
    // In one order with what a sleeper does: it is seen here, or it sees the new generation.
    __atomic_store_n(&b->generation, now + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&b->sleepers, __ATOMIC_SEQ_CST)) wake_all(&b->generation);
    return;
  }
  if (changes_soon(&b->generation, now, b->crowded)) return;
  __atomic_add_fetch(&b->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&b->generation, __ATOMIC_SEQ_CST) == now) sleep_while(&b->generation, now);
  __atomic_sub_fetch(&b->sleepers, 1, __ATOMIC_SEQ_CST);
}

void run_threads(int threads, void (*member)(void*, int, int), void* context) {
#if defined(_OPENMP)
  const auto region = [=] {
    const int dynamic = omp_get_dynamic();
    omp_set_dynamic(0);  // as many as were granted: OMP_DYNAMIC would give fewer
#pragma omp parallel num_threads(threads)
    member(context, omp_get_thread_num(), omp_get_num_threads());
    omp_set_dynamic(dynamic);
  };
  if (threads > 1 && leads_no_more) return std::thread(region).join();  // has threads of its own
  if (threads > 1) return region();
#endif
  (void)threads;
  member(context, 0, 1);
}

int64_t take_next(int64_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

}  // namespace vitkern
