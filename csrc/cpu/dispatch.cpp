#include "dispatch.hpp"

#include <cstdlib>
#include <cstring>
#include <sstream>
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
#endif

// All these features, in words; amx_tile includes that the operating system grants the tiles.
bool cpu_has(const char* needs) {
  std::istringstream words(needs);
  for (std::string word; words >> word;) {
    bool present = false;
    for (const Feature& f : cpu_features()) present |= f.present && word == f.name;
#if defined(VITKERN_EMULATED)
    present |= word.rfind("avx512", 0) == 0;
#endif
    if (!present || (word == "amx_tile" && !amx_usable())) return false;
  }
  return true;
}

std::string cpu_vendor() {
  char vendor[13] = {};
#if defined(__x86_64__)
  const Leaf zero = cpuid(0, 0);
  std::memcpy(vendor, &zero.b, 4);
  std::memcpy(vendor + 4, &zero.d, 4);
  std::memcpy(vendor + 8, &zero.c, 4);
#endif
  return vendor;
}

// Of this CPU.
bool integers_pay() {
#if defined(__x86_64__)
  const Leaf one = cpuid(1, 0);
  const unsigned base = one.a >> 8 & 15, model = one.a >> 4 & 15;
  const bool extended = base == 15 || base == 6;
  return pairs_in_two_pipes(cpu_vendor(), base == 15 ? base + (one.a >> 20 & 255) : base,
                            extended ? model + (one.a >> 16 & 15) * 16 : model);
#else
  return false;
#endif
}

// Whether this CPU is faster with a set than with its base. Pairs of bf16 have twice the rate of
// fp32 on AMD's (Zen 4 and later), the same rate on Intel's.
bool set_pays(Isa set) {
  if (set == Isa::avx2_int16) return integers_pay();
  return set != Isa::avx512_bf16 || cpu_vendor() == "AuthenticAMD";
}

}  // namespace

bool pairs_in_two_pipes(const std::string& vendor, unsigned family, unsigned model) {
  if (vendor == "GenuineIntel") {
    constexpr unsigned kHaswellBroadwell[] = {0x3c, 0x3d, 0x3f, 0x45, 0x46, 0x47, 0x4f, 0x56};
    for (const unsigned one : kHaswellBroadwell)
      if (family == 6 && model == one) return false;
    return family >= 6;
  }
  return vendor == "AuthenticAMD" && family >= 0x19;  // Zen 3
}

#define VITKERN_INSTRUCTION_SET(set, base, machine, needs, flags) \
  namespace set {                                                 \
  extern const Kernels kernels;                                   \
  }                                                               \
  namespace set##_int8 {                                          \
    extern const Kernels kernels;                                 \
  }
#include "isas.inc"

namespace {

struct IsaRow {
  Isa isa, base;
  const char* name;
  const Kernels* kernels;  // null: not in this build
  const Kernels* int8;     // the engine's for that precision
  bool runs_here;
  bool pays;  // InstructionSet's
};

// A row for each Isa, in its order, which is best first. Made once: AMX costs a system call, and a
// virtual machine's cpuid 10 us.
const std::vector<IsaRow>& isa_rows() {
  static const std::vector<IsaRow> rows = [] {
    std::vector<IsaRow> made;
// CMakeLists.txt defines VITKERN_HAVE_<set> as 1 or 0: what was not compiled must not be named.
#define VITKERN_INSTRUCTION_SET(set, base, machine, needs, flags)                    \
  if constexpr (VITKERN_HAVE_##set)                                                  \
    made.push_back({Isa::set, Isa::base, #set, &set::kernels, &set##_int8 ::kernels, \
                    cpu_has(needs), set_pays(Isa::set)});                            \
  else                                                                               \
    made.push_back({Isa::set, Isa::base, #set, nullptr, nullptr, false, false});
#include "isas.inc"
    return made;
  }();
  return rows;
}

const IsaRow& row_of(Isa isa) { return isa_rows()[static_cast<size_t>(isa)]; }

const IsaRow& row_named(const std::string& name, const char* origin) {
  std::string known;
  for (const IsaRow& row : isa_rows()) {
    if (!row.kernels) continue;
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

const char* forced_isa() {  // "" if none is
  const char* const name = std::getenv("VITKERN_ISA");
  return name ? name : "";
}

const Kernels& operators_of(Isa isa, DType weight) {
  return *row_of(operators_isa(isa, weight)).kernels;
}

const Kernels& engine_of(Isa isa, Precision precision) {
  if (precision == Precision::int8) return *row_of(isa).int8;
  return *row_of(engine_isa(isa, precision)).kernels;
}

}  // namespace

Isa operators_isa(Isa isa, DType weight) { return weight == DType::bf16 ? isa : row_of(isa).base; }

Isa engine_isa(Isa isa, Precision precision) {
  const bool own = precision == Precision::bf16 || precision == Precision::int8;
  return own ? isa : row_of(isa).base;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const IsaRow& row : isa_rows())
    if (row.runs_here) names.push_back(row.name);
  return names;
}

std::vector<std::string> operator_isas() {
  std::vector<std::string> names;
  for (const IsaRow& row : isa_rows())
    if (row.runs_here && row.kernels->norm_linear) names.push_back(row.name);
  return names;
}

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> found;
#define VITKERN_INSTRUCTION_SET(set, base, machine, needs, flags)                         \
  {                                                                                       \
    const IsaRow& row = row_of(Isa::set);                                                 \
    found.push_back(                                                                      \
        {#set, #base, #machine, needs, row.kernels != nullptr, row.runs_here, row.pays}); \
  }
#include "isas.inc"
  return found;
}

Isa isa_named(const std::string& name) {
  if (!name.empty()) return row_named(name, "the caller").isa;
  if (*forced_isa()) return row_named(forced_isa(), "VITKERN_ISA").isa;
  for (const IsaRow& row : isa_rows())
    if (row.runs_here && row.pays) return row.isa;
  return Isa::portable;
}

Isa engine_set(const std::string& name, Precision precision) {
  const Isa set = isa_named(name);
  const bool named = !name.empty() || *forced_isa();
  const bool by_tiles = (set == Isa::amx || set == Isa::amx_fp16) && precision == Precision::fp32;
  return by_tiles && !named && row_of(Isa::avx512).runs_here ? Isa::avx512 : set;
}

Isa operator_set(const std::string& name, DType weight) {
  const IsaRow& pairs = row_of(Isa::avx512_bf16);
  if (name.empty() && !*forced_isa() && pairs.runs_here && pairs.pays) {
    const Isa best = isa_named("");
    if (row_of(best).base == pairs.base) return pairs.isa;
  }
  return engine_set(name, weight == DType::f32 ? Precision::fp32 : Precision::bf16);
}

const char* isa_name(Isa isa) { return row_of(isa).name; }

#define VITKERN_OPERATOR(kernel)                    \
  void kernel(Isa isa, const kernel##_args& args) { \
    check(args);                                    \
    operators_of(isa, DType::f32).kernel(args);     \
  }
#define VITKERN_MATMUL(kernel)                       \
  void kernel(Isa isa, const kernel##_args& args) {  \
    check(args);                                     \
    operators_of(isa, weight_of(args)).kernel(args); \
  }
#define VITKERN_KERNEL(kernel)                      \
  void kernel(Isa isa, const kernel##_args& args) { \
    check(args);                                    \
    engine_of(isa, args.precision).kernel(args);    \
  }
#include "kernels.inc"

std::vector<Feature> cpu_features() {
#if defined(__x86_64__)
  const Leaf seven = cpuid(7, 0);
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", (cpuid(1, 0).c >> 29 & 1) != 0},  // older Clangs do not know its name
          {"bmi2", __builtin_cpu_supports("bmi2") != 0},
          {"avx_vnni", (cpuid(7, 1).a >> 4 & 1) != 0},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
          {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
          {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
          {"avx512_vnni", (seven.c >> 11 & 1) != 0},
          {"avx512_bf16", (cpuid(7, 1).a >> 5 & 1) != 0},
          {"amx_tile", (seven.d >> 24 & 1) != 0},
          {"amx_bf16", (seven.d >> 22 & 1) != 0},
          {"amx_fp16", (cpuid(7, 1).a >> 21 & 1) != 0},
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

unsigned amx_palettes() {
#if defined(__x86_64__)
  return cpuid(0x1D, 0).a;  // zeros beyond the last leaf
#else
  return 0;
#endif
}

}  // namespace vitkern
