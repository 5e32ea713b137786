// Scratch memory that is allocated once and handed out again: a steady state allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>

namespace vitkern {

// At least `bytes`, 64-byte aligned and in huge pages from 2 MiB on; std::free gives it back.
void* allocate_pages(size_t bytes);  // throws std::bad_alloc

// A block of at least `bytes`, 64-byte aligned, contents undefined. Its destructor gives the block
// back to the pool.
class Lease {
 public:
  explicit Lease(size_t bytes);  // throws std::bad_alloc
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  float* floats() const;

 private:
  void* block_;
  size_t bytes_;
};

size_t arena_allocations();  // how often the pool had to ask the system, for tests
void arena_trim();           // give the idle blocks back to the system

}  // namespace vitkern
