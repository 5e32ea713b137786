#include "arena.hpp"

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace vitkern {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kIdleBlocks = 8;  // more concurrent forwards than this allocate anew

struct Block {
  void* memory;
  size_t bytes;
};

std::mutex pool_mutex;
std::vector<Block> pool;
size_t allocations = 0;

size_t whole_pages(size_t bytes) {
  const size_t unit = bytes < kHugePage ? 4096 : kHugePage;
  if (bytes > SIZE_MAX - unit) throw std::bad_alloc();
  return (bytes / unit + 1) * unit;
}

}  // namespace

void* allocate_pages(size_t bytes) {
  const size_t size = whole_pages(bytes), unit = bytes < kHugePage ? 4096 : kHugePage;
  void* const memory = std::aligned_alloc(unit, size);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (unit == kHugePage) madvise(memory, size, MADV_HUGEPAGE);  // fewer TLB misses; a hint only
#endif
  return memory;
}

Lease::Lease(size_t bytes) : block_(nullptr), bytes_(0) {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  size_t best = pool.size();
  for (size_t i = 0; i < pool.size(); ++i)
    if (pool[i].bytes >= bytes && (best == pool.size() || pool[i].bytes < pool[best].bytes))
      best = i;
  if (best < pool.size()) {
    block_ = pool[best].memory;
    bytes_ = pool[best].bytes;
    pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(best));
    return;
  }
  pool.reserve(kIdleBlocks);                        // so that giving a block back cannot fail
  for (const Block& b : pool) std::free(b.memory);  // all too small: larger calls have begun
  pool.clear();
  block_ = allocate_pages(bytes);
  bytes_ = whole_pages(bytes);
  ++allocations;
}

Lease::~Lease() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool.size() < kIdleBlocks) {
    pool.push_back({block_, bytes_});
    return;
  }
  size_t smallest = 0;
  for (size_t i = 1; i < pool.size(); ++i)
    if (pool[i].bytes < pool[smallest].bytes) smallest = i;
  if (pool[smallest].bytes < bytes_) {
    std::free(pool[smallest].memory);
    pool[smallest] = {block_, bytes_};
  } else {
    std::free(block_);
  }
}

float* Lease::floats() const { return static_cast<float*>(block_); }

size_t arena_allocations() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  return allocations;
}

void arena_trim() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  for (const Block& b : pool) std::free(b.memory);
  pool.clear();
}

}  // namespace vitkern
