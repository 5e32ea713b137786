#include "checks.hpp"

#include <stdexcept>

namespace vitkern {
namespace {

constexpr int kMostThreads = 4096;
constexpr double kMostSeconds = 60;
// Of one array: more than a machine has, and so little that the scratch of all threads, padded to
// tiles and in three terms, is still counted in 64 bits.
constexpr int64_t kMostBytes = int64_t{1} << 43;
constexpr int64_t kFloat = sizeof(float);
// Steps whose sum fits into 32 bits whatever the integers are: 255 * 127 * K < 2^31.
constexpr int64_t kMostQuantised = 66311;

}  // namespace

void Check::refuse(const std::string& what) const {
  throw std::invalid_argument(std::string("vitkern ") + kernel_ + ": " + what);
}

void Check::too_large(const std::string& what) const {
  throw std::overflow_error(std::string("vitkern ") + kernel_ + ": " + what +
                            " is larger than any memory");
}

void Check::unknown(const char* name, int64_t value) const {
  refuse(std::string(name) + " has the unknown or unfit value " + std::to_string(value));
}

void Check::threads(int n) const {
  if (n < 1 || n > kMostThreads)
    refuse("threads is " + std::to_string(n) + ", expected 1 to " + std::to_string(kMostThreads));
}

void Check::size(const char* name, int64_t n, int64_t least) const {
  if (n < least)
    refuse(std::string(name) + " is " + std::to_string(n) + ", expected at least " +
           std::to_string(least));
  if (n > kMostBytes) too_large(std::string(name) + " = " + std::to_string(n));
}

void Check::multiple(const char* name, int64_t n, const char* of, int64_t unit) const {
  if (n % unit)
    refuse(std::string(name) + " is " + std::to_string(n) + ", expected a multiple of " + of +
           " = " + std::to_string(unit));
}

int64_t Check::count(const char* name, std::initializer_list<int64_t> sizes) const {
  int64_t count = 1;
  for (const int64_t size : sizes)
    if (size == 0) return 0;
  for (const int64_t size : sizes)
    if (__builtin_mul_overflow(count, size, &count) || count > kMostBytes) too_large(name);
  return count;
}

void Check::array(const char* name, const void* data, int64_t element, const Axis* axes,
                  size_t count) const {
  for (size_t i = 0; i < count; ++i)
    if (axes[i].size == 0) return;
  if (!data) refuse(std::string(name) + " is null");
  int64_t elements = element, last = element;  // bytes of all, and from the first to the last one's
  for (size_t i = 0; i < count; ++i) {
    const auto [size, stride] = axes[i];
    if (size < 0 || (size > 1 && stride < 0))
      refuse(std::string(name) + " has a negative size or stride");
    int64_t step = 0;
    if (__builtin_mul_overflow(elements, size, &elements) || elements > kMostBytes ||
        (size > 1 && (__builtin_mul_overflow(size - 1, stride, &step) ||
                      __builtin_mul_overflow(step, element, &step) ||
                      __builtin_add_overflow(last, step, &last) || last > kMostBytes)))
      too_large(name);
  }
}

void Check::array(const char* name, const void* data, int64_t element,
                  std::initializer_list<int64_t> sizes) const {
  Axis axes[4];
  size_t count = 0;
  for (const int64_t size : sizes) axes[count++] = {size, 0};
  array(name, data, element, axes, count);
}

void Check::pixels(const float* mean, const float* std, int64_t channels) const {
  if (!mean != !std) refuse("mean and std go together");
  optional("mean", mean, kFloat, {channels});
}

namespace {

// What attention_args and attention_backward_args name alike.
template <class Args>
void check_attention(const Check& c, const Args& a) {
  c.dtype("dtype", a.dtype);
  c.size("B", a.B), c.size("S", a.S), c.size("H", a.H), c.size("E", a.E);
  c.size("sequences", a.sequences, a.offsets ? 0 : 1);
  c.count("B * H * S", {a.B, a.H, a.S});
  if (a.S >> 31) c.too_large("S * S");  // its scores are counted in 64 bits
  c.array(
      "qkv", a.qkv, bytes_of(a.dtype),
      {Axis{a.B, a.b_stride}, {a.S, a.s_stride}, {3, a.part_stride}, {a.H, a.h_stride}, {a.E, 1}});
  c.optional("bias", a.bias, kFloat,
             std::initializer_list<Axis>{
                 {a.B, a.bias_b_stride}, {a.H, a.bias_h_stride}, {a.S, a.bias_s_stride}, {a.S, 1}});
  if (!a.offsets) return;
  bool ascend = a.offsets[0] == 0 && a.offsets[a.sequences] == a.S;
  for (int64_t i = 0; i < a.sequences; ++i) ascend &= a.offsets[i] <= a.offsets[i + 1];
  if (!ascend) c.refuse("offsets must ascend from 0 to S = " + std::to_string(a.S));
}

// What patch_embed_args and patch_embed_backward_args name alike; returns the patches of an image.
template <class Args>
int64_t check_patches(const Check& c, const Args& a) {
  c.image_dtype(a.image_dtype), c.dtype("w_dtype", a.w_dtype);
  c.size("B", a.B), c.size("C", a.C), c.size("D", a.D), c.size("T", a.T);
  c.size("py", a.py, 1), c.size("px", a.px, 1);
  c.size("Y", a.Y), c.multiple("Y", a.Y, "py", a.py), c.size("X", a.X),
      c.multiple("X", a.X, "px", a.px);
  const int64_t patches = c.count("patches", {a.Y / a.py, a.X / a.px});
  c.count("a patch", {a.C, a.py, a.px});
  c.count("B * S", {a.B, a.T + patches});
  c.array("image", a.image, bytes_of(a.image_dtype),
          {Axis{a.B, a.b_stride}, {a.C, a.c_stride}, {a.Y, a.y_stride}, {a.X, a.x_stride}});
  c.pixels(a.mean, a.std, a.C);
  return patches;
}

}  // namespace

void check(const layernorm_args& a) {
  const Check c("layernorm");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.size("M", a.M), c.size("D", a.D);
  c.array("x", a.x, bytes_of(a.dtype), {Axis{a.M, a.x_stride}, {a.D, 1}});
  c.optional("weight", a.weight, kFloat, {a.D});
  c.array("y", a.y, bytes_of(a.dtype), {a.M, a.D});
}

void check(const norm_linear_args& a) {
  const Check c("norm_linear");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype);
  c.activation(a.activation);
  c.size("M", a.M), c.size("K", a.K), c.size("N", a.N);
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{a.M, a.x_stride}, {a.K, 1}});
  c.array("weight", a.weight, bytes_of(a.w_dtype), {a.N, a.K});
  c.array("y", a.y, bytes_of(a.w_dtype), {a.M, a.N});
}

void check(const attention_args& a) {
  const Check c("attention");
  c.threads(a.threads);
  check_attention(c, a);
  c.array("y", a.y, bytes_of(a.dtype), {a.B, a.S, a.H, a.E});
}

void check(const linear_residual_args& a) {
  const Check c("linear_residual");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype), c.dtype("y_dtype", a.y_dtype);
  c.size("B", a.B), c.size("S", a.S), c.size("K", a.K), c.size("N", a.N);
  const int64_t M = c.count("B * S", {a.B, a.S});
  c.array("y", a.y, bytes_of(a.y_dtype), {M, a.N});
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{M, a.x_stride}, {a.K, 1}});
  c.array("weight", a.weight, bytes_of(a.w_dtype), {a.N, a.K});
  c.array("residual", a.residual, bytes_of(a.y_dtype), {Axis{M, a.residual_stride}, {a.N, 1}});
}

void check(const mlp_args& a) {
  const Check c("mlp");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype);
  c.activation(a.activation);
  c.size("B", a.B), c.size("S", a.S), c.size("D", a.D), c.size("F", a.F);
  const int64_t M = c.count("B * S", {a.B, a.S});
  c.array("y", a.y, bytes_of(a.x_dtype), {M, a.D});
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{M, a.x_stride}, {a.D, 1}});
  c.array("fc1_weight", a.fc1_weight, bytes_of(a.w_dtype), {a.F, a.D});
  c.array("fc2_weight", a.fc2_weight, bytes_of(a.w_dtype), {a.D, a.F});
  c.optional("pre", a.pre, bytes_of(a.w_dtype), {M, a.F});
}

void check(const patch_embed_args& a) {
  const Check c("patch_embed");
  c.threads(a.threads);
  const int64_t patches = check_patches(c, a);
  c.array("weight", a.weight, bytes_of(a.w_dtype), {a.D, a.C * a.py * a.px});
  c.array("prefix", a.prefix, kFloat, {a.T, a.D});
  c.array("y", a.y, bytes_of(a.w_dtype), {a.B, a.T + patches, a.D});
}

void check(const rotary_args& a) {
  const Check c("rotary");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.size("B", a.B), c.size("S", a.S), c.size("H", a.H), c.size("E", a.E), c.size("P", a.P);
  c.multiple("E", a.E, "a pair", 2);
  if (a.P != 1 && a.P != a.H) c.refuse("P is " + std::to_string(a.P) + ", expected 1 or H");
  c.count("B * S", {a.B, a.S});
  c.array(
      "qkv", a.qkv, bytes_of(a.dtype),
      {Axis{a.B, a.b_stride}, {a.S, a.s_stride}, {3, a.part_stride}, {a.H, a.h_stride}, {a.E, 1}});
  if (a.B && a.H) c.array("table", a.table, kFloat, {a.P, a.S, a.E});
  c.array("y", a.y, bytes_of(a.dtype), {a.B, a.S, 3 * a.H, a.E});
}

void check(const swiglu_args& a) {
  const Check c("swiglu");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.size("M", a.M), c.size("F", a.F);
  c.array("x", a.x, bytes_of(a.dtype), {Axis{a.M, a.x_stride}, {2 * a.F, 1}});
  c.array("y", a.y, bytes_of(a.dtype), {a.M, a.F});
}

void check(const swiglu_backward_args& a) {
  const Check c("swiglu_backward");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.size("M", a.M), c.size("F", a.F);
  c.array("grad", a.grad, bytes_of(a.dtype), {a.M, a.F});
  c.array("x", a.x, bytes_of(a.dtype), {Axis{a.M, a.x_stride}, {2 * a.F, 1}});
  c.array("dx", a.dx, bytes_of(a.dtype), {a.M, 2 * a.F});
}

void check(const layernorm_backward_args& a) {
  const Check c("layernorm_backward");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype), c.dtype("grad_dtype", a.grad_dtype);
  c.size("M", a.M), c.size("D", a.D);
  c.array("grad", a.grad, bytes_of(a.grad_dtype), {a.M, a.D});
  c.array("x", a.x, bytes_of(a.dtype), {Axis{a.M, a.x_stride}, {a.D, 1}});
  c.array("stats", a.stats, kFloat, {a.M, 2});
}

void check(const hidden_rows_args& a) {
  const Check c("hidden_rows");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.activation(a.activation);
  c.size("M", a.M), c.size("F", a.F);
  c.array("pre", a.pre, bytes_of(a.dtype), {a.M, a.F});
  if (!a.hidden && !a.d) c.refuse("hidden and d are null");
  if (a.dbias && !a.d) c.refuse("dbias is the sum of d, which is null");
}

void check(const branch_rows_args& a) {
  const Check c("branch_rows");
  c.threads(a.threads);
  c.dtype("dtype", a.dtype);
  c.size("M", a.M), c.size("N", a.N), c.size("S", a.S, 1);
  c.array("x", a.x, kFloat, {a.M, a.N});
  if (a.y)
    c.array("residual", a.residual, bytes_of(a.dtype), {Axis{a.M, a.residual_stride}, {a.N, 1}});
  else
    c.array("grad", a.grad, bytes_of(a.dtype), {a.M, a.N});
  if (a.scaled && !a.gamma) c.refuse("scaled is gamma * x, and gamma is null");
}

void check(const norm_linear_backward_args& a) {
  const Check c("norm_linear_backward");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype);
  c.activation(a.activation);
  c.size("M", a.M), c.size("K", a.K), c.size("N", a.N);
  c.array("grad", a.grad, bytes_of(a.w_dtype), {a.M, a.N});
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{a.M, a.x_stride}, {a.K, 1}});
  c.array("stats", a.stats, kFloat, {a.M, 2});
  c.array("weight", a.weight, bytes_of(a.w_dtype), {a.N, a.K});
  if (a.activation != Activation::none) c.array("pre", a.pre, bytes_of(a.w_dtype), {a.M, a.N});
}

void check(const attention_backward_args& a) {
  const Check c("attention_backward");
  c.threads(a.threads);
  c.array("grad", a.grad, bytes_of(a.dtype), {a.B, a.S, a.H, a.E});
  c.array("dqkv", a.dqkv, bytes_of(a.dtype), {a.B, a.S, 3 * a.H, a.E});
  check_attention(c, a);
}

void check(const linear_residual_backward_args& a) {
  const Check c("linear_residual_backward");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype), c.dtype("y_dtype", a.y_dtype);
  c.size("B", a.B), c.size("S", a.S), c.size("K", a.K), c.size("N", a.N);
  const int64_t M = c.count("B * S", {a.B, a.S});
  c.array("grad", a.grad, bytes_of(a.y_dtype), {M, a.N});
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{M, a.x_stride}, {a.K, 1}});
  c.array("weight", a.weight, bytes_of(a.w_dtype), {a.N, a.K});
}

void check(const mlp_backward_args& a) {
  const Check c("mlp_backward");
  c.threads(a.threads);
  c.dtype("x_dtype", a.x_dtype), c.dtype("w_dtype", a.w_dtype);
  c.activation(a.activation);
  c.size("B", a.B), c.size("S", a.S), c.size("D", a.D), c.size("F", a.F);
  const int64_t M = c.count("B * S", {a.B, a.S});
  c.array("grad", a.grad, bytes_of(a.x_dtype), {M, a.D});
  c.array("x", a.x, bytes_of(a.x_dtype), {Axis{M, a.x_stride}, {a.D, 1}});
  c.array("stats", a.stats, kFloat, {M, 2});
  c.array("pre", a.pre, bytes_of(a.w_dtype), {M, a.F});
  c.array("fc1_weight", a.fc1_weight, bytes_of(a.w_dtype), {a.F, a.D});
  c.array("fc2_weight", a.fc2_weight, bytes_of(a.w_dtype), {a.D, a.F});
}

void check(const patch_embed_backward_args& a) {
  const Check c("patch_embed_backward");
  c.threads(a.threads);
  const int64_t patches = check_patches(c, a);
  c.array("grad", a.grad, bytes_of(a.w_dtype), {a.B, a.T + patches, a.D});
}

void check(const pack_args& a) {
  const Check c("pack");
  c.precision(a.precision);
  c.size("N", a.N), c.size("K", a.K);
  if (a.precision == Precision::int8 && a.dtype == DType::i8) {
    if (a.K > kMostQuantised)
      c.refuse("K is " + std::to_string(a.K) + ", sums of int8 are exact up to " +
               std::to_string(kMostQuantised));
    c.array("scales", a.scales, kFloat, {a.N});
  } else {
    c.dtype("dtype", a.dtype);
  }
  c.array("weight", a.weight, bytes_of(a.dtype), {a.N, a.K});
  if (!a.bytes || !a.layout || !a.form) c.refuse("bytes, layout or form is null");
}

void check(const unpack_args& a) {
  const Check c("unpack");
  c.precision(a.precision);
  c.dtype("dtype", a.dtype);
  c.size("N", a.N), c.size("K", a.K);
  c.array("panels", a.panels, 1, {a.N, a.K});
  c.array("weight", a.weight, bytes_of(a.dtype), {a.N, a.K});
  if (!a.known) c.refuse("known is null");
}

void check(const forward_args& a) {
  const Check c("forward");
  c.threads(a.threads);
  c.image_dtype(a.image_dtype), c.precision(a.precision), c.activation(a.activation);
  c.pool(a.pool), c.norm(a.norm_kind), c.order(a.order);
  c.size("B", a.B), c.size("T", a.T), c.size("depth", a.depth);
  c.size("C", a.C, 1), c.size("D", a.D, 1), c.size("H", a.H, 1), c.size("F", a.F, 1);
  c.size("py", a.py, 1), c.size("px", a.px, 1);
  c.size("rotary_heads", a.rotary_heads);
  const int64_t P = c.count("a patch", {a.C, a.py, a.px});
  c.pixels(a.mean, a.std, a.C);
  for (const ForwardImage* i = a.images; i != a.images + a.B; ++i) {
    c.size("Y", i->Y, 1), c.multiple("Y", i->Y, "py", a.py), c.size("X", i->X, 1),
        c.multiple("X", i->X, "px", a.px);
    const int64_t patches = c.count("patches", {i->Y / a.py, i->X / a.px}), S = a.T + patches;
    for (const int64_t width : {3 * a.D, 2 * a.F, P}) c.count("a layer's rows", {S, width, kFloat});
    c.array("image", i->pixels, bytes_of(a.image_dtype),
            {Axis{a.C, i->c_stride}, {i->Y, i->y_stride}, {i->X, i->x_stride}});
    c.array("prefix", i->prefix, kFloat, {a.T, a.D});
    for (int64_t block = 0; i->biases && block < a.depth; ++block)
      c.array("an attention bias", i->biases[block], kFloat, {a.H, S, S});
    if (!i->turns != !a.rotary_heads) c.refuse("turns and rotary_heads go together");
    for (int64_t block = 0; i->turns && block < a.depth; ++block)
      c.array("a table of turns", i->turns[block], kFloat, {a.rotary_heads, S, a.D / a.H});
    if (!i->y) c.refuse("y is null");
  }
}

void check(const calibrate_args& a) {
  const Check c("calibrate");
  c.threads(a.threads);
  c.precision(a.precision);
  c.size("floats", a.floats);
  c.array("data", a.data, kFloat, {a.floats});
  c.array("rates", a.rates, sizeof(double), {a.threads});
  if (!(a.seconds >= 0 && a.seconds <= kMostSeconds))
    c.refuse("seconds is " + std::to_string(a.seconds) + ", expected 0 to 60");
}

}  // namespace vitkern
