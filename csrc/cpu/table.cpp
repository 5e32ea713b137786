// The entry points of one instruction set, for dispatch.cpp.
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

const Kernels kernels = {
#define VITKERN_KERNEL(kernel) kernel,
#if defined(VITKERN_ENGINE_ONLY)  // its base has the operators
#define VITKERN_OPERATOR(kernel) nullptr,
#endif
#include "kernels.inc"
};

}  // namespace vitkern::VITKERN_ISA
