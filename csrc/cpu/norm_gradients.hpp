// The backward of weight^T behind a LayerNorm, for norm_linear and the MLP's first half: from g,
// the gradient of layernorm(x) weight^T + bias, to those of x, of both norm vectors and of the
// weight.
#pragma once
#include "gradients.hpp"

namespace {

// What a visit of a LayerNorm's row makes; a null is not wanted.
template <class Target>
struct NormRow {
  const Rows* onto = nullptr;   // (M, D) in x's dtype: added to dx
  void* dx = nullptr;           // (M, D) in x's dtype
  float* dweight = nullptr;     // (D): dy * xhat is added
  float* dbias = nullptr;       // (D): dy is added
  bool first = false;           // overwrite both instead
  const Target* y = nullptr;    // y itself again
  const float* bias = nullptr;  // (D), of y
};

// y = xhat * weight + bias with xhat = (x - mean) * rstd: gradients, and y itself again.
struct NormGradient {
  Rows x;               // (M, D)
  const float* stats;   // (M, 2): mean, rstd
  const float* weight;  // (D) or null
  int64_t D;

  // Row m, whose dy (D) is fp32 and may be y's row.
  template <class Target>
  void visit(int64_t m, const float* dy, const NormRow<Target>& to) const {
    with_type(x.dtype, [&](auto type) { visit_as(type, m, dy, to); });
  }

 private:
  template <class Type, class Target>
  void visit_as(Type type, int64_t m, const float* dy, const NormRow<Target>& to) const {
    const void* const row = x.row(m);
    const Vec centre = Vec::set(stats[2 * m]), rstd = Vec::set(stats[2 * m + 1]);
    const auto normalised = [&](int64_t i, auto n) {
      return (load_as(type, row, i, n) - centre) * rstd;
    };
    const auto weighted = [&](int64_t i, auto n) {
      const Vec v = Vec::load(dy + i, n);
      return weight ? v * Vec::load(weight + i, n) : v;
    };
    Vec mean = Vec::set(0), slope = Vec::set(0);
    if (to.dx) {
      each_vector(D, [&](int64_t i, auto n) {
        const Vec g = weighted(i, n).keep_first(n, 0);
        mean = mean + g;
        slope = fma(g, normalised(i, n), slope);
      });
      const float count = static_cast<float>(D);
      mean = Vec::set(mean.sum() / count), slope = Vec::set(slope.sum() / count);
    }
    each_vector(D, [&](int64_t i, auto n) {
      const Vec xhat = normalised(i, n), g = dy ? Vec::load(dy + i, n) : xhat;
      const auto add = [&](float* sums, Vec v) {
        (to.first ? v : Vec::load(sums + i, n) + v).store(sums + i, n);
      };
      if (to.dx) {
        Vec d = rstd * (weighted(i, n) - mean - xhat * slope);
        if (to.onto) d = load_as(type, to.onto->row(m), i, n) + d;
        store_as(type, to.dx, m * D + i, d, n);
      }
      if (to.dweight) add(to.dweight, g * xhat);
      if (to.dbias) add(to.dbias, g);
      if (to.y) {
        const Vec shift = to.bias ? Vec::load(to.bias + i, n) : Vec::set(0);
        to.y->store(m, i, weight ? fma(xhat, Vec::load(weight + i, n), shift) : xhat + shift, n);
      }
    });
  }
};

// What a LayerNorm and a linear layer behind it want; a null is not computed.
struct NormLinearGradients {
  void* dx;             // (M, K) in x's dtype
  float* dnorm_weight;  // (K)
  float* dnorm_bias;    // (K)
  void* dweight;        // (N, K) in the weight's dtype
  float* dbias;         // (N)

  bool of_input() const { return dx || dnorm_weight || dnorm_bias; }
};

class NormLinearBackward {
 public:
  // g (M, N); weight (N, K) contiguous; `onto` (M, K) is added to dx, or null.
  NormLinearBackward(int threads, const Rows& g, const NormGradient& norm, const float* norm_bias,
                     const Rows& weight, int64_t M, int64_t N, const Rows* onto,
                     const NormLinearGradients& wanted)
      : g_(g),
        norm_(norm),
        norm_bias_(norm_bias),
        M_(M),
        N_(N),
        onto_(onto),
        wanted_(wanted),
        w_dtype_(weight.dtype),
        stride_(row_stride(norm.D)),
        rows_(wanted.of_input() ? M * stride_ * sizeof(float) : 0),
        sums_(wanted.dnorm_weight || wanted.dnorm_bias ? M : 0, norm.D, 2),
        normed_(precision_of(weight.dtype), wanted.dweight ? M : 0, norm.D),
        input_(threads, g, wanted.of_input() ? M : 0, weight, N, norm.D),
        weight_(threads, g, normed_.factor(), wanted.dweight ? N : 0) {}

  // By every thread; g is ready in all of them. Ends with a sync.
  void run(const Team& team) const {
    const int64_t K = norm_.D;
    float* const rows = rows_.floats();  // the gradient of the norm's result
    if (wanted_.dbias) sum_columns(team, g_, M_, N_, wanted_.dbias);
    if (wanted_.of_input())
      input_.run(team, [&](int64_t m0) { return StoreRows{{DType::f32, rows, stride_}, m0}; });
    PartialSums::each_part(team, M_, [&](int64_t part, Range some) {
      NormRow<StepRows> made{.onto = onto_,
                             .dx = wanted_.dx,
                             .dweight = wanted_.dnorm_weight ? sums_.of(part, 0) : nullptr,
                             .dbias = wanted_.dnorm_bias ? sums_.of(part, 1) : nullptr,
                             .y = wanted_.dweight ? &normed_ : nullptr,
                             .bias = norm_bias_};
      for (int64_t m = some.begin; m < some.end; ++m) {
        made.first = m == some.begin;
        norm_.visit(m, wanted_.of_input() ? rows + m * stride_ : nullptr, made);
      }
    });
    team.sync();
    if (wanted_.dnorm_weight) sums_.finish(team, 0, wanted_.dnorm_weight);
    if (wanted_.dnorm_bias) sums_.finish(team, 1, wanted_.dnorm_bias);
    if (!wanted_.dweight) return team.sync();
    weight_.run(team, StoreRows{{w_dtype_, wanted_.dweight, K}});
  }

 private:
  const Rows g_;
  const NormGradient norm_;
  const float* const norm_bias_;
  const int64_t M_, N_;
  const Rows* const onto_;
  const NormLinearGradients wanted_;
  const DType w_dtype_;
  const int64_t stride_;
  const vitkern::Lease rows_;  // (M, K)
  const PartialSums sums_;     // of the norm's two vectors
  const StepRows normed_;      // (M, K)
  const InputGradient input_;
  const WeightGradient weight_;
};

}  // namespace
