// Argument structs of the CPU kernels (most are in arguments.inc) and the kernels themselves, one
// for each line of kernels.inc. Raw pointers and sizes only: nothing here knows torch or Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace vitkern {

enum class DType : int32_t { f32, bf16, u8, i8 };
// How matmuls are computed. Accumulators and everything between matmuls are fp32.
enum class Precision : int32_t {
  // fp32 multiply-adds; on AMX three bf16 terms for each element, six GEMMs of them.
  fp32,
  // At least TF32's accuracy: as fp32; on AMX two terms, three GEMMs.
  tf32,
  // bf16's error or less: both factors rounded to bf16 on AMX and, for operators with bf16 weights,
  // with AVX512_BF16; to integers with a scale where they are faster (tiles_int16.hpp); elsewhere
  // as
  // fp32.
  bf16,
  // Both factors 8-bit integers with a scale for each row (tiles_int8.hpp), compiled for every set
  // under a name of its own; attention as in bf16.
  int8,
};
enum class Activation : int32_t { none, gelu, gelu_tanh, quick_gelu, silu, tanh };
// Of rows: about the mean and by the spread, by the root mean square, or left as they are.
enum class NormKind : int32_t { layer, rms, none };
// A block: x + branch(norm(x)) twice; x + norm(branch(x)) twice; both branches of the same norm(x).
enum class Order : int32_t { pre_norm, post_norm, parallel };

struct Dropout {  // philox.hpp; off when threshold is 0
  uint64_t seed;
  uint32_t threshold;  // p * 2^24
  float scale;         // 1 / (1 - p)
};

#define STRUCT(name) struct name {
#define FIELD(type, name) type name;
#define END \
  }         \
  ;
#include "arguments.inc"
#undef END
#undef FIELD
#undef STRUCT

// How the elements of a panel lie, so that whoever finds one in a file can read it without the
// instruction set that made it (vitkern/panels.py).
struct PanelForm {
  const char* kind;  // floats, integers (16 bits, with scales), terms or pairs (of bf16) or int8
  int64_t columns;   // of a panel: rows of the weight
  int64_t steps;     // of K that a block of integers, a tile of terms or a pair has, else 1
  int64_t terms;     // whose sum is an element: 1 but for AMX
};

// A weight (N, K) as the GEMM wants it: panels of kNR columns, the last one padded with zeros;
// their order is the instruction set's (tiles_fma.hpp, tiles_int16.hpp, tiles_int8.hpp,
// terms_amx.hpp).
struct pack_args {
  Precision precision;
  DType dtype;          // of weight: i8 if it is quantised; int8 may leave a weight in fp32
  const void* weight;   // (N, K)
  const float* scales;  // (N) of i8, else null
  void* panels;         // (bytes); null only asks for bytes and layout
  int64_t N, K;
  size_t* bytes;      // size of the panels
  Precision* layout;  // the first precision whose panels are the same, bit by bit
  PanelForm* form;
};

// The weight (N, K) of which pack made the panels.
struct unpack_args {
  Precision precision;
  DType dtype;         // of weight
  const void* panels;  // by pack, at the same precision
  void* weight;        // (N, K)
  int64_t N, K;
  bool* known;  // false, and nothing is written: the panels hold rounded values
};

// What a weight is multiplied in: int8 leaves one in fp32 that does not come as integers.
[[gnu::always_inline]] constexpr Precision packed_precision(Precision precision, DType dtype) {
  return precision == Precision::int8 && dtype != DType::i8 ? Precision::fp32 : precision;
}

struct PackedLinear {
  const void* panels = nullptr;  // null: the layer is absent
  const float* bias = nullptr;   // (N) or null
  int64_t N = 0, K = 0;
  Precision precision = Precision::fp32;  // the engine's; fp32 of what int8 leaves in floats
};

struct NormVectors {
  const float* weight = nullptr;  // null: the norm is absent
  const float* bias = nullptr;
};

struct BlockWeights {
  NormVectors norm1, q_norm, k_norm, norm2;
  NormVectors attention_norm, mlp_norm;  // before proj and before fc2
  PackedLinear qkv, proj, fc1, fc2;
  PackedLinear gate;  // of fc1's columns; absent: there is none, or fc1 has its rows first
  const float* gamma1 = nullptr;  // (D) LayerScale or null
  const float* gamma2 = nullptr;
};

// All rows, the class row, or the mean of the patches.
enum class Pool : int32_t { tokens, token, mean };

// One image of a forward, and what depends on its size.
struct ForwardImage {
  const void* pixels;  // (C, Y, X) by strides
  int64_t Y, X, c_stride, y_stride, x_stride;
  const float* prefix;         // (T, D) or null
  const float* position;       // (patches, D) or null
  const float* const* biases;  // (depth) of attention, each (H, S, S); or null
  const float* const* turns;   // (depth) of queries and keys, each (rotary_heads, S, E); or null
  float* y;                    // tokens (S, D), or pooled (D), or logits (classes)
  float* const* kept;          // (depth): where the tokens (S, D) after each block go; or null
  int64_t kept_at;             // this image's place there, in floats
};

struct forward_args {
  int threads;
  DType image_dtype;
  Precision precision;
  const ForwardImage* images;  // (B), those of the most tokens first
  const int64_t* rows;         // (B + 1): tokens of the images before each
  const float* mean;           // (C) or null
  const float* std;            // (C) or null
  int64_t B, C, py, px, D, T, H, F, depth;
  PackedLinear patch, head;
  NormVectors norm_pre, norm, fc_norm;  // before the blocks; of every row; of the pooled row
  NormVectors kept_norm;                // of rows that are kept after a block
  const BlockWeights* blocks;           // (depth)
  float eps;
  Activation activation;
  Pool pool;
  NormKind norm_kind;
  Order order;
  bool gated;            // the MLP: silu(gate) * value
  int64_t rotary_heads;  // tables of turns: 0, 1 for all heads, or H
  bool rotary_half;      // turn.hpp
};

// The entry points of an instruction set; null where its base (isas.inc) serves instead.
struct Kernels {
#define VITKERN_KERNEL(kernel) void (*kernel)(const kernel##_args&);
#include "kernels.inc"
};

#if defined(VITKERN_ISA)  // the set that this file is compiled for
namespace VITKERN_ISA {
#define VITKERN_KERNEL(kernel) void kernel(const kernel##_args&);
#include "kernels.inc"
extern const Kernels kernels;  // table.cpp
}  // namespace VITKERN_ISA
#endif

}  // namespace vitkern
