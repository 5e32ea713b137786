// Which instruction sets this build and this CPU have, and the kernel to call.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace vitkern {

// avx512_vnni is avx512 with integer products in the engine's bf16 precision.
enum class Isa { portable, avx2, avx512, avx512_vnni, amx };

std::vector<std::string> available_isas();  // best first: compiled in and supported by this CPU
Isa isa_named(
    const std::string& name);  // "" is VITKERN_ISA or else the best; throws std::invalid_argument
const char* isa_name(Isa isa);

#define VITKERN_KERNEL(kernel) void kernel(Isa isa, const kernel##_args& args);
#define VITKERN_ENGINE(kernel) VITKERN_KERNEL(kernel)
#include "kernels.inc"
#undef VITKERN_ENGINE
#undef VITKERN_KERNEL

struct Feature {
  const char* name;
  bool present;
};
std::vector<Feature>
cpu_features();  // what the CPU advertises, of what vitkern can use or plans to
std::string cpu_model();
bool amx_usable();  // advertised, and the kernel grants the tile registers to this process

}  // namespace vitkern
