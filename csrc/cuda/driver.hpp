// The GPU's driver library, loaded when the first kernel is: CUDA's or, by the same table of calls,
// AMD's HIP. Building or importing this needs nothing of either vendor: the few types are opaque
// pointers and ints.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

namespace vitkern::cuda {

using Handle = void*;  // of a context, a module, a function or a stream

// A call that the driver refused: which, why in the driver's words, and what to do.
class DriverError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Api { cuda, hip };
Api api_named(const std::string& name);  // "cuda", "hip"; throws std::invalid_argument

// One function of the driver under the name that its API gives it.
template <class... Arguments>
struct Call {
  const char* name = nullptr;
  int (*function)(Arguments...) = nullptr;  // returns 0 or the error's number
};

// A launch in a graph: cuda.h's CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNode {
  Handle function;
  unsigned grid[3], block[3], shared;
  void** parameters;
  void** extra;
  Handle kernel, context;  // for what has no function: null
};

// What the launcher calls. HIP's functions take their arguments in CUDA's order.
struct Table {
  Call<unsigned> init;
  Call<int*> device_count;
  Call<int, const char**> error_string;
  Call<Handle*, const void*> module_load;
  Call<Handle*, Handle, const char*> module_function;
  Call<int*, int, Handle> function_attribute;
  Call<Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
       void**>
      launch;  // function, grid x y z, block x y z, shared bytes, stream, parameters, nothing

  // CUDA only: contexts are the caller's, so ours is put on top for as long as it is needed.
  Call<int*, int> device_get;
  Call<char*, int, int> device_name;
  Call<int*, int, int> device_attribute;
  Call<Handle*, int> primary_context;
  Call<Handle*> context_current;
  Call<Handle> context_push;
  Call<Handle*> context_pop;
  Call<Handle, int, int> function_set;
  Call<Handle, size_t, size_t*, size_t*> parameter;  // null before CUDA 12.4

  // CUDA only: graphs.
  Call<Handle*, unsigned> graph_create;
  Call<Handle*, Handle, const Handle*, size_t, const KernelNode*> graph_add;
  Call<Handle*, Handle, unsigned long long> graph_instantiate;
  Call<Handle, Handle, const KernelNode*> graph_set;
  Call<Handle, Handle> graph_launch;
  Call<Handle> graph_free_executable, graph_free;
  Call<int*> capture_mode;  // exchanges this thread's
  Call<Handle, int*> is_capturing;

  // HIP only: a device's context is the device, and popping one does not restore what was before.
  Call<int*> current_device;
  Call<int> set_device;
  Call<void*, int> properties;
};

struct Device {
  int ordinal = 0;
  std::string name, arch;  // "NVIDIA A100-SXM4-80GB", "sm_80" or "gfx942"
  int shared_limit = 0;    // bytes of shared memory that one block may ask for
  Handle context = nullptr;
};

// Thread-safe. Libraries, contexts and modules stay loaded until the process ends: giving them back
// would wait for the GPU, and is forbidden while a graph is captured.
class Driver {
 public:
  // An empty path is the system's library, or the one that this process has loaded already.
  Driver(Api api, const std::string& path);

  Api api() const { return api_; }
  const std::string& path() const { return path_; }
  const Table& table() const { return table_; }
  bool has_graphs() const { return api_ == Api::cuda; }
  int device_count() const;
  const Device& device(int ordinal);

  // The binary on this device, loaded once however often it is asked for; the device is current.
  Handle module(const Device& device, std::string_view image);

  // Throws DriverError unless the call succeeds; `doing` says in the error what was being done.
  template <class... Parameters, class... Arguments>
  void must(std::string_view doing, const Call<Parameters...>& call, Arguments... arguments) const {
    const int status = call.function(arguments...);
    if (status != 0) fail(doing, call.name, status);
  }
  [[noreturn]] void fail(std::string_view doing, const char* call, int status) const;

 private:
  void resolve(void* library);
  Device describe(int ordinal) const;

  Api api_;
  std::string path_;
  Table table_;
  std::mutex mutex_;
  std::map<int, Device> devices_;                                   // references stay valid
  std::map<int, std::unordered_map<std::string, Handle>> modules_;  // device -> image -> module
};

// Makes a device current in this thread, and the caller's current one again when it dies. No call
// in here is illegal during stream capture.
class Current {
 public:
  Current(const Driver& driver, const Device& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  bool changed_ = false;
  int previous_ = 0;  // HIP's
};

}  // namespace vitkern::cuda
