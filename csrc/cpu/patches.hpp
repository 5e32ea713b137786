// Patches of an image as rows of a GEMM: unfold, conversion and normalisation in one pass over the
// pixels.
#pragma once
#include "epilogue.hpp"
#include "rows.hpp"

namespace {

struct Image {
  DType dtype;
  const void* data;  // (B, C, Y, X) by strides
  int64_t C, Y, X, py, px;
  int64_t b_stride, c_stride, y_stride, x_stride;
  const float* mean;  // (C) or null
  const float* std;   // (C) or null

  int64_t patches() const { return (Y / py) * (X / px); }
  int64_t row_length() const { return C * py * px; }
};

// Of the arguments of patch_embed or its backward.
template <class Args>
Image image_of(const Args& a) {
  return {.dtype = a.image_dtype,
          .data = a.image,
          .C = a.C,
          .Y = a.Y,
          .X = a.X,
          .py = a.py,
          .px = a.px,
          .b_stride = a.b_stride,
          .c_stride = a.c_stride,
          .y_stride = a.y_stride,
          .x_stride = a.x_stride,
          .mean = a.mean,
          .std = a.std};
}

// Patch n of image b as a row of C * py * px fp32 elements, in the order of a flattened filter.
// Normalisation is one multiply-add: pixel * scale + shift, with uint8's 1/255 inside the scale.
inline void unfold_patch(const Image& im, int64_t b, int64_t n, float* row) {
  const int64_t across = im.X / im.px;
  const int64_t corner =
      b * im.b_stride + n / across * im.py * im.y_stride + n % across * im.px * im.x_stride;
  for (int64_t c = 0; c < im.C; ++c) {
    double scale = im.dtype == DType::u8 ? 1.0 / 255 : 1.0, shift = 0;
    if (im.mean) {
      scale /= im.std[c];
      shift = -static_cast<double>(im.mean[c]) / im.std[c];
    }
    const Vec s = Vec::set(static_cast<float>(scale)), t = Vec::set(static_cast<float>(shift));
    const bool plain = scale == 1 && shift == 0;
    for (int64_t y = 0; y < im.py; ++y, row += im.px) {
      const int64_t start = corner + c * im.c_stride + y * im.y_stride;
      if (im.dtype == DType::u8) {
        const uint8_t* p = static_cast<const uint8_t*>(im.data) + start;
        for (int64_t x = 0; x < im.px; ++x) row[x] = p[x * im.x_stride];
      } else if (im.x_stride == 1) {
        widen_row({im.dtype, offset(im.dtype, im.data, start), 0}, 0, row, im.px);
      } else {
        for (int64_t x = 0; x < im.px; ++x)
          load_as(im.dtype, im.data, start + x * im.x_stride, 1).store(row + x, 1);
      }
      if (!plain)
        for (int64_t x = 0; x < im.px; x += Vec::kLanes)
          fma(Vec::load(row + x, im.px - x), s, t).store(row + x, im.px - x);
    }
  }
}

// y[b, T + n, :] = dropout(c + bias + position[n]): row m is patch m % patches of image m /
// patches.
struct PatchEpilogue {
  const float* bias;
  const float* position;
  DType dtype;
  void* y;
  int64_t D, T, patches;
  int64_t first_row = 0;
  Dropout dropout = {};

  void operator()(int64_t m, int64_t n0, int64_t n, float* c) const {
    const int64_t patch = (first_row + m) % patches, b = (first_row + m) / patches;
    const int64_t start = (b * (T + patches) + T + patch) * D + n0;
    for (int64_t i = 0; i < n; i += Vec::kLanes) {
      Vec v = Vec::load(c + i, n - i);
      if (bias) v = v + Vec::load(bias + n0 + i, n - i);
      if (position) v = v + Vec::load(position + patch * D + n0 + i, n - i);
      v.store(c + i, n - i);
    }
    drop(dropout, kElements, static_cast<uint64_t>(start), c, n);
    for (int64_t i = 0; i < n; i += Vec::kLanes)
      store_as(dtype, y, start + i, Vec::load(c + i, n - i), n - i);
  }
};

}  // namespace
