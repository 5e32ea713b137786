// forward: a whole ViT in one call, from pixels to logits, on packed weights.
//
// While there are at least as many images as threads, each thread takes groups of images through
// all layers (pass.hpp) without a barrier. The images that remain (fewer than threads) are computed
// by teams of threads, which share rows, columns and heads (schedule.hpp). All ways give the same
// bits.
#include "arena.hpp"
#include "kernels.hpp"
#include "pass.hpp"
#include "schedule.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

// A group by one team; `memory` holds the team's shared buffers, then a part for each thread.
void run_group(const forward_args& a, ImageGroup group, const Team& team, float* memory) {
  const Sizes n(a, group, team.size);
  float* const x = memory;
  float* const h = x + n.x;
  float* const wide = h + n.h;
  float* const scratch = memory + n.shared() + team.rank * n.per_thread;
  Pass{{a, group}, n, team, x, h, wide, wide + n.wide, scratch}.run();
}

// Floats of memory for each thread that the largest groups need; a team's lie together.
int64_t memory_of_thread(const forward_args& a, const Stages& stages) {
  int64_t most = 0;
  for (int64_t i = 0; i < stages.count; ++i) {
    const Stage& stage = stages.first[i];
    for (int64_t g = 0; g < stage.count; ++g) {
      const Sizes n(a, stage.groups[g], stage.team_size);
      most = max(most, ceil_div(n.shared(), stage.team_size) + n.per_thread);
    }
  }
  return round_up(most, 1024);
}

// By every thread. `memory`, `barrier` and `shares` are its team's, `next` is the first group that
// no thread took.
void run_stage(const forward_args& a, const Stage& stage, const Team& all, float* memory,
               Barrier* barrier, Share* shares, int64_t* next) {
  const int size = stage.team_size;
  const Team mine{all.rank % size, size, barrier, kHelping && size > 1 ? shares : nullptr};
  // A thread alone takes the next group: one that is held up takes fewer.
  int64_t i = size == 1 ? take_next(next) : all.rank / size;
  while (i < stage.count) {
    run_group(a, stage.groups[i], mine, memory);
    i = size == 1 ? take_next(next) : i + all.size / size;
  }
}

}  // namespace

void forward(const forward_args& a) {
  if (!a.B) return;
  const Grant grant(a.threads);
  const int threads = grant.threads();
  const Schedule schedule(a, threads, group_rows(a.precision));
  const Stages stages = schedule.stages();
  const int64_t each = memory_of_thread(a, stages);
  const Lease lease(threads * (each * sizeof(float) + sizeof(Barrier) + sizeof(Share)));
  Barrier* const barriers = reinterpret_cast<Barrier*>(lease.floats() + threads * each);
  Share* const shares = reinterpret_cast<Share*>(barriers + threads);
  for (int i = 0; i < threads; ++i) {
    barriers[i] = {0, 0, 0, grant.crowded()};
    shares[i] = {0};
  }
  int64_t next = 0;
  run_team(grant, [&](const Team& all) {
    for (int64_t i = 0; i < stages.count; ++i) {
      if (i > 0) all.sync();  // this stage has other teams than the last one, in the same memory
      const int64_t first = all.rank - all.rank % stages.first[i].team_size;  // of the team
      run_stage(a, stages.first[i], all, lease.floats() + first * each, barriers + first,
                shares + first, &next);
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
