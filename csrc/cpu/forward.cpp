// forward: a whole ViT in one call, from pixels to logits, on packed weights.
//
// While there are at least as many images as threads, each thread takes groups of images through
// all layers without a barrier. The images that remain (fewer than threads) are computed by all
// threads together, which share columns and heads. Both ways give the same bits.
#include "arena.hpp"
#include "flash.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "mlp.hpp"
#include "patches.hpp"
#include "scratch.hpp"
#include "steps.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

Weights weights(const forward_args& a, const PackedLinear& l, const Weights* next = nullptr) {
  return {a.precision, DType::f32, l.panels, l.N, l.K, true, next};
}

struct Sizes {                  // of a group of G images
  int64_t G, patches, S, M, P;  // images, patches, tokens, rows, pixels of a patch
  DType qkv_dtype;
  int64_t qkv_stride;
  MlpScratch mlp;
  int64_t x, h, wide;                       // floats of the buffers that a team shares
  int64_t for_gemm, for_heads, per_thread;  // floats of a thread's scratch

  Sizes(const forward_args& a, const Image& image, int64_t group, int threads)
      : G(group),
        patches(image.patches()),
        S(a.T + patches),
        M(G * S),
        P(image.row_length()),
        qkv_dtype(row_dtype(a.precision)),
        qkv_stride(qkv_dtype == DType::f32 ? row_stride(3 * a.D)
                                           : 2 * row_stride(ceil_div(3 * a.D, 2))),
        mlp(M, a.D, a.F, a.precision, threads) {
    const int64_t qkv = M * qkv_stride / (qkv_dtype == DType::f32 ? 1 : 2);
    x = round_up(M * a.D, kLine);
    h = Left::floats(max(M, G), max(a.D, P), a.precision);
    wide = round_up(max(qkv, mlp.shared), kLine);
    for_gemm = max(gemm_scratch(M, max(a.D, P), a.precision), mlp.per_thread);
    for_heads = max(FlashScratch(S, a.D / a.H, a.precision).total, row_stride(max(a.D, P)));
    per_thread = for_gemm + for_heads;
  }
  int64_t shared() const { return x + h + wide; }
};

// One group of images through all layers by one team. x (M, D) is the residual stream.
struct Pass {
  const forward_args& a;
  const Image& image;
  const Sizes& n;
  const Team& team;
  float *x, *h, *wide, *scratch;  // (M, D), (M, D or P), (M, 3D) or the MLP's, this thread's
  int64_t first;                  // image of the batch
  int64_t images;                 // of this group, <= n.G

  int64_t rows() const { return images * n.S; }
  Left left(int64_t K) const { return Left::at(h, K, a.precision); }

  // The row of D floats at `from`, normalised.
  void normalise(const NormVectors& norm, const float* from, float* to) const {
    Norm{{DType::f32, from, 0}, norm.weight, norm.bias, a.D, a.eps}.row(0, DType::f32, to);
  }

  void embed() const {
    const int64_t M = images * n.patches;
    const Left pixels = left(n.P);
    const Range mine = team.share(images);
    for (int64_t b = mine.begin; b < mine.end; ++b)
      if (a.T) memcpy(x + b * n.S * a.D, a.prefix, a.T * a.D * sizeof(float));
    fill(team, pixels, M, n.P, scratch + n.for_gemm, [&](int64_t m, float* row) {
      unfold_patch(image, first + m / n.patches, m % n.patches, row);
    });
    const Weights then = weights(a, a.depth ? a.blocks[0].qkv : a.head);
    gemm(team, pixels, M, weights(a, a.patch, then.data ? &then : nullptr), scratch,
         PatchEpilogue{.bias = a.patch.bias,
                       .position = a.position,
                       .dtype = DType::f32,
                       .y = x,
                       .D = a.D,
                       .T = a.T,
                       .patches = n.patches});
    team.sync();
    if (!a.norm_pre.weight) return;
    const Range all = team.share(rows());
    for (int64_t m = all.begin; m < all.end; ++m) normalise(a.norm_pre, x + m * a.D, x + m * a.D);
    team.sync();
  }

  void normalise_heads(const BlockWeights& w) const {
    const int64_t E = a.D / a.H;
    const Range part = team.share(rows());
    for (int64_t m = part.begin; m < part.end; ++m)
      for (int64_t head = 0; head < 2 * a.H; ++head) {  // of q, then of k
        const NormVectors& norm = head < a.H ? w.q_norm : w.k_norm;
        const int64_t at = m * n.qkv_stride + head * E;
        void* const row = const_cast<void*>(offset(n.qkv_dtype, wide, at));
        Norm{{n.qkv_dtype, row, 0}, norm.weight, norm.bias, E, a.eps}.row(0, n.qkv_dtype, row);
      }
    team.sync();
  }

  // Queries [0, queries) of every head: row b * queries + i of h = attention of query i of image b.
  void attend_heads(const float* bias, int64_t queries) const {
    const int64_t E = a.D / a.H;
    const Left y = left(a.D);
    share_heads(team, images * a.H, queries, [&](int64_t item, Range some) {
      const int64_t b = item / a.H, head = item % a.H;
      const Rows qkv{n.qkv_dtype, wide, n.qkv_stride};
      attend({.q = qkv.from(b * n.S, head * E),
              .k = qkv.from(b * n.S, a.D + head * E),
              .v = qkv.from(b * n.S, 2 * a.D + head * E),
              .bias = bias ? bias + head * n.S * n.S : nullptr,
              .bias_stride = n.S,
              .precision = a.precision,
              .lse = nullptr,
              .S = n.S,
              .E = E,
              .scale = 1 / sqrtf(static_cast<float>(E)),
              .dropout = {},
              .first_element = 0},
             some, {0, n.S}, scratch + n.for_gemm,
             [&](int64_t i, const float* o) { y.put(b * queries + i, head * E, o, E); });
    });
    team.sync();
    settle(team, y, images * queries);
  }

  // Every step-th row leaves the block; the others only serve as keys and values.
  void block(int64_t i, int64_t step) const {
    const BlockWeights& w = a.blocks[i];
    const int64_t M = rows() / step;
    const Weights after = weights(a, i + 1 < a.depth ? a.blocks[i + 1].qkv : a.head);
    const Weights fc2 = weights(a, w.fc2, after.data ? &after : nullptr);
    const Weights fc1 = weights(a, w.fc1), proj = weights(a, w.proj, &fc1);
    const Left normalised = left(a.D);
    fill(team, normalised, rows(), a.D, scratch + n.for_gemm,
         [&](int64_t m, float* row) { normalise(w.norm1, x + m * a.D, row); });
    gemm(team, normalised, rows(), weights(a, w.qkv, &proj), scratch,
         StoreEpilogue<Plain>{.bias = w.qkv.bias,
                              .activation = Activation::none,
                              .y = {n.qkv_dtype, wide, n.qkv_stride}});
    team.sync();
    if (w.q_norm.weight) normalise_heads(w);
    step_done(Step::qkv);
    attend_heads(a.biases ? a.biases[i] : nullptr, n.S / step);
    step_done(Step::attention);
    gemm(team, left(a.D), M, proj, scratch,
         ResidualEpilogue{.bias = w.proj.bias,
                          .gamma = w.gamma1,
                          .dtype = DType::f32,
                          .residual = x,
                          .residual_stride = step * a.D,
                          .y = x,
                          .y_stride = step * a.D,
                          .N = a.D});
    team.sync();
    step_done(Step::proj);
    const mlp_args mlp{.threads = team.size,
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
                       .y = x,
                       .stats = nullptr,
                       .pre = nullptr,
                       .B = 1,
                       .S = M,
                       .D = a.D,
                       .F = a.F,
                       .x_stride = step * a.D,
                       .eps = a.eps,
                       .activation = a.activation,
                       .dropout = {},
                       .path = {}};
    Mlp{mlp, step * a.D, fc1, fc2, n.mlp}.run(team, wide, scratch);
    step_done(Step::mlp);
  }

  // The pooled features of image b, (D).
  void pool(int64_t b, float* to) const {
    const float* const from = x + b * n.S * a.D;
    if (a.pool == Pool::token) {
      memcpy(to, from, a.D * sizeof(float));
    } else {
      for (int64_t i = 0; i < a.D; i += Vec::kLanes) {
        Vec sum = Vec::set(0);
        for (int64_t s = a.T; s < n.S; ++s) sum = sum + Vec::load(from + s * a.D + i, a.D - i);
        (sum / Vec::set(static_cast<float>(n.patches))).store(to + i, a.D - i);
      }
    }
    if (a.fc_norm.weight) normalise(a.fc_norm, to, to);
  }

  void finish() const {
    if (a.norm.weight) {
      const int64_t step = a.pool == Pool::token ? n.S : 1;  // only the pooled rows need it
      const Range part = team.share(rows() / step);
      for (int64_t m = part.begin; m < part.end; ++m)
        normalise(a.norm, x + m * step * a.D, x + m * step * a.D);
      team.sync();
    }
    if (a.pool == Pool::tokens) {
      const Range mine = team.share(rows());
      memcpy(a.y + (first * n.S + mine.begin) * a.D, x + mine.begin * a.D,
             (mine.end - mine.begin) * a.D * sizeof(float));
      team.sync();
      return;
    }
    if (!a.head.panels) {
      const Range mine = team.share(images);
      for (int64_t b = mine.begin; b < mine.end; ++b) pool(b, a.y + (first + b) * a.D);
      team.sync();
      return;
    }
    const Left pooled = left(a.D);
    fill(team, pooled, images, a.D, scratch + n.for_gemm,
         [&](int64_t b, float* row) { pool(b, row); });
    gemm(team, pooled, images, weights(a, a.head), scratch,
         StoreEpilogue<Plain>{.bias = a.head.bias,
                              .activation = Activation::none,
                              .y = {DType::f32, a.y + first * a.head.N, a.head.N}});
    team.sync();
  }

  void run() const {
    steps_begin();
    embed();
    step_done(Step::embed);
    for (int64_t i = 0; i < a.depth; ++i)
      block(i, a.pool == Pool::token && i + 1 == a.depth ? n.S : 1);
    finish();
    step_done(Step::head);
  }
};

// Images [range) by one team, in groups; `memory` holds the team's shared buffers, then a part for
// each thread.
void run_images(const forward_args& a, const Image& image, const Sizes& n, const Team& team,
                Range range, float* memory) {
  float* const x = memory;
  float* const h = x + n.x;
  float* const wide = h + n.h;
  float* const scratch = memory + n.shared() + team.rank * n.per_thread;
  for (int64_t first = range.begin; first < range.end; first += n.G)
    Pass{a, image, n, team, x, h, wide, scratch, first, min(n.G, range.end - first)}.run();
}

}  // namespace

void forward(const forward_args& a) {
  const Image image = image_of(a);
  const int64_t S = a.T + image.patches(), whole = a.B / a.threads * a.threads, rest = a.B - whole;
  const int64_t most = max(1, ceil_div(group_rows(a.precision), max(S, 1)));  // images in a group
  // The same number of groups for each thread, the larger groups first: the threads end together.
  const int64_t groups = a.threads * ceil_div(whole / a.threads, most);
  const Sizes alone(a, image, max(1, ceil_div(whole, max(groups, 1))), 1);
  const Sizes together(a, image, max(1, min(most, rest)), a.threads);
  const int64_t each = round_up(alone.shared() + alone.per_thread, 1024);
  const int64_t floats = max(whole ? a.threads * each : 0,
                             rest ? together.shared() + a.threads * together.per_thread : 0);
  if (!a.B) return;
  const Lease lease(floats * sizeof(float));
  if (whole) {
    int64_t next = 0;  // the first group that is not taken: a thread that is held up takes fewer
    run_team(a.threads, [&](const Team& all) {
      float* const memory = lease.floats() + all.rank * each;
      for (;;) {
        const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        if (i >= groups) break;
        run_images(a, image, alone, Team{0, 1}, even_part(whole, i, groups), memory);
      }
    });
  }
  if (rest)
    run_team(a.threads, [&](const Team& team) {
      run_images(a, image, together, team, {whole, a.B}, lease.floats());
    });
}

}  // namespace vitkern::VITKERN_ISA
