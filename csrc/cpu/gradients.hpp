// Pieces of the backward kernels: gradients of a linear layer's input and weight, of a LayerNorm's
// rows and vectors, of an activation, and sums over rows.
//
//   y (M, N) = x (M, K) weight^T        dx = dy weight         inner steps: N, weight read by steps
//                                       dweight = dy^T x       inner steps: M, dy^T read in place
//
// Sums over rows belong to one thread for each column, so that the number of threads does not show.
#pragma once
#include "chunks.hpp"
#include "epilogue.hpp"
#include "rows.hpp"
#include "transpose.hpp"

namespace {

constexpr int64_t kSumColumns = 64;  // at a time: eight vectors with AVX2

inline Rows as_rows(const float* data, int64_t stride) { return {DType::f32, data, stride}; }

// sums[n] = the sum over m < M of value(m, n, count), a vector of elements n onwards of row m; the
// team shares the columns. Compensated (Kahan): what an addition rounds off is kept for the next,
// because PyTorch's sums are pairwise and thousands of rows are added here. No sync.
template <class Value>
void sum_columns(const Team& team, int64_t M, int64_t N, float* sums, const Value& value) {
  constexpr int64_t L = Vec::kLanes, kVectors = kSumColumns / L;
  const Range mine = team.share(N, kSumColumns);
  for (int64_t n0 = mine.begin; n0 < mine.end; n0 += kSumColumns) {
    const int64_t vectors = ceil_div(min(kSumColumns, mine.end - n0), L);
    Vec sum[kVectors], lost[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) sum[v] = lost[v] = Vec::set(0);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t v = 0; v < vectors; ++v) {
        const Vec term = value(m, n0 + v * L, mine.end - n0 - v * L) - lost[v];
        const Vec next = sum[v] + term;
        lost[v] = (next - sum[v]) - term;
        sum[v] = next;
      }
    for (int64_t v = 0; v < vectors; ++v) sum[v].store(sums + n0 + v * L, mine.end - n0 - v * L);
  }
}

inline void sum_columns(const Team& team, const Rows& g, int64_t M, int64_t N, float* sums) {
  sum_columns(team, M, N, sums, [&](int64_t m, int64_t n, int64_t count) {
    return load_as(g.dtype, g.data, m * g.stride + n, count);
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

  // Adds a row (N) to the sum of its part.
  void add(int64_t part, bool first, int64_t kind, const float* row) const {
    float* const sum = rows_.floats() + (kind * parts_ + part) * stride_;
    for (int64_t i = 0; i < N_; i += Vec::kLanes) {
      const Vec v = Vec::load(row + i, N_ - i);
      (first ? v : Vec::load(sum + i, N_ - i) + v).store(sum + i, N_ - i);
    }
  }

  // After a sync: sums (N), whose columns the team shares.
  void finish(const Team& team, int64_t kind, float* sums) const {
    sum_columns(team, as_rows(rows_.floats() + kind * parts_ * stride_, stride_), parts_, N_, sums);
  }

 private:
  static constexpr int64_t kPartRows = 16;

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
    const Range mine = team.share(M, 2);
    for (int64_t m = mine.begin; m < mine.end; m += 2)
      for (int64_t n = 0; n < N; n += L) {
        const Rows from = g.from(m, n0 + n);
        const Vec odd = m + 1 < M ? load_as(g.dtype, from.data, g.stride, N - n) : Vec::set(0);
        across.store_steps(n, m, load_as(g.dtype, from.data, 0, N - n), odd);
      }
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
    for (int64_t i = 0; i < n; i += Vec::kLanes)
      to.store(first_row + m, n0 + i, Vec::load(c + i, n - i), n - i);
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

// ---- LayerNorm -------------------------------------------------------------------

// y = xhat * weight + bias with xhat = (x - mean) * rstd: gradients, and y itself again.
struct NormGradient {
  Rows x;               // (M, D)
  const float* stats;   // (M, 2): mean, rstd
  const float* weight;  // (D) or null
  int64_t D;

  Vec normalised(int64_t m, int64_t i) const {
    const Vec v = load_as(x.dtype, x.data, m * x.stride + i, D - i);
    return (v - Vec::set(stats[2 * m])) * Vec::set(stats[2 * m + 1]);
  }
  Vec weighted(const float* dy, int64_t i) const {
    const Vec v = Vec::load(dy + i, D - i);
    return weight ? v * Vec::load(weight + i, D - i) : v;
  }

  // dx of row m from dy (D) fp32, added to row m of `onto` unless that is null.
  void row(int64_t m, const float* dy, const Rows* onto, const Plain& dx) const {
    Vec sum = Vec::set(0), with = Vec::set(0);
    for (int64_t i = 0; i < D; i += Vec::kLanes) {
      const Vec g = weighted(dy, i).keep_first(D - i, 0);
      sum = sum + g;
      with = fma(g, normalised(m, i), with);
    }
    const float count = static_cast<float>(D);
    const Vec mean = Vec::set(sum.sum() / count), slope = Vec::set(with.sum() / count),
              rstd = Vec::set(stats[2 * m + 1]);
    for (int64_t i = 0; i < D; i += Vec::kLanes) {
      Vec d = rstd * (weighted(dy, i) - mean - normalised(m, i) * slope);
      if (onto) d = load_as(onto->dtype, onto->data, m * onto->stride + i, D - i) + d;
      dx.store(m, i, d, D - i);
    }
  }

  // Sums over rows of dy * xhat and of dy; each may be null. No sync.
  void vectors(const Team& team, const Rows& dy, int64_t M, float* dweight, float* dbias) const {
    if (dweight)
      sum_columns(team, M, D, dweight, [&](int64_t m, int64_t n, int64_t count) {
        return load_as(dy.dtype, dy.data, m * dy.stride + n, count) * normalised(m, n);
      });
    if (dbias) sum_columns(team, dy, M, D, dbias);
  }

  // Row m of y.
  template <class Target>
  void output(int64_t m, const float* bias, const Target& y) const {
    for (int64_t i = 0; i < D; i += Vec::kLanes) {
      const Vec xhat = normalised(m, i), add = bias ? Vec::load(bias + i, D - i) : Vec::set(0);
      y.store(m, i, weight ? fma(xhat, Vec::load(weight + i, D - i), add) : xhat + add, D - i);
    }
  }
};

// ---- Activations -----------------------------------------------------------------

struct ValueAndSlope {
  Vec value, slope;
};

// Phi(-a) for a >= 0, where e = e^(-a^2 / 2) is known: e t P(t) with t = 1 / (1 + 0.35 a), error
// 1e-8 (tools/fit_math.py).
inline Vec normal_tail(Vec a, Vec e) {
  const Vec one = Vec::set(1.0f), t = one / fma(a, Vec::set(0.35f), one);
  Vec p = Vec::set(0.03208461031317711f);
  p = fma(p, t, Vec::set(-0.12606698274612427f));
  p = fma(p, t, Vec::set(0.09900572896003723f));
  p = fma(p, t, Vec::set(0.12243156880140305f));
  p = fma(p, t, Vec::set(0.07927267998456955f));
  p = fma(p, t, Vec::set(0.1558007150888443f));
  p = fma(p, t, Vec::set(0.13747169077396393f));
  return p * t * e;
}

// s(z) = 1 / (1 + e^-z), and s(z) s(-z), its derivative, without the cancellation of 1 - s.
struct Logistic {
  Vec value, slope;
  explicit Logistic(Vec z) {
    const Vec one = Vec::set(1.0f), e = exp(Vec::set(0) - magnitude(z)), r = one / (one + e);
    value = select_less(z, Vec::set(0), e * r, r);
    slope = e * r * r;
  }
};

inline ValueAndSlope activate_with_slope(Activation name, Vec x) {
  const Vec one = Vec::set(1.0f), half = Vec::set(0.5f);
  switch (name) {
    case Activation::none:
      return {x, one};
    case Activation::gelu: {  // Phi(x) + x phi(x)
      const Vec e = exp(x * x * Vec::set(-0.5f)), tail = normal_tail(magnitude(x), e);
      const Vec below = select_less(x, Vec::set(0), tail, one - tail);
      return {x * below, fma(x * e, Vec::set(0.39894228f), below)};
    }
    case Activation::gelu_tanh: {
      constexpr float kScale = 2 * 0.79788456f, kCube = 0.044715f;
      const Vec square = x * x;
      const Logistic s(x * fma(square, Vec::set(kCube), one) * Vec::set(kScale));
      const Vec inner = fma(square, Vec::set(3 * kCube), one) * Vec::set(kScale);
      return {x * s.value, fma(x * s.slope, inner, s.value)};
    }
    case Activation::quick_gelu: {
      const Logistic s(x * Vec::set(1.702f));
      return {x * s.value, fma(x * s.slope, Vec::set(1.702f), s.value)};
    }
    case Activation::silu: {
      const Logistic s(x);
      return {x * s.value, fma(x, s.slope, s.value)};
    }
    case Activation::tanh: {  // 1 - t^2, where it does not cancel; 2 s(2x) - 1 has the same slope
      const Vec t = tanh(x), far = Logistic(x + x).slope * Vec::set(4.0f);
      return {t, select_less(magnitude(t), half, one - t * t, far)};
    }
  }
  return {x, one};
}

}  // namespace
