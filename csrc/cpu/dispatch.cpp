#include "dispatch.hpp"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "checks.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vitkern {
namespace {

#if defined(__x86_64__)
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Leaf cpuid(unsigned leaf, unsigned subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

[[maybe_unused]] bool has_avx512() {  // a build may leave instruction sets out
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return cpuid(7, 1).a >> 5 & 1; }
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}
#endif

struct IsaRow {
  Isa isa;
  const char* name;
  bool runs_here;
};

const std::vector<IsaRow>& isa_rows() {  // best first; asked once: AMX costs a system call
  static const std::vector<IsaRow> rows = {
#if defined(VITKERN_HAVE_AMX)
      {Isa::amx, "amx", has_avx512() && has_avx512_bf16() && amx_usable()},
#endif
#if defined(VITKERN_HAVE_AVX512_VNNI)
      {Isa::avx512_vnni, "avx512_vnni", has_avx512() && __builtin_cpu_supports("avx512vnni")},
#endif
#if defined(VITKERN_HAVE_AVX512)
      {Isa::avx512, "avx512", has_avx512()},
#endif
#if defined(VITKERN_HAVE_AVX2)
      {Isa::avx2, "avx2", has_avx2()},
#endif
      {Isa::portable, "portable", true},
  };
  return rows;
}

const IsaRow& row_named(const std::string& name, const char* origin) {
  std::string known;
  for (const IsaRow& row : isa_rows()) {
    if (name == row.name) {
      if (row.runs_here) return row;
      throw std::invalid_argument(
          "vitkern: this CPU, or its operating system, does not support the instruction set '" +
          name + "' asked for by " + origin);
    }
    known += std::string(known.empty() ? "" : ", ") + row.name;
  }
  throw std::invalid_argument("vitkern: unknown instruction set '" + name + "' asked for by " +
                              origin + "; this build has: " + known);
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const IsaRow& row : isa_rows())
    if (row.runs_here) names.push_back(row.name);
  return names;
}

Isa isa_named(const std::string& name) {
  if (!name.empty()) return row_named(name, "the caller").isa;
  const char* forced = std::getenv("VITKERN_ISA");
  if (forced && *forced) return row_named(forced, "VITKERN_ISA").isa;
  for (const IsaRow& row : isa_rows())
    if (row.runs_here) return row.isa;
  return Isa::portable;
}

const char* isa_name(Isa isa) {
  for (const IsaRow& row : isa_rows())
    if (row.isa == isa) return row.name;
  return "portable";
}

#if defined(VITKERN_HAVE_AMX)
#define VITKERN_AMX_CASE(kernel) \
  case Isa::amx:                 \
    return amx::kernel(args);
#else
#define VITKERN_AMX_CASE(kernel)
#endif
#if defined(VITKERN_HAVE_AVX512)
#define VITKERN_AVX512_CASE(kernel) \
  case Isa::avx512:                 \
  case Isa::avx512_vnni:            \
    return avx512::kernel(args);
#else
#define VITKERN_AVX512_CASE(kernel)
#endif
#if defined(VITKERN_HAVE_AVX2)
#define VITKERN_AVX2_CASE(kernel) \
  case Isa::avx2:                 \
    return avx2::kernel(args);
#else
#define VITKERN_AVX2_CASE(kernel)
#endif
#if defined(VITKERN_HAVE_AVX512_VNNI)
#define VITKERN_VNNI_CASE(kernel)                                   \
  if (isa == Isa::avx512_vnni && args.precision == Precision::bf16) \
    return avx512_vnni::kernel(args);
#else
#define VITKERN_VNNI_CASE(kernel)
#endif
#define VITKERN_SWITCH(kernel)       \
  switch (isa) {                     \
    VITKERN_AMX_CASE(kernel)         \
    VITKERN_AVX512_CASE(kernel)      \
    VITKERN_AVX2_CASE(kernel)        \
    default:                         \
      return portable::kernel(args); \
  }
#define VITKERN_KERNEL(kernel)                      \
  void kernel(Isa isa, const kernel##_args& args) { \
    check(args);                                    \
    VITKERN_SWITCH(kernel)                          \
  }
#define VITKERN_ENGINE(kernel)                      \
  void kernel(Isa isa, const kernel##_args& args) { \
    check(args);                                    \
    VITKERN_VNNI_CASE(kernel)                       \
    VITKERN_SWITCH(kernel)                          \
  }
#include "kernels.inc"
#undef VITKERN_ENGINE
#undef VITKERN_KERNEL

std::vector<Feature> cpu_features() {
#if defined(__x86_64__)
  const Leaf seven = cpuid(7, 0);
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512_vnni", (seven.c >> 11 & 1) != 0},
          {"avx512_bf16", has_avx512_bf16()},
          {"amx_tile", (seven.d >> 24 & 1) != 0},
          {"amx_bf16", (seven.d >> 22 & 1) != 0},
          {"amx_int8", (seven.d >> 25 & 1) != 0}};
#else
  return {};
#endif
}

std::string cpu_model() {
#if defined(__x86_64__)
  char name[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Leaf leaf = cpuid(0x80000002 + i, 0);
    std::memcpy(name + 16 * i, &leaf, 16);
  }
  return name;
#else
  return "";
#endif
}

bool amx_usable() {
#if defined(__x86_64__) && defined(__linux__)
  const Leaf seven = cpuid(7, 0);
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return (seven.d >> 24 & 1) && (seven.d >> 22 & 1) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace vitkern
