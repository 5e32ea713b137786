// The memory that a group of images needs on its way through all layers (forward.cpp).
#pragma once
#include "flash.hpp"
#include "gated_mlp.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "mlp.hpp"
#include "schedule.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

inline Weights weights(const PackedLinear& l, const Weights* next = nullptr) {
  return {l.precision, DType::f32, l.panels, l.N, l.K, true, next};
}

struct Sizes {   // of a group of images
  int64_t M, P;  // rows, pixels of a patch
  DType qkv_dtype;
  int64_t qkv_stride;
  MlpScratch mlp;
  bool gated;  // or with a norm before fc2: gated_mlp.hpp
  GatedMlpScratch gated_mlp;
  int64_t attended;                         // the same: rows before attention's norm
  int64_t x, h, wide;                       // floats of the buffers that a team shares
  int64_t for_gemm, for_heads, per_thread;  // floats of a thread's scratch

  Sizes(const forward_args& a, ImageGroup group, int threads)
      : M(a.rows[group.end] - a.rows[group.begin]),
        P(a.C * a.py * a.px),
        qkv_dtype(row_dtype(a.precision)),
        qkv_stride(qkv_dtype == DType::f32 ? row_stride(3 * a.D)
                                           : 2 * row_stride(ceil_div(3 * a.D, 2))),
        mlp(M, a.D, a.F, a.precision, threads),
        gated(a.gated || (a.depth && a.blocks[0].mlp_norm.weight)),
        gated_mlp(M, a.D, a.F, a.precision, threads),
        attended(a.depth && a.blocks[0].attention_norm.weight ? round_up(M * a.D, kLine) : 0) {
    const int64_t S = a.rows[group.begin + 1] - a.rows[group.begin];  // the first has the most
    const int64_t qkv = M * qkv_stride / (qkv_dtype == DType::f32 ? 1 : 2);
    x = round_up(M * a.D, kLine);
    h = Left::floats(M, max(a.D, P), a.precision);
    if (a.order == Order::post_norm) h = max(h, x);  // the MLP's result, before its norm
    wide = round_up(max(qkv, gated ? gated_mlp.shared : mlp.shared), kLine);
    for_gemm = max(gemm_scratch(M, max(a.D, P), a.precision),
                   gated ? gated_mlp.per_thread : mlp.per_thread);
    for_heads = max(FlashScratch(S, a.D / a.H, a.precision).total, row_stride(max(a.D, P)));
    for_heads = max(for_heads, row_stride(a.D / a.H));
    per_thread = for_gemm + for_heads;
  }
  int64_t shared() const { return x + h + wide + attended; }
};

}  // namespace
}  // namespace vitkern::VITKERN_ISA
