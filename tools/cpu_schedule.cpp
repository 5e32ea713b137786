// The engine's schedule, counted: csrc/cpu/forward.cpp itself, built with VITKERN_COUNTED, in which
// every thread runs by itself and notes what it would compute and whom it would wait for.
//
// Reads lines "threads B S D H F depth", writes for each thread a line of its events, and an empty
// one after the last:
//   r count elements       rows that are normalised or unfolded
//   m rows columns K bytes of a matmul; bytes of its weights
//   h queries              of a head of attention
//   b which size           a barrier of so many threads
#include <cstdio>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace {
int rank_now = 0, threads_now = 1;
std::vector<int64_t> taken;  // by each thread
}  // namespace

namespace vitkern {

Grant::Grant(int wanted) : threads_(wanted), crowded_(false) {}
Grant::~Grant() = default;
int Grant::threads() const { return threads_; }
bool Grant::crowded() const { return crowded_; }

void meet(Barrier* which, int size) {
  std::printf(" b %lld %d", reinterpret_cast<long long>(which), size);
}

void run_threads(int threads, void (*member)(void*, int, int), void* context) {
  taken.assign(threads, 0);
  threads_now = threads;
  for (rank_now = 0; rank_now < threads; ++rank_now) {
    member(context, rank_now, threads);
    std::printf("\n");
  }
}

// Threads that are equally fast take turns.
int64_t take_next(int64_t*) { return rank_now + taken[rank_now]++ * threads_now; }

void note(Work work, int64_t count, int64_t by, int64_t steps, int64_t bytes) {
  if (work == Work::rows)
    std::printf(" r %ld %ld", count, by);
  else if (work == Work::heads)
    std::printf(" h %ld", count);
  else
    std::printf(" m %ld %ld %ld %ld", count, by, steps, bytes);
}

}  // namespace vitkern

int main(int, char** words) {
  using namespace vitkern;
  const Precision precision = words[1][0] == 'b' ? Precision::bf16 : Precision::fp32;
  int threads;
  long B, S, D, H, F, depth;
  while (std::scanf("%d %ld %ld %ld %ld %ld %ld", &threads, &B, &S, &D, &H, &F, &depth) == 7) {
    constexpr int64_t kPatch = 16;
    std::vector<float> prefix(D), y(B * S * D);
    BlockWeights block;
    block.norm1 = block.norm2 = {prefix.data(), prefix.data()};
    block.qkv = {prefix.data(), nullptr, 3 * D, D};
    block.proj = {prefix.data(), nullptr, D, D};
    block.fc1 = {prefix.data(), nullptr, F, D};
    block.fc2 = {prefix.data(), nullptr, D, F};
    const std::vector<BlockWeights> blocks(depth, block);
    std::vector<ForwardImage> images(B);
    std::vector<int64_t> rows(B + 1);
    for (int64_t b = 0; b < B; ++b) {
      images[b].Y = kPatch, images[b].X = (S - 1) * kPatch;
      images[b].prefix = prefix.data(), images[b].y = y.data() + b * S * D;
      rows[b + 1] = rows[b] + S;
    }
    forward_args a{};
    a.threads = threads;
    a.precision = precision;
    a.images = images.data(), a.rows = rows.data();
    a.B = B, a.C = 3, a.py = a.px = kPatch;
    a.D = D, a.T = 1, a.H = H, a.F = F, a.depth = depth;
    a.patch = {prefix.data(), nullptr, D, 3 * kPatch * kPatch};
    a.blocks = blocks.data();
    a.pool = Pool::tokens;
    VITKERN_ISA::forward(a);
    std::printf("\n");
  }
}
