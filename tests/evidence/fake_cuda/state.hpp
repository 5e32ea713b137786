// What the stand-in driver knows, and the rules that a launch must keep. For fake_cuda.cpp only.
#pragma once
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>

#include "cubin.hpp"

namespace {

enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchOutOfResources = 701,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
  kInvalidClusterSize = 912,
};

struct Context {
  int device, arch;
};

struct Module {
  Context* context;
  std::vector<uint8_t> bytes;
  cubin::Image image;
  bool alive = true;
};

struct Function {
  Module* module;
  const cubin::Function* facts;
  int dynamic_limit = 48 * 1024;
};

struct Launch {  // also the layout of Python's structure
  const uint8_t* image;
  uint64_t image_size;
  const char* kernel;
  const uint8_t* data;
  const int *offsets, *sizes;
  int parameters, device;
  unsigned grid[3], block, shared;
};

struct Node {
  Function* function;
  unsigned grid[3], block, shared;
  std::vector<uint8_t> data;
};

struct Stream {
  Context* context;
  std::vector<Node> nodes;
  bool capturing = false, invalidated = false, alive = true;
};

struct Graph {
  Context* context;
  std::vector<Node> nodes;
  std::vector<std::vector<size_t>> after = {};  // the nodes that each one waits for
  Graph* made_of = nullptr;                     // of an executable graph
  bool alive = true;
};

struct Place {  // what a node's handle points to
  Graph* graph;
  size_t index;
};

struct NodeParameters {  // CUDA_KERNEL_NODE_PARAMS_v2
  void* function;
  unsigned grid[3], block[3], shared;
  void **parameters, **extra;
  void *kernel, *context;
};

// Nothing that a handle points to is freed before the process ends: a stale handle is found by its
// mark and not by a crash.
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::vector<std::unique_ptr<Context>> contexts;
std::vector<std::unique_ptr<Stream>> streams;
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Function>> functions;
std::vector<std::unique_ptr<Graph>> graphs;
std::vector<std::unique_ptr<Place>> places;
std::vector<int> devices = {80};
std::string journal, reason, wanted_call;
int wanted_status = 0, pause_before_launch = 0;
bool initialized = false;
int (*execute)(const Launch*) = nullptr;
thread_local std::vector<Context*> stack;
constexpr int kRelaxed = 2;
thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

Context* current() { return stack.empty() ? nullptr : stack.back(); }

template <class... Arguments>
std::string text(const char* format, Arguments... arguments) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, arguments...);
  return buffer;
}

void note(const std::string& line) { journal += line + "\n"; }

int fail(Status status, const std::string& why) {
  reason = why;
  note("error " + std::to_string(status) + ": " + why);
  return status;
}

// Shared memory that a block may opt in to: CUDA's programming guide, table of compute
// capabilities.
int shared_limit(int arch) {
  const bool large = arch == 90 || arch / 10 == 10;
  return (large ? 227 : arch == 80 || arch == 87 ? 163 : 99) * 1024;
}

enum class Capture { harmless, unsafe };

// What every call begins with: a failure that the test asked for, and the rules of stream capture.
int begin(const char* call, Capture capture = Capture::harmless) {
  reason.clear();
  note(call);
  if (wanted_call == call) {
    wanted_call.clear();
    return fail(static_cast<Status>(wanted_status), "as the test wants");
  }
  if (!initialized && std::strcmp(call, "cuInit") != 0)
    return fail(kNotInitialized, "cuInit was not called");
  if (capture == Capture::unsafe && capture_mode != kRelaxed)
    for (const auto& s : streams)
      if (s->capturing) {
        s->invalidated = true;
        return fail(kCaptureUnsupported, std::string(call) + " while a stream is captured");
      }
  return kSuccess;
}

#define BEGIN(...)        \
  const Lock lock(mutex); \
  if (const int status = begin(__func__ __VA_OPT__(, ) __VA_ARGS__)) return status

Stream* known(void* handle) {
  for (const auto& s : streams)
    if (s.get() == handle) return s.get();
  return nullptr;
}

// Copies through the kernel, so that a pointer to nowhere is an error and no crash.
bool copy(void* to, const void* from, size_t n) {
  iovec here{to, n}, there{const_cast<void*>(from), n};
  const ssize_t done = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
  if (done < 0 && errno != EFAULT) std::memcpy(to, from, n);  // forbidden in this container
  return done == static_cast<ssize_t>(n) || (done < 0 && errno != EFAULT);
}

int check_launch(const Function& f, const unsigned* grid, unsigned block, unsigned shared) {
  const cubin::Function& facts = *f.facts;
  const Context* const context = f.module->context;
  if (!current()) return fail(kInvalidContext, "launch without a current context");
  if (current() != context)
    return fail(kInvalidContext, text("kernel of device %d launched while device %d is current",
                                      context->device, current()->device));
  if (!f.module->alive) return fail(kInvalidHandle, "the kernel's module is unloaded");
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 ||
      grid[2] > 65535)
    return fail(kInvalidValue, text("grid (%u, %u, %u)", grid[0], grid[1], grid[2]));
  if (!block || block > 1024 || (facts.threads && static_cast<int>(block) != facts.threads))
    return fail(kInvalidValue, text("block of %u threads, compiled for %d", block, facts.threads));
  if (static_cast<int>(shared) > f.dynamic_limit)
    return fail(kInvalidValue, text("%u bytes of shared memory without opting in to more than %d",
                                    shared, f.dynamic_limit));
  if (static_cast<int>(shared) + facts.shared > shared_limit(context->arch))
    return fail(kInvalidValue, text("%u + %d bytes of shared memory, the device has %d", shared,
                                    facts.shared, shared_limit(context->arch)));
  if ((facts.registers + 7) / 8 * 8 * static_cast<int>(block) > 65536)
    return fail(kLaunchOutOfResources, text("%d registers in %u threads", facts.registers, block));
  if (facts.cluster > 1)
    return fail(kInvalidClusterSize, text("compiled for clusters of %d blocks", facts.cluster));
  return kSuccess;
}

// A launch with what its parameters point to, which is copied as the driver does it.
int make_node(Node& node, void* const* parameters) {
  if (const int status = check_launch(*node.function, node.grid, node.block, node.shared))
    return status;
  const auto& facts = *node.function->facts;
  for (size_t i = 0; i < facts.parameters.size(); ++i) {
    const cubin::Parameter& p = facts.parameters[i];
    void* source = nullptr;
    node.data.resize(std::max<size_t>(node.data.size(), p.offset + p.size));
    if (!copy(&source, &parameters[i], sizeof source) ||
        !copy(&node.data[p.offset], source, p.size))
      return fail(kInvalidValue, text("parameter %zu points to no memory", i));
  }
  return kSuccess;
}

Graph* known_graph(void* handle, bool executable) {
  for (const auto& g : graphs)
    if (g.get() == handle && g->alive && (g->made_of != nullptr) == executable) return g.get();
  return nullptr;
}

int run(const Node& node) {
  const cubin::Function& facts = *node.function->facts;
  const Module& module = *node.function->module;
  std::vector<int> offsets, sizes;
  for (const cubin::Parameter& p : facts.parameters) {
    offsets.push_back(p.offset);
    sizes.push_back(p.size);
  }
  const Launch launch{module.bytes.data(),
                      module.bytes.size(),
                      facts.name.c_str(),
                      node.data.data(),
                      offsets.data(),
                      sizes.data(),
                      static_cast<int>(sizes.size()),
                      module.context->device,
                      {node.grid[0], node.grid[1], node.grid[2]},
                      node.block,
                      node.shared};
  return execute ? execute(&launch) : kSuccess;
}

}  // namespace
