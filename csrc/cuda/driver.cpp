#include "driver.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstring>
#include <vector>
#if defined(__linux__)
#include <link.h>
#endif

namespace vitkern::cuda {
namespace {

// CUdevice_attribute
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76, kSharedPerBlockOptin = 97;

// The start of hipDeviceProp_tR0600; the suffix in hipGetDevicePropertiesR0600 freezes the layout.
struct HipProperties {
  char name[256];
  char skipped[40];
  size_t shared_per_block;
  char skipped_too[856];
  char arch[256];  // "gfx942:sramecc+:xnack-"
  char rest[2048];
};
static_assert(offsetof(HipProperties, shared_per_block) == 296);
static_assert(offsetof(HipProperties, arch) == 1160);

struct Advice {
  int status;
  const char* text;
};

// By the numbers of CUresult; those of hipError_t are the same where both have the error.
constexpr Advice kAdvice[] = {
    {2, "Free GPU memory, or use a smaller batch."},
    {3, "A forked process cannot use its parent's GPU: start workers with the method 'spawn'."},
    {34, "A stub library was loaded in place of the driver: take it off LD_LIBRARY_PATH."},
    {100,
     "No GPU is visible: look at nvidia-smi (rocm-smi) and CUDA_VISIBLE_DEVICES; containers must "
     "be "
     "started with access to the GPU."},
    {101, "There is no GPU of this number: look at CUDA_VISIBLE_DEVICES."},
    {200,
     "The binary is damaged or made by a compiler newer than this driver: build it again, or "
     "update the driver (binaries for sm_100 and above need one for CUDA 13)."},
    {201, "The device's context is gone: was the device reset?"},
    {209,
     "The binary is for another GPU: build it for this one, or leave the folder of binaries "
     "out, so that Triton compiles here."},
    {400, "Is the stream of another device, or destroyed?"},
    {500, "The binary has no kernel of this name: build it and its manifest again, together."},
    {700,
     "The GPU's state is lost: restart the process, with CUDA_LAUNCH_BLOCKING=1 to see which "
     "kernel failed."},
    {701,
     "The block needs more registers or shared memory than the GPU has: build with fewer "
     "warps or stages."},
    {716,
     "The GPU's state is lost: restart the process, with CUDA_LAUNCH_BLOCKING=1 to see which "
     "kernel failed."},
    {719,
     "The GPU's state is lost: restart the process, with CUDA_LAUNCH_BLOCKING=1 to see which "
     "kernel failed."},
    {803,
     "The driver and the system's GPU libraries are of different versions: reboot after an "
     "update."},
    {900, "Not allowed while a graph is captured: run once before capturing."},
    {906, "Capture on a stream of its own: the default stream waits for all others."},
};

std::string advice(int status) {
  for (const Advice& a : kAdvice)
    if (a.status == status) return std::string(" ") + a.text;
  return "";
}

#if defined(__linux__)
// A library of this name under any folder and version that the process has already: PyTorch brings
// its own libamdhip64, and a second one would know nothing of the first one's streams.
std::string already_loaded(const std::string& name) {
  struct Search {
    const std::string& name;
    std::string found;
  } search{name, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search& s = *static_cast<Search*>(data);
        const std::string path = info->dlpi_name ? info->dlpi_name : "";
        if (path.compare(path.rfind('/') + 1, s.name.size(), s.name) != 0) return 0;
        s.found = path;
        return 1;
      },
      &search);
  return search.found;
}
#else
std::string already_loaded(const std::string&) { return ""; }
#endif

void* open(Api api, std::string& path) {
  std::vector<std::string> names = {path};
  if (path.empty() && api == Api::cuda) names = {"libcuda.so.1"};
  if (path.empty() && api == Api::hip)
    names = {already_loaded("libamdhip64.so"), "libamdhip64.so", "libamdhip64.so.7",
             "libamdhip64.so.6"};
  std::string reasons;
  for (const std::string& name : names) {
    if (name.empty()) continue;
    if (void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      path = name;
      return library;
    }
    const char* const reason = dlerror();
    reasons += std::string("\n  ") + (reason ? reason : name.c_str());
  }
  throw DriverError(api == Api::cuda
                        ? "vitkern: the CUDA driver library cannot be loaded. It comes with "
                          "NVIDIA's GPU driver (not with the CUDA toolkit or PyTorch): install "
                          "that, or keep the tensors on the CPU." +
                              reasons
                        : "vitkern: AMD's HIP runtime cannot be loaded. It comes with ROCm and "
                          "with PyTorch for ROCm (import torch first)." +
                              reasons);
}

}  // namespace

Api api_named(const std::string& name) {
  if (name == "cuda") return Api::cuda;
  if (name == "hip") return Api::hip;
  throw std::invalid_argument("vitkern: no GPU driver API '" + name + "', only 'cuda' and 'hip'");
}

Driver::Driver(Api api, const std::string& path) : api_(api), path_(path) {
  resolve(open(api, path_));
  must("starting the driver", table_.init, 0u);
}

void Driver::resolve(void* library) {
  // A name that an API lacks is null; `required` is false for what only newer drivers have.
  const auto find = [&](auto& call, const char* cuda, const char* hip, bool required = true) {
    call.name = api_ == Api::cuda ? cuda : hip;
    if (!call.name) return;
    call.function = reinterpret_cast<decltype(call.function)>(dlsym(library, call.name));
    if (required && !call.function)
      throw DriverError("vitkern: " + path_ + " has no function " + call.name +
                        ": the GPU driver is too old (CUDA >= 12 or ROCm >= 6 is needed)");
  };
  Table& t = table_;
  // The suffix is the ABI's version: cuda.h renames these calls in the same way.
  find(t.init, "cuInit", "hipInit");
  find(t.device_count, "cuDeviceGetCount", "hipGetDeviceCount");
  find(t.error_string, "cuGetErrorString", "hipDrvGetErrorString");
  find(t.module_load, "cuModuleLoadData", "hipModuleLoadData");
  find(t.module_function, "cuModuleGetFunction", "hipModuleGetFunction");
  find(t.function_attribute, "cuFuncGetAttribute", "hipFuncGetAttribute");
  find(t.launch, "cuLaunchKernel", "hipModuleLaunchKernel");
  find(t.device_get, "cuDeviceGet", nullptr);
  find(t.device_name, "cuDeviceGetName", nullptr);
  find(t.device_attribute, "cuDeviceGetAttribute", nullptr);
  find(t.primary_context, "cuDevicePrimaryCtxRetain", nullptr);
  find(t.context_current, "cuCtxGetCurrent", nullptr);
  find(t.context_push, "cuCtxPushCurrent_v2", nullptr);
  find(t.context_pop, "cuCtxPopCurrent_v2", nullptr);
  find(t.function_set, "cuFuncSetAttribute", nullptr);
  find(t.parameter, "cuFuncGetParamInfo", nullptr, false);
  find(t.graph_create, "cuGraphCreate", nullptr);
  find(t.graph_add, "cuGraphAddKernelNode_v2", nullptr);
  find(t.graph_instantiate, "cuGraphInstantiateWithFlags", nullptr);
  find(t.graph_set, "cuGraphExecKernelNodeSetParams_v2", nullptr);
  find(t.graph_launch, "cuGraphLaunch", nullptr);
  find(t.graph_free_executable, "cuGraphExecDestroy", nullptr);
  find(t.graph_free, "cuGraphDestroy", nullptr);
  find(t.capture_mode, "cuThreadExchangeStreamCaptureMode", nullptr);
  find(t.is_capturing, "cuStreamIsCapturing", nullptr);
  find(t.current_device, nullptr, "hipGetDevice");
  find(t.set_device, nullptr, "hipSetDevice");
  find(t.properties, nullptr, "hipGetDevicePropertiesR0600");
}

void Driver::fail(std::string_view doing, const char* call, int status) const {
  const char* text = nullptr;
  if (table_.error_string.function(status, &text) != 0 || !text) text = "unknown error";
  throw DriverError("vitkern: " + std::string(doing) + ": " + call + " failed with error " +
                    std::to_string(status) + ": " + text + "." + advice(status));
}

int Driver::device_count() const {
  int count = 0;
  must("counting GPUs", table_.device_count, &count);
  return count;
}

Device Driver::describe(int ordinal) const {
  const std::string doing = "opening GPU " + std::to_string(ordinal);
  Device d;
  d.ordinal = ordinal;
  if (api_ == Api::hip) {
    HipProperties p{};
    must(doing, table_.properties, static_cast<void*>(&p), ordinal);
    p.name[sizeof p.name - 1] = p.arch[sizeof p.arch - 1] = 0;
    d.name = p.name;
    d.arch = std::string(p.arch, std::strcspn(p.arch, ":"));
    d.shared_limit = static_cast<int>(std::min<size_t>(p.shared_per_block, INT_MAX));
    return d;
  }
  int handle = 0, major = 0, minor = 0;
  std::array<char, 256> name{};
  must(doing, table_.device_get, &handle, ordinal);
  must(doing, table_.device_name, name.data(), static_cast<int>(name.size()) - 1, handle);
  must(doing, table_.device_attribute, &major, kCapabilityMajor, handle);
  must(doing, table_.device_attribute, &minor, kCapabilityMinor, handle);
  must(doing, table_.device_attribute, &d.shared_limit, kSharedPerBlockOptin, handle);
  must(doing, table_.primary_context, &d.context, handle);
  d.name = name.data();
  d.arch = "sm_" + std::to_string(10 * major + minor);
  return d;
}

const Device& Driver::device(int ordinal) {
  if (ordinal < 0)
    throw std::invalid_argument("vitkern: GPUs are numbered from 0, not " +
                                std::to_string(ordinal));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = devices_.find(ordinal);
  if (known != devices_.end()) return known->second;
  return devices_.emplace(ordinal, describe(ordinal)).first->second;
}

Handle Driver::module(const Device& device, std::string_view image) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& modules = modules_[device.ordinal];
  const auto [found, is_new] = modules.try_emplace(std::string(image), nullptr);
  if (!is_new) return found->second;
  // The key is the copy that the driver reads: a std::string ends with the zero that text needs.
  const int status = table_.module_load.function(&found->second, found->first.data());
  if (status != 0) {
    modules.erase(found);
    fail("loading a binary on GPU " + std::to_string(device.ordinal) + " (" + device.name + ", " +
             device.arch + ")",
         table_.module_load.name, status);
  }
  return found->second;
}

Current::Current(const Driver& driver, const Device& device) : driver_(driver) {
  const Table& t = driver.table();
  constexpr std::string_view doing = "switching to the GPU";
  if (driver.api() == Api::hip) {
    driver.must(doing, t.current_device, &previous_);
    if (previous_ == device.ordinal) return;
    driver.must(doing, t.set_device, device.ordinal);
  } else {
    Handle now = nullptr;
    driver.must(doing, t.context_current, &now);
    if (now == device.context) return;
    driver.must(doing, t.context_push, device.context);
  }
  changed_ = true;
}

Current::~Current() {
  if (!changed_) return;
  const Table& t = driver_.table();
  if (driver_.api() == Api::hip) {
    t.set_device.function(previous_);
  } else {
    Handle ours = nullptr;
    t.context_pop.function(&ours);
  }
}

}  // namespace vitkern::cuda
