// Intel AMX in software: preloaded, this library lets a process run AMX kernels, their object code
// unchanged, on an x86-64 Linux machine whose processor or hypervisor does not offer AMX. It needs
// AVX512-BF16, executed if not announced, as on a virtual machine that hides it.
//
//   gcc -O2 -Wall -Wextra -shared -fPIC -o amx_emulator.so amx_emulator.c -ldl -lpthread
//   VITKERN_AMX_EMULATOR=1 LD_PRELOAD=$PWD/amx_emulator.so python -m pytest ...
//
// Without that variable, or where AMX works already, it does nothing; VITKERN_AMX_EMULATOR=require
// ends the process with status 77 where it cannot work. It makes CPUID fault (SIGSEGV) and answers
// with the machine's own values plus AMX and what oneDNN wants beside it, grants the permission
// that arch_prctl is asked for, and executes AMX instructions, which are invalid opcodes (SIGILL),
// on tiles of the thread. They do what "Operation" says in the Intel SDM; what they refuse (#UD,
// #GP) is a message and abort().
//
// VITKERN_AMX_EMULATOR_WITHOUT_FP16 leaves AMX-FP16 out of the answers (Sapphire Rapids).
//
// AMD's processors and some hypervisors cannot make CPUID fault. There VITKERN_AMX_EMULATOR_CPUID
// names one library and the addresses of its CPUID instructions ("/path/to/_C.so 1a2b0 1a2f4", as
// objdump prints them); when that library has been loaded they become invalid opcodes. Others then
// see the machine as it is.
//
// A trap costs 8 us, so the handler goes on while it knows the next instruction, AMX or a scalar
// one of the loop around it: a loop over k is one trap, at 0.3 us per instruction. Not covered:
// XGETBV, which does not trap; threads that block SIGILL or SIGSEGV; tiles in signal handlers.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <link.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define PER_THREAD static __thread __attribute__((tls_model("initial-exec"), aligned(64)))
#define TARGET(isa) __attribute__((target(isa)))

typedef struct {  // the memory operand of LDTILECFG; palette 1 has the tiles 0 to 7
  uint8_t palette, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
} TileConfig;
typedef uint32_t Tile[16][16];  // zero outside rows x colsb: LDTILECFG clears it, nothing sets it

PER_THREAD TileConfig config;  // all zero: not configured
PER_THREAD Tile tiles[8];
static unsigned long long total;  // AMX instructions, by all threads
static unsigned max_leaf;         // of CPUID, on this machine itself
static unsigned leaf_7_0_edx = 1u << 22 | 3u << 24;  // AMX-BF16, TILE, INT8; others
static unsigned leaf_7_1_eax = 1u << 21;             // AMX-FP16; others
static int active, traps;

unsigned long long vitkern_amx_emulated(void) { return __atomic_load_n(&total, __ATOMIC_RELAXED); }

static void require(int holds, const char* instruction, const char* fault) {
  if (holds) return;
  dprintf(STDERR_FILENO, "amx_emulator: %s: %s\n", instruction, fault);
  abort();
}

// ---- Arithmetic: C (m x n) += A (m x k) B (k x n), of elements of 4 bytes -----------------------
// TDPBF16PS, TDPFP16PS: an element is a pair of bf16 or fp16. Even and odd ones are summed apart over
// k, from zero, by fused multiply-adds; then C += even + odd. Round to nearest even, denormals of
// bf16 and fp32 in and out are zero, those of fp16 are not: the caller sets MXCSR so, and fp16 is
// widened without regard to it. Which one of several NaNs comes out is not specified.
TARGET("avx512f") static __m512 halves(__v16su pairs, int odd, int is_bf16) {
  if (is_bf16) return (__m512)(odd ? pairs & 0xffff0000 : pairs << 16);
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(odd ? pairs >> 16 : pairs)));
}
TARGET("avx512f")
static void multiply_pairs(Tile c, Tile a, Tile b, int m, int k, int n, int is_bf16) {
  for (int i = 0; i < m; ++i) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int j = 0; j < k; ++j) {
      const __v16su x = (__v16su)_mm512_set1_epi32(a[i][j]), y = *(__v16su*)b[j];
      even = _mm512_fmadd_ps(halves(x, 0, is_bf16), halves(y, 0, is_bf16), even);
      odd = _mm512_fmadd_ps(halves(x, 1, is_bf16), halves(y, 1, is_bf16), odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(c[i]), _mm512_add_ps(even, odd));
    _mm512_mask_store_ps(c[i], (1u << n) - 1, sum);
  }
}

// The even or the odd bytes of v as 16-bit numbers.
TARGET("avx2") static inline __m256i widen(__m256i v, int odd, int is_signed) {
  if (!odd) v = _mm256_slli_epi16(v, 8);
  return is_signed ? _mm256_srai_epi16(v, 8) : _mm256_srli_epi16(v, 8);
}

// TDPB[SU][SU]D: an element is four bytes, of A signed if pp & 2, of B if pp & 1; sums wrap around.
TARGET("avx2") static void multiply_int8(Tile c, Tile a, Tile b, int m, int k, int pp) {
  for (int i = 0; i < 2 * m; ++i)  // half rows
    for (int j = 0; j < 2 * k; ++j) {
      const __m256i x = widen(_mm256_set1_epi32(a[i / 2][j / 2]), j % 2, pp & 2);
      const __m256i y = widen(((__m256i*)b[j / 2])[i % 2], j % 2, pp & 1);
      __m256i* sum = (__m256i*)c[i / 2] + i % 2;
      *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(x, y));
    }
}

// ---- Decoding -----------------------------------------------------------------------------------
static uint64_t* reg(greg_t* g, int number) {
  static const uint8_t kIndex[8] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX,
                                    REG_RSP, REG_RBP, REG_RSI, REG_RDI};
  return (uint64_t*)&g[number < 8 ? kIndex[number] : REG_R8 + number - 8];
}

static int64_t signed_at(const uint8_t* p, int bytes) {
  if (bytes < 4) return bytes ? (int8_t)*p : 0;
  return (int32_t)(p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
}

typedef struct {
  int mod, reg, rm, has_sib;
  uint64_t base, offset;  // the address is base (with displacement) + offset (index * scale)
  const uint8_t* end;
} Operands;

// ModRM, SIB and displacement at p; rxb has the three bits that extend reg, index, and rm or base.
static Operands decode_operands(const uint8_t* p, int rxb, greg_t* g) {
  const int rm = *p & 7, high = (rxb & 1) << 3;
  Operands o = {.mod = *p >> 6, .reg = (*p >> 3 & 7) | (rxb & 4) << 1, .rm = rm | high};
  o.end = ++p;
  if (o.mod == 3) return o;
  int base = rm;
  o.has_sib = rm == 4;
  if (o.has_sib) {
    const int index = (*p >> 3 & 7) | (rxb & 2) << 2;
    if (index != 4) o.offset = *reg(g, index) << (*p >> 6);
    base = *p++ & 7;
  }
  const int no_base = o.mod == 0 && base == 5;  // a displacement alone, or from RIP
  const int bytes = no_base || o.mod == 2 ? 4 : o.mod;
  o.end = p + bytes;
  o.base = !no_base ? *reg(g, base | high) : o.has_sib ? 0 : (uint64_t)o.end;
  o.base += signed_at(p, bytes);
  return o;
}

// ---- AMX instructions ---------------------------------------------------------------------------
static void load_config(const void* memory) {
  const char* name = "LDTILECFG";
  TileConfig new;
  memcpy(&new, memory, sizeof new);
  require(new.palette <= 1, name, "#GP, palette above 1");
  if (new.palette == 0) memset(&new, 0, sizeof new);
  for (int t = 0; t < 16; ++t) {
    require(t >= 14 || !new.reserved[t], name, "#GP, reserved byte not zero");
    require(t < 8 || (!new.colsb[t] && !new.rows[t]), name, "#GP, entry of a tile above 7");
    require(new.colsb[t] <= 64 && new.rows[t] <= 16, name, "#GP, over 64 bytes or 16 rows");
    require(!new.colsb[t] == !new.rows[t], name, "#GP, one of rows and colsb is zero");
  }
  config = new;
  memset(tiles, 0, sizeof tiles);
}

static void check_tile(int t, const char* name) {
  require(t < 8 && config.rows[t], name, "#UD, the tile is not configured");
  require(config.colsb[t] % 4 == 0, name, "#UD, colsb is no multiple of 4");
}

static void move_tile(int t, int store, uint8_t* memory, uint64_t stride, const char* name) {
  check_tile(t, name);
  require(config.start_row < config.rows[t], name, "#UD, start_row beyond the tile");
  for (; config.start_row < config.rows[t]; ++config.start_row) {
    void* row = memory + config.start_row * stride;
    void* mine = tiles[t][config.start_row];
    memcpy(store ? row : mine, store ? mine : row, config.colsb[t]);
  }
  config.start_row = 0;
}

// pp: of integers their signs; of pairs 2 is bf16, 3 fp16.
static void multiply(int c, int a, int b, int are_pairs, int pp, const char* name) {
  require(a != b && a != c && b != c, name, "#UD, the same tile twice");
  check_tile(c, name), check_tile(a, name), check_tile(b, name);
  const int m = config.rows[c], n = config.colsb[c] / 4, k = config.rows[b];
  require(config.rows[a] == m && config.colsb[b] == 4 * n, name, "#UD, C does not suit A and B");
  require(config.colsb[a] == 4 * k, name, "#UD, columns of A are not rows of B");
  config.start_row = 0;
  if (!are_pairs) return multiply_int8(tiles[c], tiles[a], tiles[b], m, k, pp);
  const unsigned mxcsr = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // FTZ, DAZ, nearest even, all exceptions masked
  multiply_pairs(tiles[c], tiles[a], tiles[b], m, k, n, pp == 2);
  _mm_setcsr(mxcsr);
}

// Executes the instruction at p if it is one of AMX, and returns the next; NULL if it is another.
// All are VEX.128.0F38.W0; the prefix pp is 0 none, 1 66, 2 F3, 3 F2.
static const uint8_t* execute_amx(const uint8_t* p, greg_t* g) {
  const uint64_t segment = *p == 0x64 ? (uint64_t)__builtin_thread_pointer() : 0;  // prefix FS
  if (segment) ++p;
  if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || p[2] & 0x84) return NULL;
  const int opcode = p[3], pp = p[2] & 3, vvvv = ~p[2] >> 3 & 15;
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e) return NULL;
  const Operands o = decode_operands(p + 4, ~p[1] >> 5, g);
  uint8_t *base = (uint8_t*)(segment + o.base), *memory = base + o.offset;
  const int in_memory = o.mod != 3;
  if (opcode >= 0x5c) {
    static const char* const kNames[][4] = {{"TDPBUUD", "TDPBUSD", "TDPBSUD", "TDPBSSD"},
                                            {"", "", "TDPBF16PS", "TDPFP16PS"}};
    const int are_pairs = opcode == 0x5c;
    if (in_memory || (are_pairs && pp < 2)) return NULL;
    multiply(o.reg, o.rm, vvvv, are_pairs, pp, kNames[are_pairs][pp]);
  } else if (vvvv) {
    return NULL;
  } else if (opcode == 0x4b) {
    static const char* const kNames[] = {"", "TILELOADDT1", "TILESTORED", "TILELOADD"};
    if (!in_memory || !o.has_sib || pp == 0) return NULL;
    move_tile(o.reg, pp == 2, base, o.offset, kNames[pp]);
  } else if (pp == 0 && (in_memory ? o.reg == 0 : p[4] == 0xc0)) {  // LDTILECFG, TILERELEASE
    load_config(in_memory ? memory : (uint8_t*)&(TileConfig){0});
  } else if (pp == 1 && in_memory && o.reg == 0) {  // STTILECFG
    memcpy(memory, &config, sizeof config);
  } else if (pp == 3 && !in_memory && o.rm == 0) {
    check_tile(o.reg, "TILEZERO");
    memset(tiles[o.reg], 0, sizeof(Tile));
    config.start_row = 0;
  } else {
    return NULL;
  }
  return o.end;
}

// ---- Scalar instructions between them -----------------------------------------------------------
static int condition(int code, int flags) {
  const int cf = flags & 1, pf = flags >> 2 & 1, zf = flags >> 6 & 1, sf = flags >> 7 & 1;
  const int of = flags >> 11 & 1, less = sf ^ of;
  const int holds[8] = {of, cf, zf, cf | zf, sf, pf, less, less | zf};
  return holds[code >> 1 & 7] ^ (code & 1);
}

// As execute_amx, for jumps, prefetches, LEA, MOV, ADD, SUB, CMP, INC and DEC on registers of 32 or
// 64 bits. None may move RSP: a tile stored below it would overwrite the frame of the handler.
static const uint8_t* execute_scalar(const uint8_t* p, greg_t* g) {
  const int rex = (*p & 0xf0) == 0x40 ? *p++ : 0;
  int opcode = *p++;
  if (opcode == 0xeb) return p + 1 + (int8_t)*p;
  if (opcode >> 4 == 7) return p + 1 + (condition(opcode, g[REG_EFL]) ? (int8_t)*p : 0);
  if (opcode == 0x0f) {
    opcode = *p++;
    if (opcode >> 4 == 8) return p + 4 + (condition(opcode, g[REG_EFL]) ? signed_at(p, 4) : 0);
    const int is_prefetch = (opcode == 0x0d || opcode == 0x18) && *p < 0xc0;
    return is_prefetch ? decode_operands(p, rex, g).end : NULL;
  }
  if (!memchr("\x01\x29\x39\x81\x83\x89\x8d\xff", opcode, 8)) return NULL;
  Operands o = decode_operands(p, rex, g);
  const int is_lea = opcode == 0x8d, is_step = opcode == 0xff, number = is_lea ? o.reg : o.rm;
  if (is_lea != (o.mod != 3) || number == 4) return NULL;
  const uint64_t mask = rex & 8 ? ~0ull : 0xffffffff, sign = mask ^ mask >> 1;
  uint64_t *target = reg(g, number), x = *target & mask, y = *reg(g, o.reg) & mask;
  if (is_lea || opcode == 0x89) {
    *target = is_lea ? (o.base + o.offset) & mask : y;
    return o.end;
  }
  int op = opcode >> 3;  // ADD 0, SUB 5, CMP 7
  if (is_step) op = 5 * (o.reg & 7), y = 1;
  if (opcode == 0x81 || opcode == 0x83) {
    const int bytes = opcode == 0x81 ? 4 : 1;
    op = o.reg & 7, y = signed_at(o.end, bytes) & mask, o.end += bytes;
  }
  if (op != 0 && op != 5 && op != 7) return NULL;
  const uint64_t z = (op ? x - y : x + y) & mask, over = (op ? x ^ y : ~(x ^ y)) & (x ^ z);
  const int cf = op ? x < y : z < x, pf = !__builtin_parity(z & 255), af = (x ^ y ^ z) >> 4 & 1;
  const int flags = cf | pf << 2 | af << 4 | !z << 6 | !!(z & sign) << 7 | !!(over & sign) << 11;
  const greg_t changed = is_step ? 0x8d4 : 0x8d5;  // INC and DEC leave CF alone
  g[REG_EFL] = (g[REG_EFL] & ~changed) | (flags & changed);
  if (op != 7) *target = z;
  return o.end;
}

// ---- Signals ------------------------------------------------------------------------------------
int __sigaction(int, const struct sigaction*, struct sigaction*);  // glibc's own name of sigaction
static struct sigaction theirs[NSIG];  // what others installed for SIGILL and SIGSEGV

static void forward(int number, siginfo_t* info, void* context) {
  const struct sigaction other = theirs[number];
  const int was_sent = info->si_code <= 0;  // by kill or raise; not the fault of an instruction
  const int handled = other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN;
  if (handled && other.sa_flags & SA_SIGINFO) return other.sa_sigaction(number, info, context);
  if (handled) return other.sa_handler(number);
  if (other.sa_handler == SIG_IGN && was_sent) return;
  __sigaction(number, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
  if (was_sent) raise(number);  // otherwise the instruction faults again
}

static void answer_cpuid(greg_t* g);
static const uint8_t* replaced[64];  // CPUID instructions that are invalid opcodes now

static void on_sigill(int number, siginfo_t* info, void* context) {
  greg_t* g = ((ucontext_t*)context)->uc_mcontext.gregs;
  for (int i = 0; i < 64 && replaced[i]; ++i)
    if (replaced[i] == (const uint8_t*)g[REG_RIP]) return answer_cpuid(g);
  unsigned long long count = 0;
  for (int scalars = 0; info->si_code > 0 && scalars < 64;) {
    const uint8_t *ip = (const uint8_t*)g[REG_RIP], *next = execute_amx(ip, g);
    scalars = next ? 0 : scalars + 1;
    count += next != NULL;
    if (!next && count) next = execute_scalar(ip, g);
    if (!next) break;
    g[REG_RIP] = (greg_t)next;
  }
  if (!count) return forward(number, info, context);
  __atomic_fetch_add(&total, count, __ATOMIC_RELAXED);
}

static long real_syscall(long number, long a, long b, long c, long d, long e, long f) {
  static long (*real)(long, ...);
  if (!real) real = dlsym(RTLD_NEXT, "syscall");
  return real(number, a, b, c, d, e, f);
}

static long set_cpuid_faulting(int on) {  // of this thread; those that it starts inherit it
  return real_syscall(SYS_arch_prctl, ARCH_SET_CPUID, !on, 0, 0, 0, 0);
}

static void answer_cpuid(greg_t* g) {
  const unsigned leaf = g[REG_RAX], subleaf = g[REG_RCX];
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (leaf <= max_leaf || leaf >= 0x40000000) {
    set_cpuid_faulting(0);
    __cpuid_count(leaf, subleaf, a, b, c, d);
    set_cpuid_faulting(1);
  }
  if (leaf == 0 && a < 0x1e) a = 0x1e;
  if (leaf == 7 && subleaf == 0) a += a == 0, d |= leaf_7_0_edx;
  if (leaf == 7 && subleaf == 1) a |= leaf_7_1_eax;
  if (leaf == 0xd && subleaf == 0) a |= 3u << 17;  // XCR0 may have TILECFG and TILEDATA
  if (leaf == 0x1d || leaf == 0x1e) a = b = c = d = 0;
  if (leaf == 0x1d && subleaf == 0) a = 1;  // the last palette
  if (leaf == 0x1d && subleaf == 1)         // bytes per tile and in all; tiles, bytes per row; rows
    a = 1024 << 16 | 8192, b = 8 << 16 | 64, c = 16;
  if (leaf == 0x1e && subleaf == 0) b = 64 << 8 | 16;  // most bytes of n, most k
  g[REG_RAX] = a, g[REG_RBX] = b, g[REG_RCX] = c, g[REG_RDX] = d;
  g[REG_RIP] += 2;
}

static void on_sigsegv(int number, siginfo_t* info, void* context) {
  greg_t* g = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* ip = (const uint8_t*)g[REG_RIP];
  if (info->si_code != SI_KERNEL || ip[0] != 0x0f || ip[1] != 0xa2)
    return forward(number, info, context);
  answer_cpuid(g);
}

// Puts UD2 where the library that starts at `base` has CPUID; `addresses` is in its own numbers.
static void replace_cpuid(uint8_t* base, const char* addresses) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  char* rest = (char*)addresses;
  for (int i = 0; i < 63 && *rest; ++i) {
    uint8_t* const at = base + strtoull(rest, &rest, 16);
    require(at[0] == 0x0f && at[1] == 0xa2, "CPUID", "not at an address that was named");
    void* const start = (void*)((uintptr_t)at / page * page);
    require(!mprotect(start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC), "CPUID", "read-only");
    at[1] = 0x0b;
    mprotect(start, 2 * page, PROT_READ | PROT_EXEC);
    replaced[i] = at;
  }
}

// ---- Functions of libc that stand in the way ----------------------------------------------------
static char* library;  // whose CPUID instructions are to be replaced, and the end of its path
static size_t path_length;

void* dlopen(const char* file, int mode) {
  static void* (*real)(const char*, int);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "dlopen");
  const int is_it = active && library && file && !replaced[0] && strlen(file) == path_length &&
                    !strncmp(file, library, path_length);
  if (!is_it) return real(file, mode);  // a jump: libraries are searched for by who calls
  void* const handle = real(file, mode);
  struct link_map* map;
  if (handle && !dlinfo(handle, RTLD_DI_LINKMAP, &map))
    replace_cpuid((uint8_t*)map->l_addr, library + path_length);
  return handle;
}

int sigaction(int number, const struct sigaction* new, struct sigaction* old) {
  if (!active || (number != SIGILL && number != SIGSEGV)) return __sigaction(number, new, old);
  const struct sigaction previous = theirs[number];
  if (new) theirs[number] = *new;
  if (old) *old = previous;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction new = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
  return sigaction(number, &new, &old) ? SIG_ERR : old.sa_handler;
}

int arch_prctl(int code, unsigned long address) {
  enum { kSupported = 0x1021, kPermitted, kRequest };  // ARCH_GET_XCOMP_SUPP and so on
  if (active && code == kRequest && address == 18) return 0;
  const int result = real_syscall(SYS_arch_prctl, code, address, 0, 0, 0, 0);
  if (result != 0) return result;
  if (active && (code == kSupported || code == kPermitted)) *(uint64_t*)address |= 3u << 17;
  return 0;
}

// syscall under another name, as its declaration is variadic: the registers are the same.
long any_syscall(long number, long a, long b, long c, long d, long e, long f) __asm__("syscall");
long any_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == SYS_arch_prctl) return arch_prctl(a, b);
  return real_syscall(number, a, b, c, d, e, f);
}

// ---- Start --------------------------------------------------------------------------------------
// Whether these 6 bytes of code, which may write zmm0, run without a trap.
#define RUNS(code) \
  (traps = 0, ({ __asm__ volatile(".byte " code : : : "xmm0", "memory"); }), !traps)

static void on_probe(int number, siginfo_t* info, void* context) {
  (void)info;
  traps = number;
  ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] += 6;
}

__attribute__((constructor)) static void start(void) {
  const char* wish = getenv("VITKERN_AMX_EMULATOR");
  if (!wish || !*wish) return;
  struct sigaction ours = {.sa_sigaction = on_probe, .sa_flags = SA_SIGINFO | SA_NODEFER};
  __sigaction(SIGILL, &ours, &theirs[SIGILL]);
  const unsigned has_avx512_bf16 = RUNS("0x62, 0xf2, 0x7e, 0x48, 0x52, 0xc0");  // vdpbf16ps
  const unsigned has_avx512_fp16 = RUNS("0x62, 0xf5, 0x7c, 0x48, 0x58, 0xc0");  // vaddph
  const unsigned has_avx_vnni = RUNS("0xc4, 0xe2, 0x7d, 0x50, 0xc0, 0x90");     // vpdpbusd, nop
  __sigaction(SIGILL, &theirs[SIGILL], NULL);
  leaf_7_0_edx |= has_avx512_fp16 << 23;
  if (getenv("VITKERN_AMX_EMULATOR_WITHOUT_FP16")) leaf_7_1_eax = 0;
  leaf_7_1_eax |= has_avx512_bf16 << 5 | has_avx_vnni << 4;

  unsigned a, b, c, d = 0, xcr0 = 0;
  if (has_avx512_bf16) __asm__("xgetbv" : "=a"(xcr0) : "c"(0) : "edx");
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  if ((xcr0 >> 17 & 3) == 3 && d >> 24 & 1) return;
  max_leaf = __get_cpuid_max(0, NULL);
  library = getenv("VITKERN_AMX_EMULATOR_CPUID");
  if (library) path_length = strcspn(library, " ");
  const int answers = set_cpuid_faulting(1) == 0 || library;
  if (!has_avx512_bf16 || !answers) {
    if (strcmp(wish, "require")) return;
    const char* missing = has_avx512_bf16 ? "CPUID cannot be made to fault" : "no AVX512-BF16";
    dprintf(STDERR_FILENO, "amx_emulator: cannot work here: %s\n", missing);
    _exit(77);
  }
  ours.sa_sigaction = on_sigill;
  __sigaction(SIGILL, &ours, NULL);
  ours.sa_sigaction = on_sigsegv;
  __sigaction(SIGSEGV, &ours, &theirs[SIGSEGV]);
  active = 1;
}
