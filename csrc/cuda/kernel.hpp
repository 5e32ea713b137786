// One compiled kernel on one device, and a call that starts it after checking everything that the
// binary was promised.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "driver.hpp"

namespace vitkern::cuda {

enum class Type { pointer, i32, i64, fp32 };
Type type_named(const std::string& name);  // "*bf16", "i32", ...; throws std::invalid_argument

// Whether a binary for one architecture runs on a device of another ("sm_80", "sm_86").
bool runs_on(const std::string& binary, const std::string& device);

struct Parameter {
  std::string name, type_name;
  Type type;
  bool divisible;  // the binary relies on a multiple of kAlignment
};

constexpr int64_t kAlignment = 16;     // bytes of a pointer, units of an integer
constexpr size_t kMaxParameters = 64;  // with the hidden ones
constexpr int kMaxThreads = 1024;      // of a block, on every GPU
constexpr int64_t kMaxSlots = 1024;    // of a launch list; a forward has an input and a result

// A pointer that is known when a launch list runs: the slot's, plus an offset in bytes.
struct Slot {
  int64_t index, offset;
};
using Value = std::variant<int64_t, double, Slot>;  // pointers are integers
using Grid = std::array<int64_t, 3>;

// What the manifest says of a binary.
struct Specification {
  std::string name, arch;  // the kernel's symbol; "sm_80"
  int num_warps, warp_size, shared;
  std::vector<Parameter> parameters;
  // Triton's kernels take some pointers more than their source says, such as memory for all blocks
  // together or for its profiler. Binaries that need any are refused, so all are null.
  int hidden;
};

// Checks left out, so that tests can show that the driver behind them objects too.
struct Skip {
  bool arch = false, layout = false, values = false, shared = false;
};

// One parameter in each 8 bytes, hidden ones last: what kernelParams' pointers point to.
using Cells = std::array<uint64_t, kMaxParameters>;
using Pointers = std::array<void*, kMaxParameters>;
struct Packed {
  Cells cells{};
  std::vector<std::pair<size_t, Slot>> slots;  // parameter, its slot
};

class Kernel {
 public:
  // Throws std::invalid_argument for what no build writes or this device cannot run.
  Kernel(std::shared_ptr<Driver> driver, int device, std::string_view image,
         const Specification& specification, Skip skip);

  // Throws std::invalid_argument for a grid or a value that the binary was not compiled for, before
  // anything is started. Callable from several threads at once.
  void launch(const Grid& grid, Handle stream, const std::vector<Value>& values) const;

  // The halves of launch, for LaunchList: `start` wants the device current and checks nothing.
  Packed pack(const Grid& grid, const std::vector<Value>& values) const;
  void start(const Grid& grid, Handle stream, Cells& cells) const;
  // The launch as a graph has it; what it points to is `cells` and `pointers`.
  KernelNode node(const Grid& grid, Cells& cells, Pointers& pointers) const;
  void check_slot(size_t parameter, int64_t address, int64_t offset) const;

  const std::shared_ptr<Driver>& driver() const { return driver_; }
  const Device& device() const { return device_; }
  const Specification& specification() const { return spec_; }
  size_t parameters() const { return spec_.parameters.size() + spec_.hidden; }

 private:
  void check_arch() const;
  void check_layout() const;
  void check_grid(const Grid& grid) const;
  void check_pointer(size_t parameter, int64_t address) const;  // null is an empty tensor's
  uint64_t cell(size_t parameter, const Value& value) const;
  int threads() const { return spec_.num_warps * spec_.warp_size; }  // of a block
  [[noreturn]] void refuse(const std::string& what) const;
  std::string where() const;

  std::shared_ptr<Driver> driver_;
  const Device& device_;
  Specification spec_;
  Skip skip_;
  Handle function_ = nullptr;
};

}  // namespace vitkern::cuda
