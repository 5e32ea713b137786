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

struct Work {  // of one thread, in floats
  int64_t queries, scores_stride, E_stride;
  int64_t scores, grads, left, dq, dk, dv, columns, row, gemm, total;

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

  // The scores' row of query i -> softmax, in place.
  void softmax_row(float* s) const {
    Vec top = Vec::set(-INFINITY);
    for (int64_t j = 0; j < n; j += Vec::kLanes)
      top = greater(Vec::load(s + j, n - j).keep_first(n - j, -INFINITY), top);
    const Vec base = Vec::set(top.largest());
    Vec sum = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kLanes) {
      const Vec p = exp(Vec::load(s + j, n - j) - base).keep_first(n - j, 0);
      p.store(s + j, n - j);
      sum = sum + p;
    }
    const Vec inverse = Vec::set(1 / sum.sum());
    for (int64_t j = 0; j < n; j += Vec::kLanes)
      (Vec::load(s + j, n - j) * inverse).store(s + j, n - j);
  }

  // dP -> dS = P (dP - sum P dP) scale, in place.
  void score_gradient(const float* p, float* d) const {
    Vec sum = Vec::set(0);
    for (int64_t j = 0; j < n; j += Vec::kLanes)
      sum = fma(Vec::load(p + j, n - j), Vec::load(d + j, n - j).keep_first(n - j, 0), sum);
    const Vec delta = Vec::set(sum.sum()), by = Vec::set(scale);
    for (int64_t j = 0; j < n; j += Vec::kLanes)
      (Vec::load(p + j, n - j) * (Vec::load(d + j, n - j) - delta) * by).store(d + j, n - j);
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
               for (int64_t j = 0; j < count; j += Vec::kLanes) {
                 Vec x = Vec::load(c + j, count - j) * Vec::set(scale);
                 if (add) x = x + Vec::load(add + j, count - j);
                 x.store(s + r * stride + j0 + j, count - j);
               }
             });
    multiply(left_rows(dy, i0, R, E), R, across(precision, v, n, E),
             StoreRows{{DType::f32, d, stride}});
    for (int64_t r = 0; r < R; ++r) {
      softmax_row(s + r * stride);
      mask(i0 + r, d + r * stride);
      score_gradient(s + r * stride, d + r * stride);
      mask(i0 + r, s + r * stride);
    }
    const Rows ds = as_rows(d, stride);
    multiply(left_rows(ds, 0, R, n), R, plain_factor(precision, k, E, n),
             StoreRows{{DType::f32, memory + work.dq, work.E_stride}});
    const SumEpilogue to_dk{memory + work.dk, work.E_stride, i0 == 0};
    multiply(left_columns(ds, n, R), n, plain_factor(precision, q.from(i0), E, R), to_dk);
    const SumEpilogue to_dv{memory + work.dv, work.E_stride, i0 == 0};
    multiply(left_columns(as_rows(s, stride), n, R), n, plain_factor(precision, dy.from(i0), E, R),
             to_dv);
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
