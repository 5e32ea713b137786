// The entry points of one instruction set, for dispatch.cpp.
#include "kernels.hpp"

namespace vitkern::VITKERN_ISA {

const Kernels kernels = {
#define VITKERN_KERNEL(kernel) kernel,
#if defined(VITKERN_HAS_BASE)  // which has the other operators
#define VITKERN_OPERATOR(kernel) nullptr,
#if !defined(VITKERN_INT8)
#define VITKERN_MATMUL(kernel) kernel,
#endif
#endif
#include "kernels.inc"
};

}  // namespace vitkern::VITKERN_ISA
