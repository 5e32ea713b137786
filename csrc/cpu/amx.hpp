// The tile unit: its instructions, and its configuration for the time that a team runs.
//
// Palette 1 is architectural: 8 tiles of 16 rows of 64 bytes. It is used without asking CPUID leaf
// 0x1D, which many virtual machines leave empty. The instructions are written here because GCC 12's
// intrinsics do not tell the compiler which memory they read.
#pragma once
#include <cstdint>

namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileStride = 64;

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"n"(tile));
}
template <int tile>
inline void tile_load(const void* from, int64_t stride = kTileStride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "n"(tile) : "memory");
}
template <int tile>  // past L1, for what is read once
inline void tile_stream(const void* from, int64_t stride = kTileStride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "n"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "n"(tile) : "memory");
}
// c (16, 16) fp32 += a (16, 32) times b (32, 16), both bf16 or, halves, fp16; pairs of b's rows
// interleaved. fp16's instruction is written as bytes, because assemblers of 2022 do not know it.
template <bool halves, int c, int a, int b>
inline void tile_dot() {
  if constexpr (halves)
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"n"(0x03 | (~b & 15) << 3),
                 "n"(0xc0 | c << 3 | a));
  else
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(c), "n"(a), "n"(b));
}
// c (16, 16) int32 += a (16, 64) u8 times b (64, 16) s8, fours of b's rows interleaved
template <int c, int a, int b>
inline void tile_dot_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(c), "n"(a), "n"(b));
}

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// While it lives, all tiles have 16 rows of 64 bytes. Afterwards the thread's earlier configuration
// is active again: PyTorch's matmuls configure tiles, too. Their contents are not restored; no
// caller relies on them.
class TileState {
 public:
  TileState() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    TileConfig ours{};
    ours.palette = 1;
    for (int i = 0; i < 8; ++i) {
      ours.row_bytes[i] = kTileStride;
      ours.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(ours));
  }
  ~TileState() {
    if (before_.palette)
      asm volatile("ldtilecfg %0" ::"m"(before_));
    else
      asm volatile("tilerelease");
  }
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;

 private:
  TileConfig before_;
};

}  // namespace
