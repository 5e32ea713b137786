// One group of images through all layers by one team of threads (forward.cpp).
//
// Images of a group may differ in size: their rows lie one after another, without padding. GEMMs
// and norms work row by row and never see where an image ends; patches, attention and pooling do.
#pragma once
#include "forward_sizes.hpp"
#include "group_rows.hpp"
#include "kernels.hpp"
#include "patches.hpp"
#include "steps.hpp"
#include "turn.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

// x (M, D) is the residual stream.
struct Pass : GroupRows {
  const Sizes& n;
  const Team& team;
  // (M, D), (M, D or P), (M, 3D) or the MLP's, (M, D) where attention has a norm, this thread's
  float *x, *h, *wide, *attended, *scratch;

  int64_t rows() const { return n.M; }
  Left left(int64_t K) const { return left(K, a.precision); }
  Left left(int64_t K, Precision p) const { return Left::at(h, K, p); }

  // The row of D floats at `from`, normalised.
  void normalise(const NormVectors& norm, const float* from, float* to) const {
    const Rows row{DType::f32, from, 0};
    Norm{row, norm.weight, norm.bias, a.D, a.eps, nullptr, a.norm_kind}.row(0, DType::f32, to);
  }

  // x += norm(from), of the first M rows.
  void add_normalised(const NormVectors& norm, const float* from, int64_t M) const {
    float* const row = scratch + n.for_gemm;
    const Range mine = team.share(M);
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      normalise(norm, from + m * a.D, row);
      float* const to = x + m * a.D;
      for (int64_t i = 0; i < a.D; i += Vec::kLanes)
        (Vec::load(to + i, a.D - i) + Vec::load(row + i, a.D - i)).store(to + i, a.D - i);
    }
    team.sync();
  }

  // The rows after block i, for those who asked for them. They are read here and written again only
  // after the next sync.
  void keep(int64_t i) const {
    for (int64_t b = 0; b < images(); ++b) {
      float* const all = image(b).kept ? image(b).kept[i] : nullptr;
      if (!all) continue;
      const Range mine = team.share(tokens(b));
      for (int64_t s = mine.begin; s < mine.end; ++s) {
        const float* const from = x + (start(b) + s) * a.D;
        float* const to = all + image(b).kept_at + s * a.D;
        if (a.kept_norm.weight)
          normalise(a.kept_norm, from, to);
        else
          memcpy(to, from, a.D * sizeof(float));
      }
    }
  }

  void embed() const {
    const int64_t M = rows() - images() * a.T;
    const Left patches = left(n.P, a.patch.precision);
    const Range mine = team.share(images());
    for (int64_t b = mine.begin; b < mine.end; ++b)
      if (a.T) memcpy(x + start(b) * a.D, image(b).prefix, a.T * a.D * sizeof(float));
    fill(team, patches, M, n.P, scratch + n.for_gemm, [&](int64_t m, float* row) {
      const auto [b, patch] = patch_at(m);
      unfold_patch(pixels(image(b)), 0, patch, row);
    });
    const Weights then = weights(a.depth ? a.blocks[0].qkv : a.head);
    gemm(team, patches, M, weights(a.patch, then.data ? &then : nullptr), scratch,
         [&](int64_t m, int64_t n0, int64_t columns, float* c) {
           const auto [b, patch] = patch_at(m);
           const PatchEpilogue store{.bias = a.patch.bias,
                                     .position = image(b).position,
                                     .dtype = DType::f32,
                                     .y = x + start(b) * a.D,
                                     .D = a.D,
                                     .T = a.T,
                                     .patches = tokens(b) - a.T};
           store(patch, n0, columns, c);
         });
    team.sync();
    if (!a.norm_pre.weight) return;
    const Range all = team.share(rows());
    for (int64_t m = all.begin; m < all.end; ++m) normalise(a.norm_pre, x + m * a.D, x + m * a.D);
    team.sync();
  }

  // Queries and keys normalised, turned by their rotary positions, or both, in one pass.
  void prepare_heads(const BlockWeights& w, int64_t block) const {
    const int64_t E = a.D / a.H;
    float* const head_row = scratch + n.for_gemm;
    const Range part = team.share(rows());
    for (int64_t m = part.begin; m < part.end; ++m) {
      const int64_t b = image_at(m), S = tokens(b), s = m - start(b);
      const float* const table = image(b).turns ? image(b).turns[block] + s * E : nullptr;
      for (int64_t head = 0; head < 2 * a.H; ++head) {  // of q, then of k
        const NormVectors& norm = head < a.H ? w.q_norm : w.k_norm;
        const Rows row{n.qkv_dtype, offset(n.qkv_dtype, wide, m * n.qkv_stride + head * E), 0};
        if (norm.weight)
          Norm{row, norm.weight, norm.bias, E, a.eps, nullptr, a.norm_kind}.row(0, DType::f32,
                                                                                head_row);
        else
          widen_row(row, 0, head_row, E);
        if (table)
          turn(head_row, table + (a.rotary_heads > 1 ? head % a.H * S * E : 0), E, a.rotary_half,
               1.0f);
        narrow_row(head_row, n.qkv_dtype, const_cast<void*>(row.data), 0, E);
      }
    }
    team.sync();
  }

  // A row of attention is a mean of values: at most what the largest row of h makes of them. Norms
  // of h's rows are still beside y's scales. Ends with a sync.
  void expect_heads(const PackedLinear& qkv, const Left& y, bool first) const {
    const ProductBound bound(weights(qkv), qkv.bias);
    const Range mine = team.share(images());
    for (int64_t b = mine.begin; b < mine.end; ++b) {
      float most = 0;
      for (int64_t s = 0; s < tokens(b); ++s) most = fmaxf(most, bound(y, start(b) + s));
      for (int64_t s = 0; s < (first ? 1 : tokens(b)); ++s)
        expect(y, first ? b : start(b) + s, most);
    }
    team.sync();
  }

  // Attention of image b to its rows of h; with `first` of its first token alone, to row b.
  void attend_heads(int64_t block, bool first) const {
    const int64_t E = a.D / a.H;
    const Left y = left(a.D);
    if (expects(y) && !n.attended) expect_heads(a.blocks[block].qkv, y, first);
    for (int64_t begin = 0, end = 0; begin < images(); begin = end) {  // images of equal length
      const int64_t S = tokens(begin);
      while (end < images() && tokens(end) == S) ++end;
      share_heads(team, (end - begin) * a.H, first ? 1 : S, [&](int64_t item, Range some) {
        const int64_t b = begin + item / a.H, head = item % a.H, to = first ? b : start(b);
        const Rows qkv{n.qkv_dtype, wide, n.qkv_stride};
        const float* const bias = image(b).biases ? image(b).biases[block] : nullptr;
        attend({.q = qkv.from(start(b), head * E),
                .k = qkv.from(start(b), a.D + head * E),
                .v = qkv.from(start(b), 2 * a.D + head * E),
                .bias = bias ? bias + head * S * S : nullptr,
                .bias_stride = S,
                .precision = a.precision,
                .lse = nullptr,
                .S = S,
                .E = E,
                .scale = 1 / sqrtf(static_cast<float>(E)),
                .dropout = {},
                .first_element = 0},
               some, {0, S}, scratch + n.for_gemm, [&](int64_t i, const float* o) {
                 if (n.attended)
                   memcpy(attended + (to + i) * a.D + head * E, o, E * sizeof(float));
                 else
                   y.put(to + i, head * E, o, E);
               });
      });
    }
    team.sync();
    const int64_t M = first ? images() : rows();
    if (n.attended)
      fill(team, y, M, a.D, scratch + n.for_gemm, [&](int64_t m, float* row) {
        normalise(a.blocks[block].attention_norm, attended + m * a.D, row);
      });
    else
      settle(team, y, M);
  }

  // Row b of x = the first token of image b. In order, so that no row is lost: start(b) >= b.
  void keep_first_tokens() const {
    if (team.rank) return;
    for (int64_t b = 0; b < images(); ++b)
      memmove(x + b * a.D, x + start(b) * a.D, a.D * sizeof(float));
  }

  // The rows of `wide`: queries, keys and values of x. With `first` there are queries of the
  // images' first tokens alone, which spares a third of the GEMM.
  void make_heads(const BlockWeights& w, const Weights& qkv, bool first) const {
    const StoreEpilogue<Plain> store{
        .bias = w.qkv.bias, .activation = Activation::none, .y = {n.qkv_dtype, wide, n.qkv_stride}};
    const bool apart = first && a.D % kNR == 0;  // where panels end with the queries
    if (apart) {
      prepare_rows(w, images(), [&](int64_t b) { return start(b); });
      gemm(team, left(a.D), images(), qkv.part(0, a.D, 0, a.D), scratch,
           [&](int64_t b, int64_t n0, int64_t columns, float* c) {
             store(start(b), n0, columns, c);
           });
      team.sync();
    }
    prepare_rows(w, rows(), [](int64_t m) { return m; });
    const int64_t skipped = apart ? a.D : 0;
    StoreEpilogue<Plain> rest = store;
    rest.bias = store.bias ? store.bias + skipped : nullptr;
    rest.y.data = const_cast<void*>(store.y.at(0, skipped));
    gemm(team, left(a.D), rows(), qkv.part(skipped, 3 * a.D - skipped, 0, a.D), scratch, rest);
    team.sync();
  }

  // The first M rows of h: row_of(m) of x, normalised.
  template <class RowOf>
  void prepare_rows(const BlockWeights& w, int64_t M, const RowOf& row_of) const {
    fill(team, left(a.D), M, a.D, scratch + n.for_gemm, [&](int64_t m, float* row) {
      const float* const from = x + row_of(m) * a.D;
      if (a.order == Order::post_norm)
        memcpy(row, from, a.D * sizeof(float));
      else
        normalise(w.norm1, from, row);
    });
  }

  // With `first` only the images' first tokens leave the block, as the first rows of x; the others
  // only serve as keys and values.
  void block(int64_t i, bool first) const {
    const BlockWeights& w = a.blocks[i];
    const int64_t M = first ? images() : rows();
    const Weights after = weights(i + 1 < a.depth ? a.blocks[i + 1].qkv : a.head);
    const Weights fc2 = weights(w.fc2, after.data ? &after : nullptr);
    const Weights fc1 = weights(w.fc1), proj = weights(w.proj, &fc1);
    make_heads(w, weights(w.qkv, &proj), first);
    if (w.q_norm.weight || a.rotary_heads) prepare_heads(w, i);
    step_done(Step::qkv);
    if (first) keep_first_tokens();
    attend_heads(i, first);
    step_done(Step::attention);
    if (a.order == Order::parallel) {  // the MLP reads x as it was; h waits meanwhile
      mlp(w, fc1, fc2, M);
      project(w, proj, M);
    } else {
      project(w, proj, M);
      mlp(w, fc1, fc2, M);
    }
  }

  // x += attention's rows in h times the projection.
  void project(const BlockWeights& w, const Weights& proj, int64_t M) const {
    const bool post = a.order == Order::post_norm;
    gemm(team, left(a.D), M, proj, scratch,
         ResidualEpilogue{.bias = w.proj.bias,
                          .gamma = w.gamma1,
                          .dtype = DType::f32,
                          .residual = post ? nullptr : x,
                          .residual_stride = a.D,
                          .y = post ? wide : x,
                          .y_stride = a.D,
                          .N = a.D});
    team.sync();
    if (post) add_normalised(w.norm1, wide, M);
    step_done(Step::proj);
  }

  // x += the MLP of x.
  void mlp(const BlockWeights& w, const Weights& fc1, const Weights& fc2, int64_t M) const {
    if (n.gated) return gated_mlp(w, fc1, fc2, M);
    const bool post = a.order == Order::post_norm;
    const mlp_args args{.threads = team.size,
                        .x_dtype = DType::f32,
                        .w_dtype = DType::f32,
                        .x = x,
                        .norm_weight = w.norm2.weight,
                        .norm_bias = w.norm2.bias,
                        .fc1_weight = nullptr,
                        .fc1_bias = w.fc1.bias,
                        .fc2_weight = nullptr,
                        .packed = true,
                        .fc2_bias = w.fc2.bias,
                        .gamma = w.gamma2,
                        .y = post ? h : x,
                        .stats = nullptr,
                        .pre = nullptr,
                        .B = 1,
                        .S = M,
                        .D = a.D,
                        .F = a.F,
                        .x_stride = a.D,
                        .eps = a.eps,
                        .activation = a.activation,
                        .dropout = {},
                        .path = {}};
    const NormKind kind = post ? NormKind::none : a.norm_kind;
    Mlp{args, a.D, fc1, fc2, n.mlp, kind, !post}.run(team, wide, scratch);
    if (post) add_normalised(w.norm2, h, M);
    step_done(Step::mlp);
  }

  // The same where the MLP has a gate, a norm before fc2, or both.
  void gated_mlp(const BlockWeights& w, const Weights& fc1, const Weights& fc2, int64_t M) const {
    const bool post = a.order == Order::post_norm;
    GatedMlp mlp{.x = x,
                 .y = post ? h : x,
                 .residual = !post,
                 .M = M,
                 .D = a.D,
                 .F = a.F,
                 .eps = a.eps,
                 .activation = a.activation,
                 .norm_kind = a.norm_kind,
                 .norm = post ? NormVectors{} : w.norm2,
                 .inner = w.mlp_norm,
                 .gate = fc1,
                 .value = {},
                 .fc2 = fc2,
                 .gate_bias = w.fc1.bias,
                 .value_bias = nullptr,
                 .fc2_bias = w.fc2.bias,
                 .gamma = w.gamma2,
                 .n = n.gated_mlp};
    if (w.gate.panels) {
      mlp.gate = weights(w.gate), mlp.gate_bias = w.gate.bias;
      mlp.value = fc1, mlp.value_bias = w.fc1.bias;
    } else if (a.gated) {  // fc1 has the gates' rows, then the values'
      mlp.gate = fc1.part(0, a.F, 0, a.D);
      mlp.value = fc1.part(a.F, a.F, 0, a.D);
      if (w.fc1.bias) mlp.value_bias = w.fc1.bias + a.F;
    }
    mlp.run(team, wide, scratch);
    if (post) add_normalised(w.norm2, h, M);
    step_done(Step::mlp);
  }

  // The pooled features of image b, (D).
  void pool(int64_t b, float* to) const {
    if (a.pool == Pool::token) {
      memcpy(to, x + b * a.D, a.D * sizeof(float));
    } else {
      const float* const from = x + start(b) * a.D;
      const int64_t S = tokens(b);
      for (int64_t i = 0; i < a.D; i += Vec::kLanes) {
        Vec sum = Vec::set(0);
        for (int64_t s = a.T; s < S; ++s) sum = sum + Vec::load(from + s * a.D + i, a.D - i);
        (sum / Vec::set(static_cast<float>(S - a.T))).store(to + i, a.D - i);
      }
    }
    if (a.fc_norm.weight) normalise(a.fc_norm, to, to);
  }

  void finish() const {
    if (a.norm.weight) {
      const Range part = team.share(a.pool == Pool::token ? images() : rows());
      for (int64_t m = part.begin; m < part.end; ++m) normalise(a.norm, x + m * a.D, x + m * a.D);
      team.sync();
    }
    if (a.pool == Pool::tokens) {
      for (int64_t b = 0; b < images(); ++b) {
        const Range mine = team.share(tokens(b));
        memcpy(image(b).y + mine.begin * a.D, x + (start(b) + mine.begin) * a.D,
               (mine.end - mine.begin) * a.D * sizeof(float));
      }
      team.sync();
      return;
    }
    if (!a.head.panels) {
      const Range mine = team.share(images());
      for (int64_t b = mine.begin; b < mine.end; ++b) pool(b, image(b).y);
      team.sync();
      return;
    }
    const Left pooled = left(a.D, a.head.precision);
    fill(team, pooled, images(), a.D, scratch + n.for_gemm,
         [&](int64_t b, float* row) { pool(b, row); });
    gemm(team, pooled, images(), weights(a.head), scratch,
         [&](int64_t b, int64_t n0, int64_t columns, float* c) {
           const StoreEpilogue<Plain> store{.bias = a.head.bias,
                                            .activation = Activation::none,
                                            .y = {DType::f32, image(b).y, 0}};
           store(0, n0, columns, c);
         });
    team.sync();
  }

  void run() const {
    const bool token = a.pool == Pool::token;
    steps_begin();
    embed();
    step_done(Step::embed);
    for (int64_t i = 0; i < a.depth; ++i) {
      block(i, token && i + 1 == a.depth);
      keep(i);
    }
    if (token && !a.depth) {
      keep_first_tokens();
      team.sync();
    }
    finish();
    step_done(Step::head);
  }
};

}  // namespace
}  // namespace vitkern::VITKERN_ISA
