// Whether a compiled kernel's file is whole. The driver is given no length, so it would read past
// the end of a truncated one.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace vitkern::cuda {

constexpr uint16_t kCuda = 190, kAmdGpu = 224;  // e_machine of a cubin and of an hsaco

// What is wrong with this 64-bit ELF file ("is truncated"), or nothing.
std::string image_damage(std::string_view image, uint16_t machine);

}  // namespace vitkern::cuda
