// patch_embed_backward: gradients of the projection, positions and prefix tokens. The patches are
// unfolded again. (Gradients of pixels are the caller's: few ask for them.)
#include "gradients.hpp"
#include "kernels.hpp"
#include "patches.hpp"

namespace vitkern::VITKERN_ISA {

void patch_embed_backward(const patch_embed_backward_args& a) {
  const Image image = image_of(a);
  const int64_t patches = image.patches(), P = image.row_length(), S = a.T + patches;
  const int64_t M = a.B * patches, g_stride = row_stride(a.D), p_stride = row_stride(P);
  const Lease gradient(a.B * S * g_stride * sizeof(float));
  const Lease pixels(a.dweight ? M * p_stride * sizeof(float) : 0);
  // Patches first, all prefix rows behind them: the weight's gradient reads M rows in a line.
  float* const g = gradient.floats();
  const float* const prefix = g + M * g_stride;
  const Weights x = plain_factor(precision_of(a.w_dtype), as_rows(pixels.floats(), p_stride), P, M);
  const WeightGradient weight(a.threads, as_rows(g, g_stride), x, a.dweight ? a.D : 0);
  const Rows grad{a.w_dtype, a.grad, a.D};
  run_team(a.threads, [&](const Team& team) {
    const Range rows = team.share(a.B * S);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      const int64_t b = m / S, s = m % S;
      float* const to = g + (s < a.T ? M + b * a.T + s : b * patches + s - a.T) * g_stride;
      widen_row(grad, m, to, a.D);
      drop(a.dropout, kElements, static_cast<uint64_t>(m * a.D), to, a.D);
    }
    const Range mine = team.share(a.dweight ? M : 0);
    for (int64_t m = mine.begin; m < mine.end; ++m)
      unfold_patch(image, m / patches, m % patches, pixels.floats() + m * p_stride);
    team.sync();
    if (a.dbias) sum_columns(team, as_rows(g, g_stride), M, a.D, a.dbias);
    const auto sum_images = [&](const float* from, int64_t count, float* to) {
      for (int64_t i = 0; to && i < count; ++i)
        sum_columns(team, as_rows(from + i * g_stride, count * g_stride), a.B, a.D, to + i * a.D);
    };
    sum_images(g, patches, a.dposition);
    sum_images(prefix, a.T, a.dprefix);
    if (a.dweight) weight.run(team, StoreRows{{a.w_dtype, a.dweight, P}});
  });
}

}  // namespace vitkern::VITKERN_ISA
