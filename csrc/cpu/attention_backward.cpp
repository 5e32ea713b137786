// attention_backward: dq, dk and dv of a head by one thread, a tile of queries at a time. Scores
// are computed again, so that memory is linear in S: kMostQueries rows of scores and of their
// gradient.
//
//   P = softmax(q k^T * scale + bias)      dP = dy v^T
//   dS = P * (dP - sum_j P dP) * scale     dq = dS k,   dk += dS^T q,   dv += P^T dy
#include "gradients.hpp"
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

constexpr int64_t kMostQueries = 256;  // of a tile; with 197 keys all rows of scores are 200 KiB

// Rows (n, E) of q, k, v or dy, as the right factor of x rows^T (columns = rows) and of x rows.
Weights across(Precision precision, const Rows& rows, int64_t n, int64_t E) {
  Weights w{precision, rows.dtype, rows.data, n, E, false};
  w.pitch = rows.stride;
  return w;
}

// Whether P and dS become the factors of their matmuls as soon as they are known, two queries at a
// time, instead of rows that a matmul reads or copies.
constexpr bool kFillsFactors = Left::kFillsPairs;

struct Work {  // of one thread, in floats
  int64_t queries, scores_stride, E_stride;
  int64_t scores, grads, left, ds_rows, ds_steps, p_steps, dq, dk, dv, columns, row, gemm, total;

  Work(int64_t n, int64_t E, Precision p)
      : queries(min(n, kMostQueries)), scores_stride(row_stride(n)), E_stride(row_stride(E)) {
    int64_t at = 0;
    const auto take = [&](int64_t floats) {
      const int64_t here = at;
      at += round_up(floats, kLine);
      return here;
    };
    scores = take(queries * scores_stride);
    grads = take(queries * scores_stride);
    left = take(max(max(Left::floats(queries, n, p), Left::floats(n, queries, p)),
                    Left::floats(queries, E, p)));
    ds_rows = take(kFillsFactors ? Left::floats(queries, n, p) : 0);
    ds_steps = take(kFillsFactors ? Left::floats(n, queries, p) : 0);
    p_steps = take(kFillsFactors ? Left::floats(n, queries, p) : 0);
    dq = take(queries * E_stride);
    dk = take(n * E_stride);
    dv = take(n * E_stride);
    columns = take(columns_room(queries));
    row = take(row_stride(max(max(n, E), queries)));
    gemm = take(gemm_scratch(max(n, queries), max(max(n, E), queries), p));
    total = at;
  }
};

// One head of one sequence; rows count within the sequence of n tokens.
struct HeadBackward {
  Rows q, k, v, dy;   // (n, E)
  const float* bias;  // (n, n), rows by bias_stride, or null
  int64_t bias_stride, n, E;
  float scale;
  Dropout dropout;
  uint64_t first_element;  // of the scores' row 0 in the dropout's stream
  int64_t element_stride;  // from row to row
  Precision precision;
  const Work& work;
  float* memory;

  static constexpr Team kAlone{0, 1};

  // Rows [first, first + count) of K elements as a left factor.
  Left left_rows(const Rows& rows, int64_t first, int64_t count, int64_t K) const {
    const Rows from = rows.from(first);
    if (Left::reads_in_place(rows.dtype, rows.stride))
      return Left::in_place(from.data, from.stride);
    const Left A = Left::at(memory + work.left, K, precision);
    fill(kAlone, A, count, K, memory + work.row,
         [&](int64_t m, float* to) { widen_row(from, m, to, K); });
    return A;
  }
  Left left_columns(const Rows& rows, int64_t columns, int64_t count) const {
    if (Left::reads_transposed(rows.dtype, rows.stride))
      return Left::transposed(rows.data, rows.stride);
    const Left A = Left::at(memory + work.left, count, precision);
    return fill_transposed(kAlone, A, rows, 0, columns, count, memory + work.columns);
  }
  template <class Epilogue>
  void multiply(const Left& A, int64_t M, const Weights& w, const Epilogue& epilogue) const {
    gemm(kAlone, A, M, w, memory + work.gemm, epilogue);
  }

  // Of a query: 1 / sum of e^(s - largest s), and the sum of P dP.
  struct RowSums {
    Vec inverse, delta;
  };

  // The scores' row s becomes e^(s - largest s); d: its dP.
  RowSums exponentiate(float* s, const float* d) const {
    constexpr int64_t L = Vec::kLanes, kStep = 4;  // vectors: see SoftmaxPower
    Vec top = Vec::set(-INFINITY), sum = Vec::set(0), with = Vec::set(0);
    each_vector(n, [&](int64_t j, auto count) {
      top = greater(Vec::load(s + j, count).keep_first(count, -INFINITY), top);
    });
    const Vec base = Vec::set(top.largest());
    const SoftmaxPower power(1.0f);
    int64_t j = 0;
    for (; j + kStep * L <= n; j += kStep * L) {
      Vec p[kStep];
      for (int64_t i = 0; i < kStep; ++i) p[i] = Vec::load(s + j + i * L) - base;
      power(p);
      for (int64_t i = 0; i < kStep; ++i) {
        p[i].store(s + j + i * L);
        sum = sum + p[i];
        with = fma(p[i], Vec::load(d + j + i * L), with);
      }
    }
    each_vector(n - j, [&](int64_t i, auto count) {
      Vec p[1] = {Vec::load(s + j + i, count) - base};
      power(p);
      p[0].store(s + j + i, count);
      sum = sum + p[0].keep_first(count, 0);
      with = fma(p[0].keep_first(count, 0), Vec::load(d + j + i, count), with);
    });
    const float inverse = 1 / sum.sum();
    return {Vec::set(inverse), Vec::set(with.sum() * inverse)};
  }

  void mask(int64_t query, float* row) const {
    drop(dropout, kElements, first_element + static_cast<uint64_t>(query * element_stride), row, n);
  }

  // Queries [i0, i0 + R): their dq, and what they add to dk and dv.
  void tile(int64_t i0, int64_t R) const {
    float *const s = memory + work.scores, *const d = memory + work.grads;
    const int64_t stride = work.scores_stride;
    multiply(left_rows(q, i0, R, E), R, across(precision, k, n, E),
             [&](int64_t r, int64_t j0, int64_t count, const float* c) {
               const float* const add = bias ? bias + (i0 + r) * bias_stride + j0 : nullptr;
               each_vector(count, [&](int64_t j, auto some) {
                 Vec x = Vec::load(c + j, some) * Vec::set(scale);
                 if (add) x = x + Vec::load(add + j, some);
                 x.store(s + r * stride + j0 + j, some);
               });
             });
    multiply(left_rows(dy, i0, R, E), R, across(precision, v, n, E),
             StoreRows{{DType::f32, d, stride}});
    const Left of_rows = Left::at(memory + work.ds_rows, n, precision);
    const Left ds_steps = for_steps(work.ds_steps, R), p_steps = for_steps(work.p_steps, R);
    int64_t r = 0;
    for (; r + 2 <= R; r += 2) finish(i0, r, Count<2>{}, of_rows, ds_steps, p_steps);
    if (r < R) finish(i0, r, Count<1>{}, of_rows, ds_steps, p_steps);
    const Rows p = as_rows(s, stride), ds = as_rows(d, stride);
    multiply(kFillsFactors ? of_rows : left_rows(ds, 0, R, n), R, plain_factor(precision, k, E, n),
             StoreRows{{DType::f32, memory + work.dq, work.E_stride}});
    const SumEpilogue to_dk{memory + work.dk, work.E_stride, i0 == 0};
    multiply(kFillsFactors ? ds_steps : left_columns(ds, n, R), n,
             plain_factor(precision, q.from(i0), E, R), to_dk);
    const SumEpilogue to_dv{memory + work.dv, work.E_stride, i0 == 0};
    multiply(kFillsFactors ? p_steps : left_columns(p, n, R), n,
             plain_factor(precision, dy.from(i0), E, R), to_dv);
  }

  // The factor (n, R) whose steps are queries, in memory of its own.
  template <class Factor = Left>
  Factor for_steps(int64_t at, int64_t R) const {
    const Factor A = Factor::at(memory + at, R, precision);
    if constexpr (Factor::kFillsPairs)
      return A.for_transpose(n);
    else
      return A;
  }

  // Scores and dP of the queries r .. r + count of a tile: P after its dropout and
  // dS = P (dP - delta) scale, as rows in their place or as factors.
  template <int64_t kCount, class Factor>
  void finish(int64_t i0, int64_t r, Count<kCount>, const Factor& of_rows, const Factor& ds_steps,
              const Factor& p_steps) const {
    constexpr bool kFills = Factor::kFillsPairs;
    float* s[2];
    float* d[2];
    RowSums sums[2] = {};
    for (int64_t i = 0; i < kCount; ++i) {
      s[i] = memory + work.scores + (r + i) * work.scores_stride;
      d[i] = memory + work.grads + (r + i) * work.scores_stride;
      mask(i0 + r + i, d[i]);
      sums[i] = exponentiate(s[i], d[i]);
    }
    const bool kept = !dropout.threshold;
    each_vector(n, [&](int64_t j, auto some) {
      Vec p[2] = {Vec::set(0), Vec::set(0)}, ds[2] = {Vec::set(0), Vec::set(0)};
#pragma GCC unroll 2
      for (int64_t i = 0; i < kCount; ++i) {
        p[i] = Vec::load(s[i] + j, some) * sums[i].inverse;
        ds[i] = p[i] * (Vec::load(d[i] + j, some) - sums[i].delta) * Vec::set(scale);
        if constexpr (kFills) {
          of_rows.store(r + i, j, ds[i], some);
          if (kept) continue;
        } else {
          ds[i].store(d[i] + j, some);
        }
        p[i].store(s[i] + j, some);
      }
      if constexpr (kFills) {
        ds_steps.store_steps(j, r, ds[0], ds[1]);
        if (kept) p_steps.store_steps(j, r, p[0], p[1]);
      }
    });
    if (kept) return;
    for (int64_t i = 0; i < kCount; ++i) mask(i0 + r + i, s[i]);
    if constexpr (kFills)
      each_vector(n, [&](int64_t j, auto some) {
        p_steps.store_steps(j, r, Vec::load(s[0] + j, some),
                            kCount > 1 ? Vec::load(s[1] + j, some) : Vec::set(0));
      });
  }

  // out(part, i, row): row i of dq, dk or dv (part 0, 1, 2).
  template <class Out>
  void run(const Out& out) const {
    const int64_t tiles = ceil_div(n, kMostQueries);
    for (int64_t t = 0; t < tiles; ++t) {
      const Range queries = even_part(n, t, tiles);
      tile(queries.begin, queries.end - queries.begin);
      for (int64_t i = queries.begin; i < queries.end; ++i)
        out(0, i, memory + work.dq + (i - queries.begin) * work.E_stride);
    }
    for (int64_t i = 0; i < n; ++i) {
      out(1, i, memory + work.dk + i * work.E_stride);
      out(2, i, memory + work.dv + i * work.E_stride);
    }
  }
};

}  // namespace

void attention_backward(const attention_backward_args& a) {
  int64_t longest = a.offsets ? 0 : a.S;
  for (int64_t i = 0; a.offsets && i < a.sequences; ++i)
    longest = max(longest, a.offsets[i + 1] - a.offsets[i]);
  const Precision precision = precision_of(a.dtype);
  const Work work(longest, a.E, precision);
  const Lease lease(a.threads * work.total * sizeof(float));
  run_team(a.threads, [&](const Team& team) {
    const Range heads = team.share(a.B * a.H);
    for (int64_t item = heads.begin; item < heads.end; ++item) {
      const int64_t b = item / a.H, h = item % a.H, at = b * a.b_stride + h * a.h_stride;
      const float* const bias =
          a.bias ? a.bias + b * a.bias_b_stride + h * a.bias_h_stride : nullptr;
      for (int64_t i = 0; i < a.sequences; ++i) {
        const int64_t first = a.offsets ? a.offsets[i] : 0;
        const int64_t n = a.offsets ? a.offsets[i + 1] - first : a.S;
        if (!n) continue;
        const Rows qkv = Rows{a.dtype, a.qkv, a.s_stride}.from(first, at);
        const HeadBackward head{
            .q = qkv,
            .k = qkv.from(0, a.part_stride),
            .v = qkv.from(0, 2 * a.part_stride),
            .dy = Rows{a.dtype, a.grad, a.H * a.E}.from(b * a.S + first, h * a.E),
            .bias = bias ? bias + first * (a.bias_s_stride + 1) : nullptr,
            .bias_stride = a.bias_s_stride,
            .n = n,
            .E = a.E,
            .scale = a.scale,
            .dropout = a.dropout,
            .first_element = static_cast<uint64_t>(item) * a.S * a.S + first * (a.S + 1),
            .element_stride = a.S,
            .precision = precision,
            .work = work,
            .memory = lease.floats() + team.rank * work.total};
        head.run([&](int64_t part, int64_t row, const float* values) {
          const int64_t token = b * a.S + first + row;
          narrow_row(values, a.dtype, a.dqkv, ((token * 3 + part) * a.H + h) * a.E, a.E);
        });
      }
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
