// patch_embed: y[b] = dropout([prefix; unfold(image[b]) weight^T + bias + position])
// Pixels are read once, straight from NCHW or NHWC, float or uint8, and y is written once.
#include "arena.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "patches.hpp"
#include "scratch.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

void write_prefix(const patch_embed_args& a, int64_t b, int64_t S, float* row) {
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t start = (b * S + t) * a.D;
    memcpy(row, a.prefix + t * a.D, a.D * sizeof(float));
    drop(a.dropout, kElements, static_cast<uint64_t>(start), row, a.D);
    for (int64_t i = 0; i < a.D; i += Vec::kLanes)
      store_as(a.w_dtype, a.y, start + i, Vec::load(row + i, a.D - i), a.D - i);
  }
}

}  // namespace

void patch_embed(const patch_embed_args& a) {
  const Image image{a.image_dtype, a.image,    a.C,        a.Y,        a.X,    a.py, a.px,
                    a.b_stride,    a.c_stride, a.y_stride, a.x_stride, a.mean, a.std};
  const Weights w = plain_weights(a.w_dtype, a.weight, a.D, image.row_length());
  const int64_t patches = image.patches(), M_total = a.B * patches,
                chunk = min(M_total, kChunkRows);
  const int64_t shared = Left::floats(chunk, w.K, w.precision);
  const int64_t for_gemm = gemm_scratch(chunk, w.K, w.precision),
                per_thread = for_gemm + row_stride(max(a.D, w.K));
  const Lease lease((shared + a.threads * per_thread) * sizeof(float));
  const Left h = Left::at(lease.floats(), w.K, w.precision);  // (chunk, C * py * px)
  run_team(a.threads, [&](const Team& team) {
    float* const scratch = lease.floats() + shared + team.rank * per_thread;
    const Range images = team.share(a.B);
    for (int64_t b = images.begin; b < images.end; ++b)
      write_prefix(a, b, a.T + patches, scratch + for_gemm);
    for (int64_t m0 = 0; m0 < M_total; m0 += chunk) {
      const int64_t M = min(chunk, M_total - m0);
      fill(team, h, M, w.K, scratch + for_gemm, [&](int64_t m, float* row) {
        unfold_patch(image, (m0 + m) / patches, (m0 + m) % patches, row);
      });
      gemm(team, h, M, w, scratch,
           PatchEpilogue{.bias = a.bias,
                         .position = a.position,
                         .dtype = a.w_dtype,
                         .y = a.y,
                         .D = a.D,
                         .T = a.T,
                         .patches = patches,
                         .first_row = m0,
                         .dropout = a.dropout});
      team.sync();
    }
  });
}

}  // namespace vitkern::VITKERN_ISA
