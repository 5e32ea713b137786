// The GEMM of a lone operator: a team packs the weights, then writes and multiplies kChunkRows rows
// of A at a time. Scratch does not grow with M beyond one chunk.
#pragma once
#include "arena.hpp"
#include "gemm.hpp"
#include "scratch.hpp"

namespace {

// Panels of a weight for the duration of a call. A weight that is packed already stays where it is.
class CallPanels {
 public:
  explicit CallPanels(const Weights& w)
      : plain_(w), memory_(w.packed ? 0 : packed_bytes(w.N, w.K, w.precision)) {}

  // The packed weights; their panels are there after pack() by every thread, which syncs.
  Weights weights() const {
    if (plain_.packed) return plain_;
    return {plain_.precision, plain_.dtype, memory_.floats(), plain_.N, plain_.K, true};
  }
  void pack(const Team& team) const {
    if (plain_.packed) return;
    const Range mine = team.share(ceil_div(plain_.N, kNR));
    for (int64_t p = mine.begin; p < mine.end; ++p) pack_panel(plain_, p, memory_.floats());
    team.sync();
  }

 private:
  const Weights plain_;
  const vitkern::Lease memory_;
};

class ChunkedGemm {
 public:
  // A (M, K) times w, by so many threads. In place: A is where a GEMM can read it.
  ChunkedGemm(int threads, int64_t M, const Weights& w, bool in_place = false)
      : M_(M),
        panels_(w),
        w_(panels_.weights()),
        chunk_(min(M, kChunkRows)),
        shared_(in_place ? 0 : Left::floats(chunk_, w.K, w.precision)),
        for_gemm_(gemm_scratch(chunk_, w.K, w.precision)),
        per_thread_(for_gemm_ + row_stride(w.K)),
        lease_((shared_ + threads * per_thread_) * sizeof(float)) {}

  // By every thread of the team: write(m, row) makes row m of A, epilogue_at(m0) is the epilogue of
  // the chunk whose first row is m0. Ends with a sync.
  template <class Write, class EpilogueAt>
  void multiply(const Team& team, const Write& write, const EpilogueAt& epilogue_at) const {
    float* const row = scratch(team) + for_gemm_;
    multiply_filled(
        team,
        [&](const Left& A, int64_t m0, int64_t M) {
          fill(team, A, M, w_.K, row, [&](int64_t m, float* to) { write(m0 + m, to); });
          return A;
        },
        epilogue_at);
  }

  // The same where fill_rows(A, m0, M) writes the rows m0 .. m0 + M to the first of A, with a sync,
  // and returns what a GEMM reads there.
  template <class Fill, class EpilogueAt>
  void multiply_filled(const Team& team, const Fill& fill_rows,
                       const EpilogueAt& epilogue_at) const {
    const Left A = Left::at(lease_.floats(), w_.K, w_.precision);  // (chunk, K)
    each_chunk(team, epilogue_at, [&](int64_t m0, int64_t M) { return fill_rows(A, m0, M); });
  }

  // The same where row m0 of A and those after it are left_at(m0).
  template <class LeftAt, class EpilogueAt>
  void multiply_in_place(const Team& team, const LeftAt& left_at,
                         const EpilogueAt& epilogue_at) const {
    each_chunk(team, epilogue_at, [&](int64_t m0, int64_t) { return left_at(m0); });
  }

 private:
  float* scratch(const Team& team) const {
    return lease_.floats() + shared_ + team.rank * per_thread_;
  }

  // left_of(m0, M): the rows of a chunk, ready in all threads.
  template <class EpilogueAt, class LeftOf>
  void each_chunk(const Team& team, const EpilogueAt& epilogue_at, const LeftOf& left_of) const {
    if (M_) panels_.pack(team);
    for (int64_t m0 = 0; m0 < M_; m0 += chunk_) {
      const int64_t M = min(chunk_, M_ - m0);
      gemm(team, left_of(m0, M), M, w_, scratch(team), epilogue_at(m0));
      team.sync();
    }
  }

  const int64_t M_;
  const CallPanels panels_;
  const Weights w_;
  const int64_t chunk_, shared_, for_gemm_, per_thread_;  // rows; floats
  const vitkern::Lease lease_;
};

}  // namespace
