#include "arena.hpp"

#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace vitkern {
namespace {

#if defined(__x86_64__)
constexpr size_t kPage = 4096;
#else
constexpr size_t kPage = 65536;  // of some ARM kernels
#endif
constexpr size_t kHugePage = size_t{2} << 20;
// From here on memory is mapped; but not under ASan, which sees no end of a mapping.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
constexpr size_t kMapped = size_t{128} << 10;
#else
constexpr size_t kMapped = SIZE_MAX;
#endif
constexpr size_t kIdleBlocks = 16;  // a backward of the MLP holds ten at once

std::mutex pool_mutex;
std::vector<Pages> pool;
size_t allocations = 0;

#if defined(__unix__) || defined(__APPLE__)
// A fork waits until the pool is whole: a thread that the child does not have could hold the lock.
[[maybe_unused]] const int at_fork = pthread_atfork(
    [] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); }, [] { pool_mutex.unlock(); });
#endif

// In small pages: a huge one at the end would be resident as a whole, 1.3 MiB too much for each
// matrix of a ViT-L in integers.
size_t whole_pages(size_t bytes, size_t unit = kPage) {
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  return (bytes / unit + 1) * unit;
}

#if defined(__linux__)
// `size` bytes at a multiple of `unit`: a larger mapping, cut at both ends.
void* map(size_t size, size_t unit) {
  const size_t more = unit > kPage ? unit : 0;
  void* const mapped =
      mmap(nullptr, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  const size_t past = reinterpret_cast<uintptr_t>(mapped) % unit, head = past ? unit - past : 0;
  char* const memory = static_cast<char*>(mapped) + (more ? head : 0);
  if (more && head) munmap(mapped, head);
  if (more > head) munmap(memory + size, more - head);
  if (more) madvise(memory, size, MADV_HUGEPAGE);  // fewer TLB misses; a hint only
  return memory;
}
#endif

// A block of the pool, whose lock the caller holds, or a new one.
Pages take(size_t bytes) {
  size_t best = pool.size();
  for (size_t i = 0; i < pool.size(); ++i)
    if (pool[i].bytes() >= bytes && (best == pool.size() || pool[i].bytes() < pool[best].bytes()))
      best = i;
  if (best < pool.size()) {
    Pages found = std::move(pool[best]);
    pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(best));
    return found;
  }
  pool.reserve(kIdleBlocks);  // so that giving a block back cannot fail
  pool.clear();               // all too small: larger calls have begun
  ++allocations;
  // Whole huge pages, so that a slightly larger call finds room.
  return Pages(bytes < kHugePage ? bytes : whole_pages(bytes, kHugePage) - 1);
}

}  // namespace

Pages::Pages(size_t bytes) : memory_(nullptr), bytes_(whole_pages(bytes)) {
#if defined(__linux__)
  if (bytes_ >= kMapped) {
    memory_ = map(bytes_, bytes_ < kHugePage ? kPage : kHugePage);
    return;
  }
#endif
  memory_ = std::aligned_alloc(kPage, bytes_);
  if (!memory_) throw std::bad_alloc();
}

Pages::~Pages() {
#if defined(__linux__)
  if (memory_ && bytes_ >= kMapped) {
    munmap(memory_, bytes_);
    return;
  }
#endif
  std::free(memory_);
}

Pages::Pages(Pages&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Lease::Lease(size_t bytes)
    : block_([bytes] {
        if (!bytes) return Pages();
        const std::lock_guard<std::mutex> lock(pool_mutex);
        return take(bytes);
      }()) {}

Lease::~Lease() {
  if (!block_.bytes()) return;
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool.size() < kIdleBlocks) {
    pool.push_back(std::move(block_));
    return;
  }
  size_t smallest = 0;
  for (size_t i = 1; i < pool.size(); ++i)
    if (pool[i].bytes() < pool[smallest].bytes()) smallest = i;
  if (pool[smallest].bytes() < block_.bytes()) pool[smallest] = std::move(block_);
}

float* Lease::floats() const { return static_cast<float*>(block_.data()); }

size_t arena_allocations() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  return allocations;
}

void arena_trim() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  pool.clear();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace vitkern
