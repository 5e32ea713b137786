// The backward of weight^T behind a LayerNorm, for norm_linear and the MLP's first half: from g,
// the gradient of layernorm(x) weight^T + bias, to those of x, of both norm vectors and of the
// weight.
#pragma once
#include "gradients.hpp"

namespace {

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
        normed_(precision_of(weight.dtype), wanted.dweight ? M : 0, norm.D),
        input_(threads, g, wanted.of_input() ? M : 0, weight, N, norm.D),
        weight_(threads, g, normed_.factor(), wanted.dweight ? N : 0) {}

  // By every thread; g is ready in all of them. Ends with a sync.
  void run(const Team& team) const {
    const int64_t K = norm_.D;
    float* const rows = rows_.floats();  // the gradient of the norm's result
    if (wanted_.dbias) sum_columns(team, g_, M_, N_, wanted_.dbias);
    if (wanted_.of_input()) {
      input_.run(team, [&](int64_t m0) { return StoreRows{{DType::f32, rows, stride_}, m0}; });
      const Range mine = team.share(wanted_.dx ? M_ : 0);
      for (int64_t m = mine.begin; m < mine.end; ++m)
        norm_.row(m, rows + m * stride_, onto_, {norm_.x.dtype, wanted_.dx, K});
      norm_.vectors(team, as_rows(rows, stride_), M_, wanted_.dnorm_weight, wanted_.dnorm_bias);
      team.sync();
    }
    if (!wanted_.dweight) return;
    const Range mine = team.share(M_);
    for (int64_t m = mine.begin; m < mine.end; ++m) norm_.output(m, norm_bias_, normed_);
    team.sync();
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
  const StepRows normed_;      // (M, K)
  const InputGradient input_;
  const WeightGradient weight_;
};

}  // namespace
