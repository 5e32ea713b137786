// Argument structs of the CPU kernels and a declaration for each line of kernels.inc and each ISA.
// Raw pointers and sizes only: nothing here knows torch or Python.
//
// Matrices and activations have a run-time dtype; per-channel vectors (norm weights, biases, gamma)
// are fp32. A stride counts elements; the last axis is always contiguous.
#pragma once
#include <cstddef>
#include <cstdint>

namespace vitkern {

enum class DType : int32_t { f32, bf16, u8 };
// How products are computed. Sums and everything between products are fp32.
enum class Precision : int32_t {
  fp32,  // fp32 multiply-adds; on AMX three bf16 terms for each number, six products
  tf32,  // at least TF32's accuracy: as fp32; on AMX two terms, three products
  bf16,  // bf16's error or about that: both factors rounded to bf16 on AMX, to integers with a
         // scale on AVX-512 VNNI (tiles_vnni.hpp); elsewhere bf16 weights, fp32 multiply-adds
};
enum class Activation : int32_t { none, gelu, gelu_tanh, quick_gelu, tanh };

struct Dropout {  // philox.hpp; off when threshold is 0
  uint64_t seed;
  uint32_t threshold;  // p * 2^24
  float scale;         // 1 / (1 - p)
};

struct layernorm_args {
  int threads;
  DType dtype;          // of x and y
  const void* x;        // (M, D), rows x_stride apart
  const float* weight;  // (D) or null
  const float* bias;    // (D) or null
  void* y;              // (M, D)
  float* stats;         // (M, 2): mean, 1 / sqrt(var + eps); or null
  int64_t M, D, x_stride;
  float eps;
};

struct norm_linear_args {
  int threads;
  DType x_dtype, w_dtype;    // of x; of weight, y and pre
  const void* x;             // (M, K), rows x_stride apart
  const float* norm_weight;  // (K) or null
  const float* norm_bias;    // (K) or null
  const void* weight;        // (N, K)
  const float* bias;         // (N) or null
  void* y;                   // (M, N)
  float* stats;              // (M, 2) or null
  void* pre;                 // (M, N) before the activation, or null
  int64_t M, K, N, x_stride;
  float eps;
  Activation activation;
};

struct attention_args {
  int threads;
  DType dtype;             // of qkv and y
  const void* qkv;         // (B, S, 3, H, E) by strides
  const float* bias;       // (B, H, S, S) by strides, or null
  const int32_t* offsets;  // (sequences + 1) or null: one sequence of S tokens
  void* y;                 // (B, S, H, E)
  float* lse;              // (B, H, S) or null
  int64_t B, S, H, E, sequences;
  int64_t b_stride, s_stride, part_stride, h_stride;    // of qkv
  int64_t bias_b_stride, bias_h_stride, bias_s_stride;  // 0 broadcasts
  float scale;
  Dropout dropout;
};

struct linear_residual_args {
  int threads;
  DType x_dtype, w_dtype, y_dtype;  // of x; of weight; of residual and y
  const void* x;                    // (B, S, K), rows x_stride apart
  const void* weight;               // (N, K)
  const float* bias;                // (N) or null
  const void* residual;             // (B, S, N), rows residual_stride apart
  const float* gamma;               // (N) or null
  void* y;                          // (B, S, N)
  int64_t B, S, K, N, x_stride, residual_stride;
  Dropout dropout, path;
};

struct mlp_args {
  int threads;
  DType x_dtype, w_dtype;    // of x and y; of the weights and pre
  const void* x;             // (B, S, D), rows x_stride apart
  const float* norm_weight;  // (D) or null
  const float* norm_bias;    // (D) or null
  const void* fc1_weight;    // (F, D)
  const float* fc1_bias;     // (F) or null
  const void* fc2_weight;    // (D, F)
  const float* fc2_bias;     // (D) or null
  const float* gamma;        // (D) or null
  void* y;                   // (B, S, D)
  float* stats;              // (B*S, 2) or null
  void* pre;                 // (B, S, F) or null
  int64_t B, S, D, F, x_stride;
  float eps;
  Activation activation;
  Dropout dropout, path;
};

struct calibrate_args {
  int threads;
  Precision precision;  // of the products: as the engine computes them
  const float* data;    // (floats) read over and over; null: multiply numbers in L1 instead
  int64_t floats;
  double seconds;  // how long; tens of milliseconds are enough
  double* rates;   // (threads) flops or bytes a second, of each thread
};

struct patch_embed_args {
  int threads;
  DType image_dtype, w_dtype;  // of image (f32, bf16, u8); of weight and y
  const void* image;           // (B, C, Y, X) by strides
  const void* weight;          // (D, C, py, px)
  const float* bias;           // (D) or null
  const float* prefix;         // (T, D) or null
  const float* position;       // (patches, D) or null
  const float* mean;           // (C) or null
  const float* std;            // (C) or null
  void* y;                     // (B, T + patches, D)
  int64_t B, C, Y, X, py, px, D, T;
  int64_t b_stride, c_stride, y_stride, x_stride;  // of image
  Dropout dropout;
};

// A weight (N, K) as the GEMM wants it: panels of kNR columns, the last one padded with zeros;
// their order is the instruction set's (tiles_fma.hpp, tiles_vnni.hpp, terms_amx.hpp).
struct pack_args {
  Precision precision;
  DType dtype;         // of weight
  const void* weight;  // (N, K)
  void* panels;        // pack_bytes of it; null only asks for the size
  int64_t N, K;
  size_t* bytes;  // size of the panels
};

struct PackedLinear {
  const void* panels = nullptr;  // null: the layer is absent
  const float* bias = nullptr;   // (N) or null
  int64_t N = 0, K = 0;
};

struct NormVectors {
  const float* weight = nullptr;  // null: the norm is absent
  const float* bias = nullptr;
};

struct BlockWeights {
  NormVectors norm1, q_norm, k_norm, norm2;
  PackedLinear qkv, proj, fc1, fc2;
  const float* gamma1 = nullptr;  // (D) LayerScale or null
  const float* gamma2 = nullptr;
};

// All rows, the class row, or the mean of the patches.
enum class Pool : int32_t { tokens, token, mean };

struct forward_args {
  int threads;
  DType image_dtype;
  Precision precision;
  const void* image;           // (B, C, Y, X) by strides
  const float* prefix;         // (T, D) or null
  const float* position;       // (patches, D) or null
  const float* mean;           // (C) or null
  const float* std;            // (C) or null
  const float* const* biases;  // (depth) of attention, each (H, S, S); or null
  float* y;                    // tokens (B, S, D), or pooled (B, D), or logits (B, classes)
  int64_t B, C, Y, X, py, px, D, T, H, F, depth;
  int64_t b_stride, c_stride, y_stride, x_stride;
  PackedLinear patch, head;
  NormVectors norm_pre, norm, fc_norm;  // before the blocks; of every row; of the pooled row
  const BlockWeights* blocks;           // (depth)
  float eps;
  Activation activation;
  Pool pool;
};

#define VITKERN_KERNEL(kernel)       \
  namespace portable {               \
  void kernel(const kernel##_args&); \
  }                                  \
  namespace avx2 {                   \
  void kernel(const kernel##_args&); \
  }                                  \
  namespace avx512 {                 \
  void kernel(const kernel##_args&); \
  }                                  \
  namespace amx {                    \
  void kernel(const kernel##_args&); \
  }
#define VITKERN_ENGINE(kernel)       \
  VITKERN_KERNEL(kernel)             \
  namespace avx512_vnni {            \
  void kernel(const kernel##_args&); \
  }
#include "kernels.inc"
#undef VITKERN_ENGINE
#undef VITKERN_KERNEL

}  // namespace vitkern
