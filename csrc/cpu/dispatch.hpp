// Which instruction sets this build and this CPU have, and the kernel to call.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace vitkern {

enum class Isa {
#define VITKERN_INSTRUCTION_SET(set, base, machine, needs, flags) set,
#include "isas.inc"
};

// Compiled in and supported by this CPU, best first; operator_isas only those with operators of
// their own (isas.inc).
std::vector<std::string> available_isas();
std::vector<std::string> operator_isas();

// "" is VITKERN_ISA or else the best that pays. Throws std::invalid_argument.
Isa isa_named(const std::string& name);
// The same for an engine. "" leaves fp32 to multiply-adds where the best set has tiles: six bf16
// matmuls in tiles take twice as long while a host lets its virtual machines use the tile unit at a
// quarter of its rate, which was met for an hour at a time. At the full rate they should be 1.4
// times as fast: an estimate.
Isa engine_set(const std::string& name, Precision precision);
// The same for operators, which round their factors at every call: "" is a set that multiplies in
// bf16 rather than in integers, which take more work to make, where both are as fast.
Isa operator_set(const std::string& name, DType weight);
const char* isa_name(Isa isa);

#define VITKERN_KERNEL(kernel) void kernel(Isa isa, const kernel##_args& args);
#include "kernels.inc"

// Of what an operator multiplies its rows by; fp32 where it multiplies by nothing.
template <class Args>
DType weight_of(const Args& args) {
  if constexpr (requires { args.w_dtype; })
    return args.w_dtype;
  else if constexpr (requires { args.qkv; })
    return args.dtype;
  else
    return DType::f32;
}

// Whose panels of weights a set's operators and its engine read.
Isa operators_isa(Isa isa, DType weight);
Isa engine_isa(Isa isa, Precision precision);

// A line of isas.inc, and what became of it here.
struct InstructionSet {
  std::string name, base, machine, needs;  // needs: features of the CPU, in words
  bool built;                              // in this build
  bool runs_here;  // built, and this CPU and its operating system have what it needs
  bool pays;       // is faster than its base: else it runs only where it is asked for by name
};
// All lines, best first. Never throws, whatever VITKERN_ISA says.
std::vector<InstructionSet> instruction_sets();

struct Feature {
  const char* name;
  bool present;
};
// What the CPU advertises of what isas.inc asks for, or of what vitkern plans to use.
std::vector<Feature> cpu_features();
std::string cpu_model();
// Whether a CPU multiplies pairs of integers (vpmaddwd) in two pipes; in one, they are no faster
// than fp32. By cpuid's vendor, family and model, so that a machine always computes the same.
bool pairs_in_two_pipes(const std::string& vendor, unsigned family, unsigned model);
// AMX is advertised, and the operating system grants the tile registers to this process.
bool amx_usable();
// Palettes of AMX tiles that CPUID leaf 0x1D tells of: 0 where a virtual machine hides the leaf.
// vitkern does not need it; libraries that read tile sizes there, such as oneDNN, do.
unsigned amx_palettes();

}  // namespace vitkern
