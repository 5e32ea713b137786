// Pieces of the backward kernels: gradients of a linear layer's input and weight, and sums over
// rows. Those of a LayerNorm are in norm_gradients.hpp, of an activation in slopes.hpp.
//
//   y (M, N) = x (M, K) weight^T        dx = dy weight         inner steps: N, weight read by steps
//                                       dweight = dy^T x       inner steps: M, dy^T read in place
//
// Sums over rows belong to one thread for each column, so that the number of threads does not show.
#pragma once
#include "chunks.hpp"
#include "epilogue.hpp"
#include "loops.hpp"
#include "rows.hpp"
#include "transpose.hpp"

namespace {

inline Rows as_rows(const float* data, int64_t stride) { return {DType::f32, data, stride}; }

// ---- Sums over rows --------------------------------------------------------------

constexpr int64_t kSumColumns = 64;  // at a time: eight vectors with AVX2
constexpr int64_t kPartRows = 16;    // of which plain sums are made first

// sums[n] = the sum over rows m < M of g[m][n]; the team shares the columns. The sums of kPartRows
// rows are added up with compensation (Kahan): what an addition rounds off is kept for the next,
// because PyTorch's sums are pairwise and thousands of rows are added here. No sync.
inline void sum_columns(const Team& team, const Rows& g, int64_t M, int64_t N, float* sums) {
  constexpr int64_t L = Vec::kLanes, kVectors = kSumColumns / L;
  const Range mine = team.share(N, kSumColumns);
  const auto columns = [&](auto type, int64_t n0, auto count) {
    Vec sum[kVectors], lost[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) sum[v] = lost[v] = Vec::set(0);
    for (int64_t m0 = 0; m0 < M; m0 += kPartRows) {
      const int64_t m1 = min(M, m0 + kPartRows);
      Vec part[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) part[v] = Vec::set(0);
      for (int64_t m = m0; m < m1; ++m)
#pragma GCC unroll 16
        for (int64_t v = 0; v < kVectors; ++v)
          if (v * L < count)
            part[v] = part[v] + load_as(type, g.data, m * g.stride + n0 + v * L, count - v * L);
#pragma GCC unroll 16
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vec term = part[v] - lost[v], next = sum[v] + term;
        lost[v] = (next - sum[v]) - term;
        sum[v] = next;
      }
    }
    for (int64_t v = 0; v * L < count; ++v) sum[v].store(sums + n0 + v * L, count - v * L);
  };
  with_type(g.dtype, [&](auto type) {
    for (int64_t n0 = mine.begin; n0 < mine.end; n0 += kSumColumns)
      if (n0 + kSumColumns <= mine.end)
        columns(type, n0, Count<kSumColumns>{});
      else
        columns(type, n0, mine.end - n0);
  });
}

// Sums over rows that are at hand one after another: those of kPartRows rows first, then those of
// all parts. Which rows are a part does not depend on the threads.
class PartialSums {
 public:
  // `kinds` sums of N columns each over M rows.
  PartialSums(int64_t M, int64_t N, int64_t kinds = 1)
      : parts_(ceil_div(M, kPartRows)),
        N_(N),
        stride_(row_stride(N)),
        rows_(kinds * parts_ * stride_ * sizeof(float)) {}

  // body(part, rows) for this thread's share of the parts of M rows.
  template <class Body>
  static void each_part(const Team& team, int64_t M, const Body& body) {
    const Range mine = team.share(ceil_div(M, kPartRows));
    for (int64_t part = mine.begin; part < mine.end; ++part)
      body(part, Range{part * kPartRows, min(M, (part + 1) * kPartRows)});
  }

  // The sum of a part (N), which its first row overwrites.
  float* of(int64_t part, int64_t kind) const {
    return rows_.floats() + (kind * parts_ + part) * stride_;
  }
  // Adds a row (N) to the sum of its part.
  void add(int64_t part, bool first, int64_t kind, const float* row) const {
    float* const sum = of(part, kind);
    each_vector(N_, [&](int64_t i, auto n) {
      const Vec v = Vec::load(row + i, n);
      (first ? v : Vec::load(sum + i, n) + v).store(sum + i, n);
    });
  }

  // After a sync: sums (N), whose columns the team shares.
  void finish(const Team& team, int64_t kind, float* sums) const {
    sum_columns(team, as_rows(of(0, kind), stride_), parts_, N_, sums);
  }

 private:
  const int64_t parts_, N_, stride_;
  const vitkern::Lease rows_;
};

// ---- Linear ----------------------------------------------------------------------

// The factor x (M, K) of a weight gradient, written a part of a row at a time: where the GEMM reads
// it if its panels take one step after another, or else as rows.
class StepRows {
 public:
  StepRows(Precision precision, int64_t M, int64_t K)
      : M_(M),
        K_(K),
        stride_(row_stride(K)),
        precision_(precision),
        memory_(kPacksSteps ? packed_bytes(K, M, precision)
                            : M * stride_ * bytes_of(kFactorDtype)) {}

  // Elements k onwards of row m, of which n count; k is a multiple of the lanes.
  void store(int64_t m, int64_t k, Vec v, int64_t n) const {
    if constexpr (!kPacksSteps) return store_as(kFactorDtype, memory_.floats(), place(m, k), v, n);
    float* const to = memory_.floats() + place(m, k);
    v.store(to);
    if (n <= Vec::kLanes)  // the panel's other columns must be numbers
      for (int64_t j = Vec::kLanes; (k + j) % kNR; j += Vec::kLanes) Vec::set(0).store(to + j);
  }
  const void* at(int64_t m, int64_t k) const {
    return offset(kFactorDtype, memory_.floats(), place(m, k));
  }
  Weights factor() const {
    if constexpr (kPacksSteps)
      return {precision_, DType::f32, memory_.floats(), K_, M_, true};
    else
      return plain_factor(precision_, Rows{kFactorDtype, memory_.floats(), stride_}, K_, M_);
  }

 private:
  int64_t place(int64_t m, int64_t k) const {
    return kPacksSteps ? (k / kNR * M_ + m) * kNR + k % kNR : m * stride_ + k;
  }

  const int64_t M_, K_, stride_;
  const Precision precision_;
  const vitkern::Lease memory_;
};

// Rows [0, N) of A = the columns n0 .. n0 + N of g (M rows), by a team, as a GEMM then reads them;
// `columns` is this thread's room for kColumnsAtOnce rows of M. Ends with a sync.
constexpr int64_t kColumnsAtOnce = 32;
inline int64_t columns_room(int64_t M) {
  return Left::kFillsTransposed ? 0 : kColumnsAtOnce * row_stride(M);
}

template <class Factor>
Factor fill_transposed(const Team& team, const Factor& A, const Rows& g, int64_t n0, int64_t N,
                       int64_t M, float* columns) {
  constexpr int64_t L = Vec::kLanes;
  if constexpr (Factor::kFillsTransposed) {
    const Factor across = A.for_transpose(N);
    across.take_steps(team, g.from(0, n0), N, M);
    team.sync();
    return across;
  }
  const int64_t stride = row_stride(M);
  const Range mine = team.share(N, kColumnsAtOnce);
  for (int64_t n = mine.begin; n < mine.end; n += kColumnsAtOnce) {
    const int64_t count = min(kColumnsAtOnce, mine.end - n);
    float* to[kColumnsAtOnce];
    for (int64_t j = 0; j < count; ++j) to[j] = A.open(n + j, columns + j * stride);
    for (int64_t m = 0; m < M; m += L)
      for (int64_t j = 0; j < count; j += L) {
        Vec block[L];
        for (int64_t i = 0; i < L; ++i)
          block[i] = m + i < M
                         ? load_as(g.dtype, g.data, (m + i) * g.stride + n0 + n + j, count - j)
                         : Vec::set(0);
        transpose(block);
        for (int64_t i = 0; i < min(L, count - j); ++i) block[i].store(to[j + i] + m, M - m);
      }
    for (int64_t j = 0; j < count; ++j) A.close(n + j, to[j], M);
  }
  team.sync();
  return A;
}

// dx (M, K) = g (M, N) weight (N, K). epilogue_at(m0) as in ChunkedGemm.
class InputGradient {
 public:
  InputGradient(int threads, const Rows& g, int64_t M, const Rows& weight, int64_t N, int64_t K)
      : g_(g),
        N_(N),
        in_place_(Left::reads_in_place(g.dtype, g.stride)),
        chunks_(threads, M, plain_factor(precision_of(weight.dtype), weight, K, N), in_place_) {}

  template <class EpilogueAt>
  void run(const Team& team, const EpilogueAt& epilogue_at) const {
    if (in_place_)
      chunks_.multiply_in_place(
          team, [&](int64_t m0) { return Left::in_place(g_.row(m0), g_.stride); }, epilogue_at);
    else
      chunks_.multiply(
          team, [&](int64_t m, float* row) { widen_row(g_, m, row, N_); }, epilogue_at);
  }

 private:
  const Rows g_;
  const int64_t N_;
  const bool in_place_;
  const ChunkedGemm chunks_;
};

// dweight (N, K) = g^T (N, M) x (M, K), where x is plain_factor() or StepRows.
class WeightGradient {
 public:
  WeightGradient(int threads, const Rows& g, const Weights& x, int64_t N)
      : g_(g),
        M_(x.K),
        in_place_(Left::reads_transposed(g.dtype, g.stride)),
        room_(in_place_ ? 0 : columns_room(M_)),
        columns_(threads * room_ * sizeof(float)),
        chunks_(threads, N, x, in_place_) {}

  // epilogue(n, k0, count, c): elements k0 onwards of row n of dweight.
  template <class Epilogue>
  void run(const Team& team, const Epilogue& epilogue) const {
    const auto epilogue_at = [&](int64_t n0) {
      return [&, n0](int64_t n, int64_t k0, int64_t count, float* c) {
        epilogue(n0 + n, k0, count, c);
      };
    };
    if (in_place_)
      chunks_.multiply_in_place(
          team, [&](int64_t n0) { return Left::transposed(g_.from(0, n0).data, g_.stride); },
          epilogue_at);
    else
      chunks_.multiply_filled(
          team,
          [&](const Left& A, int64_t n0, int64_t N) {
            return fill_transposed(team, A, g_, n0, N, M_, columns_.floats() + team.rank * room_);
          },
          epilogue_at);
  }

 private:
  const Rows g_;
  const int64_t M_;
  const bool in_place_;
  const int64_t room_;
  const vitkern::Lease columns_;
  const ChunkedGemm chunks_;
};

// Stores a row's part of a result.
struct StoreRows {
  Plain to;
  int64_t first_row = 0;
  void operator()(int64_t m, int64_t n0, int64_t n, const float* c) const {
    for (int64_t i = 0; i < n; i += kLine)
      __builtin_prefetch(to.at(first_row + m + kRowsAhead, n0 + i), 1);
    with_type(to.dtype, [&](auto type) {
      each_vector(n, [&](int64_t i, auto count) {
        store_as(type, to.data, (first_row + m) * to.stride + n0 + i, Vec::load(c + i, count),
                 count);
      });
    });
  }
};

// The gradient of a branch that ends in dropout, LayerScale and drop-path: g before gamma.
struct BranchGradient {
  Rows grad;        // (M, N)
  int64_t N, S;     // S rows to a sample
  Dropout dropout;  // of elements
  Dropout path;

  bool is_grad() const { return !dropout.threshold && !path.threshold; }
  void row(int64_t m, float* to) const {
    const float factor = path_factor(path, m / S);
    if (factor == 0) {  // gone even where it is not finite
      memset(to, 0, N * sizeof(float));
      return;
    }
    widen_row(grad, m, to, N);
    if (factor != 1)
      for (int64_t i = 0; i < N; i += Vec::kLanes)
        (Vec::load(to + i, N - i) * Vec::set(factor)).store(to + i, N - i);
    drop(dropout, kElements, static_cast<uint64_t>(m * N), to, N);
  }
};

}  // namespace
