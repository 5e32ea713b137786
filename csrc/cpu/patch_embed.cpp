// patch_embed: y[b] = dropout([prefix; unfold(image[b]) weight^T + bias + position])
// Pixels are read once, straight from NCHW or NHWC, float or uint8, and y is written once.
#include "chunks.hpp"
#include "kernels.hpp"
#include "patches.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

// The prefix rows of image b, which has S rows of y.
void write_prefix(const patch_embed_args& a, int64_t b, int64_t S) {
  const int64_t first = b * S * a.D, elements = a.T * a.D;
  for (int64_t i = 0; i < elements; i += Vec::kLanes) {
    const int64_t n = min(Vec::kLanes, elements - i);
    float part[Vec::kLanes];
    Vec::load(a.prefix + i, n).store(part);
    drop(a.dropout, kElements, static_cast<uint64_t>(first + i), part, n);
    store_as(a.w_dtype, a.y, first + i, Vec::load(part), n);
  }
}

}  // namespace

void patch_embed(const patch_embed_args& a) {
  const Image image = image_of(a);
  const Weights w = operand_weights(a.w_dtype, a.weight, a.D, image.row_length(), a.packed);
  const int64_t patches = image.patches();
  const ChunkedGemm chunks(a.threads, a.B * patches, w);
  run_team(a.threads, [&](const Team& team) {
    const Range images = team.share(a.B);
    for (int64_t b = images.begin; b < images.end; ++b) write_prefix(a, b, a.T + patches);
    chunks.multiply(
        team, [&](int64_t m, float* row) { unfold_patch(image, m / patches, m % patches, row); },
        [&](int64_t m0) {
          return PatchEpilogue{.bias = a.bias,
                               .position = a.position,
                               .dtype = a.w_dtype,
                               .y = a.y,
                               .D = a.D,
                               .T = a.T,
                               .patches = patches,
                               .first_row = m0,
                               .dropout = a.dropout};
        });
  });
}

}  // namespace vitkern::VITKERN_ISA
