// Tells libraries of AMX's tiles where a virtual machine forgets to: preloaded into peers that are
// timed.
//
// CPUID leaf 7 says that there is AMX, leaf 0x1D how large its tiles are. Some hypervisors pass the
// first on and end the list of leaves before the second. A library that sizes its tiles by leaf
// 0x1D (oneDNN, in PyTorch and OpenVINO) reads zeros there, configures tiles of no rows, and dies
// of SIGILL. The tiles themselves work: palette 1 is architectural (Intel's manual, volume 1,
// chapter 18), and vitkern uses it without asking.
//
// Linux can make CPUID fault (arch_prctl, ARCH_SET_CPUID). Here each fault of it is answered with
// what the machine says, and with palette 1 where the machine has AMX and says nothing of leaf
// 0x1D. The setting is a thread's own; new threads and forks inherit it, so that one call serves
// the process. An exec ends it, and a child that has LD_PRELOAD begins anew.
//
//   cc -O1 -shared -fPIC -o amx_cpuid.so amx_cpuid.c -ldl
//
// With -DWITHOUT_TILES it answers so on any CPU, for tests; libraries would then die of the tiles.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef ARCH_SET_CPUID
#define ARCH_SET_CPUID 0x1012
#endif

enum { kExtended = 7, kTilePalettes = 0x1D, kTileMultiply = 0x1E, kHasTiles = 1 << 24 };

static int hidden;               // whether AMX is there and its leaves are not
static struct sigaction theirs;  // what the program wants done about faults that are not CPUID's

struct Leaf {
  unsigned a, b, c, d;
};

static struct Leaf ask(unsigned leaf, unsigned part) {
  struct Leaf found;
  __cpuid_count(leaf, part, found.a, found.b, found.c, found.d);
  return found;
}

static struct Leaf answer(unsigned leaf, unsigned part) {
  static const struct Leaf none;
  if (hidden && leaf == kTilePalettes) {
    if (part == 0) return (struct Leaf){1, 0, 0, 0};  // the highest palette
    if (part > 1) return none;
    const unsigned tiles = 8, tile = 1024, row = 64, rows = 16;
    return (struct Leaf){tile << 16 | tiles * tile, tiles << 16 | row, rows, 0};
  }
  if (hidden && leaf == kTileMultiply) {  // at most 16 rows of K, 64 bytes of N
    return part == 0 ? (struct Leaf){0, 64 << 8 | 16, 0, 0} : none;
  }
  struct Leaf found = ask(leaf, part);
  if (hidden && leaf == 0 && found.a < kTileMultiply) found.a = kTileMultiply;  // the last leaf
  return found;
}

static int let_cpuid_run(long yes) { return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, yes); }

static void on_fault(int signal_number, siginfo_t* about, void* context) {
  greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* const at = (const unsigned char*)registers[REG_RIP];
  // si_addr is set by faults of memory, whose instruction may be unreadable; CPUID's is a
  // protection fault
  if (about->si_code == SI_KERNEL && at[0] == 0x0F && at[1] == 0xA2) {
    let_cpuid_run(1);
    const struct Leaf found = answer((unsigned)registers[REG_RAX], (unsigned)registers[REG_RCX]);
    let_cpuid_run(0);
    registers[REG_RAX] = found.a;
    registers[REG_RBX] = found.b;
    registers[REG_RCX] = found.c;
    registers[REG_RDX] = found.d;
    registers[REG_RIP] += 2;
  } else if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(signal_number, about, context);
  } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
    theirs.sa_handler(signal_number);
  } else {  // as without this library: the instruction faults again, and ends the process
    struct sigaction usual = {.sa_handler = SIG_DFL};
    int (*set)(int, const struct sigaction*, struct sigaction*) = dlsym(RTLD_NEXT, "sigaction");
    set(SIGSEGV, &usual, NULL);
  }
}

// A program's own handler of SIGSEGV is called by ours instead of taking its place.
int sigaction(int number, const struct sigaction* wanted, struct sigaction* before) {
  int (*set)(int, const struct sigaction*, struct sigaction*) = dlsym(RTLD_NEXT, "sigaction");
  if (!hidden || number != SIGSEGV) return set(number, wanted, before);
  const struct sigaction was = theirs;
  if (wanted) theirs = *wanted;
  if (before) *before = was;
  return 0;
}

sighandler_t signal(int number, sighandler_t wanted) {
  struct sigaction action = {.sa_handler = wanted, .sa_flags = SA_RESTART}, before;
  return sigaction(number, &action, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void begin(void) {
#ifdef WITHOUT_TILES
  const int tiles = 1;
#else
  const int tiles = (ask(kExtended, 0).d & kHasTiles) != 0;
#endif
  const int told = ask(0, 0).a >= kTilePalettes && ask(kTilePalettes, 0).a != 0;
  if (!tiles || told) return;  // nothing to tell
  struct sigaction ours = {.sa_sigaction = on_fault,
                           .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
  if (sigaction(SIGSEGV, &ours, &theirs) || let_cpuid_run(0)) {
    fprintf(stderr, "amx_cpuid: CPUID cannot be made to fault here (%s): AMX's tiles stay hidden\n",
            strerror(errno));
    return;
  }
  hidden = 1;
}
