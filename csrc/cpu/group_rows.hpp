// The images of a group: their pixels, and which rows are whose. They lie one after another.
#pragma once
#include <utility>

#include "kernels.hpp"
#include "patches.hpp"
#include "schedule.hpp"

namespace vitkern::VITKERN_ISA {
namespace {

struct GroupRows {
  const forward_args& a;
  ImageGroup group;

  int64_t images() const { return group.end - group.begin; }
  // Of image b of the group: itself, its first row, how many it has.
  const ForwardImage& image(int64_t b) const { return a.images[group.begin + b]; }
  int64_t start(int64_t b) const { return a.rows[group.begin + b] - a.rows[group.begin]; }
  int64_t tokens(int64_t b) const { return start(b + 1) - start(b); }

  Image pixels(const ForwardImage& i) const {
    return {.dtype = a.image_dtype,
            .data = i.pixels,
            .C = a.C,
            .Y = i.Y,
            .X = i.X,
            .py = a.py,
            .px = a.px,
            .b_stride = 0,
            .c_stride = i.c_stride,
            .y_stride = i.y_stride,
            .x_stride = i.x_stride,
            .mean = a.mean,
            .std = a.std};
  }

  // The image that row m belongs to; without `skipped` rows of each, if given.
  int64_t image_at(int64_t m, int64_t skipped = 0) const {
    int64_t low = 0, high = images();  // low: an image that begins at m or before
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (start(middle) - middle * skipped <= m ? low : high) = middle;
    }
    return low;
  }

  // The image and the number in it of patch m, in the order of their images.
  std::pair<int64_t, int64_t> patch_at(int64_t m) const {
    const int64_t b = image_at(m, a.T);
    return {b, m - (start(b) - b * a.T)};
  }
};

}  // namespace
}  // namespace vitkern::VITKERN_ISA
