// Scratch memory that is allocated once and handed out again: a steady state allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>

namespace vitkern {

// At least `bytes`, 64-byte aligned and in huge pages from 2 MiB on. Large ones are mapped: malloc,
// which takes blocks of up to 32 MiB from its heap once one of that size was freed, would not give
// them back to the system.
class Pages {
 public:
  Pages() = default;             // none
  explicit Pages(size_t bytes);  // throws std::bad_alloc
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  void* data() const { return memory_; }
  size_t bytes() const { return bytes_; }  // at least those that were asked for

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

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
  Pages block_;
};

size_t arena_allocations();  // how often the pool had to ask the system, for tests
void arena_trim();           // give idle blocks, and what malloc holds free, back to the system

}  // namespace vitkern
