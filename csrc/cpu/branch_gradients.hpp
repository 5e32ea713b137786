// The backward of a linear layer whose result joins the residual stream, for linear_residual and
// the MLP's second half: y = residual + drop_path(gamma * dropout(x weight^T + bias)).
//
// `raw` is the gradient after both masks and before gamma. gamma scales rows of the weight, so one
// matmul raw^T x gives both: dweight[n] = gamma[n] (raw^T x)[n], and
// dgamma[n] = sum_k (raw^T x)[n][k] weight[n][k] + bias[n] sum_m raw[m][n].
#pragma once
#include "gradients.hpp"

namespace {

struct BranchLinear {
  Rows weight;  // (N, K) contiguous
  const float* bias;
  const float* gamma;
  int64_t M, N, K;
};

// A null is not computed.
struct BranchGradients {
  void* dweight;  // (N, K) in the weight's dtype
  float* dbias;   // (N)
  float* dgamma;  // (N)

  bool of_weight() const { return dweight || dgamma; }
};

class BranchBackward {
 public:
  // x (M, K), as WeightGradient takes it, is read when run_weight is called.
  BranchBackward(int threads, const BranchGradient& branch, const BranchLinear& layer,
                 const Weights& x, const BranchGradients& wanted)
      : branch_(branch),
        layer_(layer),
        wanted_(wanted),
        stride_(row_stride(layer.N)),
        panels_(ceil_div(layer.K, kPart)),
        raw_rows_(branch.is_grad() ? 0 : layer.M * stride_ * sizeof(float)),
        scaled_rows_(layer.gamma ? layer.M * stride_ * sizeof(float) : 0),
        parts_((wanted.dgamma ? layer.N * (panels_ + 1) : 0) * sizeof(float)),
        weight_(threads, raw(), x, wanted.of_weight() ? layer.N : 0) {}

  Rows raw() const {
    return branch_.is_grad() ? branch_.grad : as_rows(raw_rows_.floats(), stride_);
  }
  Rows scaled() const { return layer_.gamma ? as_rows(scaled_rows_.floats(), stride_) : raw(); }

  // Makes raw() and scaled(), which are then ready in all threads, and dbias.
  void prepare(const Team& team) const {
    const Range rows = team.share(branch_.is_grad() && !layer_.gamma ? 0 : layer_.M);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      if (!branch_.is_grad()) branch_.row(m, raw_rows_.floats() + m * stride_);
      if (!layer_.gamma) continue;
      const Rows from = raw();
      each_vector(layer_.N, [&](int64_t i, auto n) {
        (load_as(from.dtype, from.data, m * from.stride + i, n) * Vec::load(layer_.gamma + i, n))
            .store(scaled_rows_.floats() + m * stride_ + i, n);
      });
    }
    team.sync();
    if (wanted_.dbias) sum_columns(team, scaled(), layer_.M, layer_.N, wanted_.dbias);
    if (wanted_.dgamma && layer_.bias)
      sum_columns(team, raw(), layer_.M, layer_.N, parts_.floats() + layer_.N * panels_);
  }

  // dweight and dgamma. Ends with a sync.
  void run_weight(const Team& team) const {
    if (!wanted_.of_weight()) return;
    const DType dtype = layer_.weight.dtype;
    const int64_t K = layer_.K;
    weight_.run(team, [&](int64_t n, int64_t k0, int64_t count, const float* c) {
      if (wanted_.dgamma) {
        Vec dot = Vec::set(0);
        for (int64_t i = 0; i < count; i += Vec::kLanes)
          dot = fma(Vec::load(c + i, count - i),
                    load_as(dtype, layer_.weight.data, n * K + k0 + i, count - i), dot);
        parts_.floats()[n * panels_ + k0 / kPart] = dot.sum();
      }
      if (!wanted_.dweight) return;
      const Vec by = Vec::set(layer_.gamma ? layer_.gamma[n] : 1.0f);
      each_vector(count, [&](int64_t i, auto some) {
        store_as(dtype, wanted_.dweight, n * K + k0 + i, Vec::load(c + i, some) * by, some);
      });
    });
    const Range mine = team.share(wanted_.dgamma ? layer_.N : 0);
    for (int64_t n = mine.begin; n < mine.end; ++n) {
      const float* const part = parts_.floats() + n * panels_;
      double sum = layer_.bias ? layer_.bias[n] * parts_.floats()[layer_.N * panels_ + n] : 0.0f;
      for (int64_t p = 0; p < panels_; ++p) sum += part[p];
      wanted_.dgamma[n] = static_cast<float>(sum);
    }
    team.sync();
  }

 private:
  static constexpr int64_t kPart = kNR;  // columns of one call of the epilogue

  const BranchGradient branch_;
  const BranchLinear layer_;
  const BranchGradients wanted_;
  const int64_t stride_, panels_;
  const vitkern::Lease raw_rows_, scaled_rows_, parts_;
  const WeightGradient weight_;
};

}  // namespace
