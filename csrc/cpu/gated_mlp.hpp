// The MLP of a block where it has a gate, a norm before fc2, or both: silu(gate) * value or
// activation(fc1), then LayerNorm, fc2 and the residual. Hidden rows are fp32 until all columns of
// a chunk exist, because a norm reads whole rows; they stay in cache, as in mlp.hpp.
//
// Gates and values are two weights (F, D), or the rows [0, F) and [F, 2F) of one. Panels have kNR
// rows, so that the values' part begins up to kNR - 1 rows early: their epilogue leaves those out.
#pragma once
#include "mlp.hpp"

namespace {

// hidden[m, n] *= c + bias for columns n = n0 + i - skip that are not before the first.
struct GateEpilogue {
  const float* bias;  // (F) or null
  float* hidden;      // (rows, F), gates
  int64_t stride, skip;

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t first = max(0, skip - n0);  // of this panel's columns
    float* const to = hidden + m * stride + n0 - skip;
    for (int64_t i = first; i < n; i += Vec::kLanes) {
      Vec v = Vec::load(c + i, n - i);
      if (bias) v = v + Vec::load(bias + n0 - skip + i, n - i);
      (Vec::load(to + i, n - i) * v).store(to + i, n - i);
    }
  }
};

struct GatedMlpScratch {
  int64_t chunk, stride;            // rows at a time; floats of a hidden row
  int64_t h, rows, hidden, shared;  // floats, in this order
  int64_t for_gemm, per_thread;

  GatedMlpScratch(int64_t M, int64_t D, int64_t F, Precision precision, int threads) {
    const int64_t chunks = ceil_div(M, hidden_rows(2 * F, precision, threads));
    chunk = min(M, round_up(ceil_div(M, max(chunks, 1)), kTileRows));  // of even height
    stride = row_stride(F);
    h = Left::floats(chunk, D, precision);
    rows = chunk * stride;
    hidden = Left::floats(chunk, F, precision);
    shared = h + rows + hidden;
    for_gemm = gemm_scratch(chunk, max(D, F), precision);
    per_thread = for_gemm + row_stride(max(D, F));
  }
};

struct GatedMlp {
  const float* x;  // (M, D)
  float* y;        // (M, D), may be x
  bool residual;   // add x to the result
  int64_t M, D, F;
  float eps;
  vitkern::Activation activation;
  vitkern::NormKind norm_kind;
  vitkern::NormVectors norm, inner;  // before fc1; before fc2; each may be none
  Weights gate, value, fc2;          // value: no data where there is no gate
  const float *gate_bias, *value_bias, *fc2_bias, *gamma;
  const GatedMlpScratch& n;

  // By every thread of a team, as Mlp::run. Ends with a sync.
  void run(const Team& team, float* memory, float* scratch) const {
    const Left h = Left::at(memory, D, gate.precision);  // (chunk, D)
    const Left hidden = Left::at(memory + n.h + n.rows, F, gate.precision);
    float* const rows = memory + n.h;  // (chunk, F) fp32
    const auto normed = [&](Rows of, const vitkern::NormVectors& by, int64_t width) {
      const NormKind kind = by.weight ? norm_kind : NormKind::none;
      return Norm{of, by.weight, by.bias, width, eps, nullptr, kind};
    };
    const Norm first = normed({DType::f32, x, D}, norm, D);
    const Norm second = normed({DType::f32, rows, n.stride}, inner, F);
    for (int64_t m0 = 0; m0 < M; m0 += n.chunk) {
      const int64_t count = min(n.chunk, M - m0);
      fill(team, h, count, D, scratch + n.for_gemm,
           [&](int64_t m, float* row) { first.row(m0 + m, DType::f32, row); });
      gemm(team, h, count, gate, scratch,
           StoreEpilogue<Plain>{
               .bias = gate_bias, .activation = activation, .y = {DType::f32, rows, n.stride}});
      team.sync();
      if (value.data) {
        const int64_t skip = value.first_row % kNR;
        const Weights early = value.part(-skip, F + skip, 0, D);
        gemm(team, h, count, early, scratch, GateEpilogue{value_bias, rows, n.stride, skip});
        team.sync();
      }
      fill(team, hidden, count, F, scratch + n.for_gemm,
           [&](int64_t m, float* row) { second.row(m, DType::f32, row); });
      gemm(team, hidden, count, fc2, scratch,
           ResidualEpilogue{.bias = fc2_bias,
                            .gamma = gamma,
                            .dtype = DType::f32,
                            .residual = residual ? x : nullptr,
                            .residual_stride = D,
                            .y = y,
                            .y_stride = D,
                            .N = D,
                            .first_row = m0});
      team.sync();
    }
  }
};

}  // namespace
