// forward: a whole ViT in one call, from pixels to logits, on packed weights.
//
// Whole images per thread while there are at least as many as threads: each thread takes a group of
// images through all layers and meets nobody. What remains (a batch smaller than the threads, the
// odd image out) is computed by all threads together, columns and heads shared out. Both give the
// same bits.
#include "arena.hpp"
#include "flash.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "patches.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

constexpr int64_t kGroupRows =
    192;  // rows that use a weight panel before the next is fetched: 14 tiles

Weights weights(const forward_args& a, const PackedLinear& l) {
  return {a.w_dtype, l.panels, l.N, l.K, true};
}

struct Sizes {                         // of a group of G images
  int64_t G, patches, S, M, P, chunk;  // chunk: rows of the MLP's hidden at a time
  int64_t x_stride, h_stride, qkv_stride, f_stride;
  int64_t x, h, wide, for_gemm, per_thread;  // floats of each buffer

  Sizes(const forward_args& a, const Image& image, int64_t group, int threads) {
    G = group;
    patches = image.patches();
    S = a.T + patches;
    M = G * S;
    P = image.row_length();
    x_stride = a.D;
    h_stride = row_stride(max(a.D, P));
    qkv_stride = row_stride(3 * a.D);
    f_stride = row_stride(a.F);
    const int64_t fit = kHiddenBytes * threads / (f_stride * 4) / kMR * kMR;
    chunk = min(M, max(8 * kMR, fit));
    x = M * x_stride;
    h = round_up(max(M, G), 16) * h_stride;
    wide = max(M * qkv_stride, chunk * f_stride);
    for_gemm = gemm_scratch(M);
    per_thread = for_gemm + flash_scratch(S, a.D / a.H);
  }
  int64_t shared() const { return round_up(x, 16) + h + wide; }
};

// One group of images through all layers by one team. x (M, D) is the residual stream.
struct Pass {
  const forward_args& a;
  const Image& image;
  const Sizes& n;
  const Team& team;
  float *x, *h, *wide, *scratch;  // (M, D), (M, D or P), (M, 3D) or (chunk, F), this thread's
  int64_t first;                  // image of the batch
  int64_t images;                 // of this group, <= n.G

  int64_t rows() const { return images * n.S; }

  void normalise(const NormVectors& norm, Range part, const float* from, int64_t stride, float* to,
                 int64_t to_stride) const {
    for (int64_t m = part.begin; m < part.end; ++m)
      normalise_row(DType::f32, from + m * stride, norm.weight, norm.bias, DType::f32,
                    to + m * to_stride, nullptr, a.D, a.eps);
  }

  void embed() const {
    const int64_t M = images * n.patches;
    const Range part = team.share(M);
    for (int64_t m = part.begin; m < part.end; ++m)
      unfold_patch(image, first + m / n.patches, m % n.patches, h + m * n.h_stride);
    const Range mine = team.share(images);
    for (int64_t b = mine.begin; b < mine.end; ++b)
      if (a.T) memcpy(x + b * n.S * a.D, a.prefix, a.T * a.D * sizeof(float));
    team.sync();
    gemm(team, h, n.h_stride, M, weights(a, a.patch), scratch,
         PatchEpilogue{.bias = a.patch.bias,
                       .position = a.position,
                       .dtype = DType::f32,
                       .y = x,
                       .D = a.D,
                       .T = a.T,
                       .patches = n.patches});
    team.sync();
    if (!a.norm_pre.weight) return;
    normalise(a.norm_pre, team.share(rows()), x, a.D, x, a.D);
    team.sync();
  }

  // Queries [0, queries) of every head: h = attention(wide).
  void attend_heads(const BlockWeights& w, int64_t queries) const {
    const int64_t E = a.D / a.H;
    const Range heads = team.share(images * a.H);
    for (int64_t item = heads.begin; item < heads.end; ++item) {
      const int64_t b = item / a.H, head = item % a.H;
      float* const q = wide + b * n.S * n.qkv_stride + head * E;
      for (int64_t s = 0; w.q_norm.weight && s < n.S; ++s) {
        float* const row = q + s * n.qkv_stride;
        normalise_row(DType::f32, row, w.q_norm.weight, w.q_norm.bias, DType::f32, row, nullptr, E,
                      a.eps);
        normalise_row(DType::f32, row + a.D, w.k_norm.weight, w.k_norm.bias, DType::f32, row + a.D,
                      nullptr, E, a.eps);
      }
      attend({.dtype = DType::f32,
              .q = q,
              .k = q + a.D,
              .v = q + 2 * a.D,
              .stride = n.qkv_stride,
              .bias = w.bias ? w.bias + head * n.S * n.S : nullptr,
              .bias_stride = n.S,
              .y_dtype = DType::f32,
              .y = h + b * n.S * n.h_stride + head * E,
              .y_stride = n.h_stride,
              .lse = nullptr,
              .S = n.S,
              .E = E,
              .scale = 1 / sqrtf(static_cast<float>(E)),
              .dropout = {},
              .first_element = 0},
             {0, queries}, {0, n.S}, scratch + n.for_gemm);
    }
    team.sync();
  }

  // Row m of x, of those `step` apart, += gamma * (row m of `from` through l).
  void residual(const PackedLinear& l, const float* gamma, const float* from, int64_t stride,
                float* to, int64_t step, int64_t M) const {
    gemm(team, from, stride, M, weights(a, l), scratch,
         ResidualEpilogue{.bias = l.bias,
                          .gamma = gamma,
                          .dtype = DType::f32,
                          .residual = to,
                          .residual_stride = step * a.D,
                          .y = to,
                          .y_stride = step * a.D,
                          .N = a.D});
    team.sync();
  }

  void linear(const PackedLinear& l, Activation activation, const float* from, int64_t M, float* to,
              int64_t stride) const {
    gemm(team, from, n.h_stride, M, weights(a, l), scratch,
         StoreEpilogue{.bias = l.bias,
                       .activation = activation,
                       .y_dtype = DType::f32,
                       .y = to,
                       .y_stride = stride});
    team.sync();
  }

  // Every step-th row leaves the block; the others only serve as keys and values.
  void block(const BlockWeights& w, int64_t step) const {
    const int64_t M = rows() / step, queries = n.S / step;
    normalise(w.norm1, team.share(rows()), x, a.D, h, n.h_stride);
    team.sync();
    linear(w.qkv, Activation::none, h, rows(), wide, n.qkv_stride);
    attend_heads(w, queries);
    residual(w.proj, w.gamma1, h, step * n.h_stride, x, step, M);
    for (int64_t m0 = 0; m0 < M; m0 += n.chunk) {
      const int64_t chunk = min(n.chunk, M - m0);
      float* const from = x + m0 * step * a.D;
      normalise(w.norm2, team.share(chunk), from, step * a.D, h, n.h_stride);
      team.sync();
      linear(w.fc1, a.activation, h, chunk, wide, n.f_stride);
      residual(w.fc2, w.gamma2, wide, n.f_stride, from, step, chunk);
    }
  }

  // Row b of h: the pooled features of image b.
  void pool() const {
    const Range mine = team.share(images);
    for (int64_t b = mine.begin; b < mine.end; ++b) {
      const float* const from = x + b * n.S * a.D;
      float* const to = h + b * n.h_stride;
      if (a.pool == Pool::token) {
        memcpy(to, from, a.D * sizeof(float));
      } else {
        for (int64_t i = 0; i < a.D; i += Vec::kLanes) {
          Vec sum = Vec::set(0);
          for (int64_t s = a.T; s < n.S; ++s) sum = sum + Vec::load(from + s * a.D + i, a.D - i);
          (sum / Vec::set(static_cast<float>(n.patches))).store(to + i, a.D - i);
        }
      }
    }
    if (a.fc_norm.weight) normalise(a.fc_norm, mine, h, n.h_stride, h, n.h_stride);
    team.sync();
  }

  void finish() const {
    if (a.norm.weight) {
      if (a.pool == Pool::token) {  // only the pooled rows need it
        const Range mine = team.share(images);
        for (int64_t b = mine.begin; b < mine.end; ++b)
          normalise(a.norm, {b * n.S, b * n.S + 1}, x, a.D, x, a.D);
      } else {
        normalise(a.norm, team.share(rows()), x, a.D, x, a.D);
      }
      team.sync();
    }
    if (a.pool == Pool::tokens) {
      const Range mine = team.share(rows());
      memcpy(a.y + (first * n.S + mine.begin) * a.D, x + mine.begin * a.D,
             (mine.end - mine.begin) * a.D * sizeof(float));
      team.sync();
      return;
    }
    pool();
    if (a.head.panels) {
      linear(a.head, Activation::none, h, images, a.y + first * a.head.N, a.head.N);
      return;
    }
    const Range mine = team.share(images);
    for (int64_t b = mine.begin; b < mine.end; ++b)
      memcpy(a.y + (first + b) * a.D, h + b * n.h_stride, a.D * sizeof(float));
    team.sync();
  }

  void run() const {
    embed();
    for (int64_t i = 0; i < a.depth; ++i)
      block(a.blocks[i], a.pool == Pool::token && i + 1 == a.depth ? n.S : 1);
    finish();
  }
};

// Images [range) by one team, in groups; `memory` holds the team's shared buffers, then a part for
// each thread.
void run_images(const forward_args& a, const Image& image, const Sizes& n, const Team& team,
                Range range, float* memory) {
  float* const x = memory;
  float* const h = x + round_up(n.x, 16);
  float* const wide = h + n.h;
  float* const scratch = memory + n.shared() + team.rank * n.per_thread;
  for (int64_t first = range.begin; first < range.end; first += n.G)
    Pass{a, image, n, team, x, h, wide, scratch, first, min(n.G, range.end - first)}.run();
}

}  // namespace

void forward(const forward_args& a) {
  const Image image{a.image_dtype, a.image,    a.C,        a.Y,        a.X,    a.py, a.px,
                    a.b_stride,    a.c_stride, a.y_stride, a.x_stride, a.mean, a.std};
  const int64_t S = a.T + image.patches(), whole = a.B / a.threads * a.threads, rest = a.B - whole;
  const int64_t most = max(1, ceil_div(kGroupRows, max(S, 1)));  // images in a group
  const Sizes alone(a, image, max(1, min(most, whole / a.threads)), 1);
  const Sizes together(a, image, max(1, min(most, rest)), a.threads);
  const int64_t each = round_up(alone.shared() + alone.per_thread, 1024);
  const int64_t floats = max(whole ? a.threads * each : 0,
                             rest ? together.shared() + a.threads * together.per_thread : 0);
  if (!a.B) return;
  const Lease lease(floats * sizeof(float));
  if (whole) {
    int64_t next = 0;  // first image nobody has taken: a thread that is held up takes fewer
    run_team(a.threads, [&](const Team& all) {
      float* const memory = lease.floats() + all.rank * each;
      for (;;) {
        const int64_t first = __atomic_fetch_add(&next, alone.G, __ATOMIC_RELAXED);
        if (first >= whole) break;
        run_images(a, image, alone, Team{0, 1}, {first, min(whole, first + alone.G)}, memory);
      }
    });
  }
  if (rest)
    run_team(a.threads, [&](const Team& team) {
      run_images(a, image, together, team, {whole, a.B}, lease.floats());
    });
}

}  // namespace vitkern::VITKERN_ISA
