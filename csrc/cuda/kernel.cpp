#include "kernel.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "image.hpp"

namespace vitkern::cuda {
namespace {

// CUfunction_attribute, hipFunction_attribute
constexpr int kMaxThreadsPerBlock = 0, kMaxDynamicShared = 8;
constexpr int kSharedWithoutAsking = 48 * 1024;  // what every CUDA GPU gives a block unasked
constexpr int64_t kMaxGridX = std::numeric_limits<int32_t>::max(), kMaxGridYZ = 65535;
constexpr int64_t kFirstAddress = 4096;  // below is no memory: a size in a pointer's place

size_t size_of(Type type) { return type == Type::i32 || type == Type::fp32 ? 4 : 8; }

std::string text(const Grid& g) {
  return "(" + std::to_string(g[0]) + ", " + std::to_string(g[1]) + ", " + std::to_string(g[2]) +
         ")";
}

std::shared_ptr<Driver> given(std::shared_ptr<Driver> driver) {
  if (!driver) throw std::invalid_argument("vitkern: a kernel needs a driver, not None");
  return driver;
}

// 80 for "sm_80" and "sm_80a", 0 for what is no CUDA architecture.
int capability(const std::string& arch) {
  if (arch.rfind("sm_", 0) != 0) return 0;
  int number = 0;
  for (size_t i = 3; i < arch.size() && arch[i] >= '0' && arch[i] <= '9' && number < 1000; ++i)
    number = 10 * number + (arch[i] - '0');
  return number;
}

}  // namespace

// Triton compiles sm_90 and above with instructions of exactly that chip (the "a" targets); older
// binaries also run on later chips of the same generation.
bool runs_on(const std::string& binary, const std::string& device) {
  const int b = capability(binary), d = capability(device);
  if (b == 0 || d == 0) return binary == device;
  return b >= 90 ? b == d : b / 10 == d / 10 && b <= d;
}

Type type_named(const std::string& name) {
  if (!name.empty() && name[0] == '*') return Type::pointer;
  if (name == "i32") return Type::i32;
  if (name == "i64") return Type::i64;
  if (name == "fp32") return Type::fp32;
  throw std::invalid_argument("vitkern: the launcher has no parameter type '" + name +
                              "', only pointers, i32, i64 and fp32");
}

Kernel::Kernel(std::shared_ptr<Driver> driver, int device, std::string_view image,
               const Specification& specification, Skip skip)
    : driver_(given(std::move(driver))),
      device_(driver_->device(device)),
      spec_(specification),
      skip_(skip) {
  if (spec_.name.empty() || spec_.name.find('\0') != std::string::npos)
    throw std::invalid_argument(
        "vitkern: a kernel's name has at least one character, and no zero (where it would end)");
  if (spec_.num_warps < 1 || spec_.warp_size < 1 ||
      int64_t{spec_.num_warps} * spec_.warp_size > kMaxThreads)
    refuse("a block of " + std::to_string(spec_.num_warps) + " warps of " +
           std::to_string(spec_.warp_size) + " threads is impossible");
  if (spec_.hidden < 0)
    refuse("it cannot take " + std::to_string(spec_.hidden) + " hidden parameters");
  if (parameters() > kMaxParameters)
    refuse("it takes " + std::to_string(parameters()) + " parameters, the launcher has room for " +
           std::to_string(kMaxParameters));
  if (!skip_.arch) check_arch();
  if (spec_.shared < 0 || (!skip_.shared && spec_.shared > device_.shared_limit))
    refuse("it needs " + std::to_string(spec_.shared) + " bytes of shared memory for a block; " +
           where() + " has " + std::to_string(device_.shared_limit) +
           ". Build it with smaller blocks or fewer stages");
  const std::string damage = image_damage(image, driver_->api() == Api::cuda ? kCuda : kAmdGpu);
  if (!damage.empty()) refuse("its binary " + damage + ": build it again");

  const Table& t = driver_->table();
  const Current current(*driver_, device_);
  const Handle module = driver_->module(device_, image);
  const std::string doing = "loading kernel " + spec_.name;
  driver_->must(doing, t.module_function, &function_, module, spec_.name.c_str());
  // Asking for any attribute also makes a driver that loads lazily load now, and not in a capture.
  int allowed = 0;
  driver_->must(doing, t.function_attribute, &allowed, kMaxThreadsPerBlock, function_);
  if (!skip_.layout && threads() > allowed)
    refuse("its manifest asks for blocks of " + std::to_string(threads()) +
           " threads, its binary allows " + std::to_string(allowed) +
           ": build both again, together");
  if (!skip_.layout) check_layout();
  if (driver_->api() == Api::cuda && spec_.shared > kSharedWithoutAsking && !skip_.shared)
    driver_->must(doing, t.function_set, function_, kMaxDynamicShared, spec_.shared);
}

void Kernel::launch(const Grid& grid, Handle stream, const std::vector<Value>& values) const {
  Packed packed = pack(grid, values);
  if (!packed.slots.empty()) refuse("a slot has no address outside a launch list");
  const Current current(*driver_, device_);
  start(grid, stream, packed.cells);
}

Packed Kernel::pack(const Grid& grid, const std::vector<Value>& values) const {
  check_grid(grid);
  if (values.size() != spec_.parameters.size())
    refuse("it takes " + std::to_string(spec_.parameters.size()) + " values, not " +
           std::to_string(values.size()));
  Packed packed;
  for (size_t i = 0; i < values.size(); ++i) {
    const Slot* const slot = std::get_if<Slot>(&values[i]);
    if (!slot) {
      packed.cells[i] = cell(i, values[i]);
      continue;
    }
    const Parameter& p = spec_.parameters[i];
    if (p.type != Type::pointer || slot->index < 0 || slot->index >= kMaxSlots || slot->offset < 0)
      refuse("parameter " + p.name + " (" + p.type_name + ") cannot be slot " +
             std::to_string(slot->index) + " + " + std::to_string(slot->offset));
    packed.slots.emplace_back(i, *slot);
  }
  return packed;
}

void Kernel::start(const Grid& grid, Handle stream, Cells& cells) const {
  Pointers pointers;
  const KernelNode n = node(grid, cells, pointers);
  const auto& launch = driver_->table().launch;
  const int status = launch.function(n.function, n.grid[0], n.grid[1], n.grid[2], n.block[0],
                                     n.block[1], n.block[2], n.shared, stream, n.parameters,
                                     nullptr);  // which copies the parameters before it returns
  if (status != 0)
    driver_->fail("starting kernel " + spec_.name + " with grid " + text(grid) + " on " + where(),
                  launch.name, status);
}

KernelNode Kernel::node(const Grid& grid, Cells& cells, Pointers& pointers) const {
  for (size_t i = 0; i < parameters(); ++i) pointers[i] = &cells[i];
  const auto n = [](int64_t x) { return static_cast<unsigned>(x); };
  return {function_,
          {n(grid[0]), n(grid[1]), n(grid[2])},
          {n(threads()), 1, 1},
          n(spec_.shared),
          pointers.data(),
          nullptr,
          nullptr,
          nullptr};
}

uint64_t Kernel::cell(size_t parameter, const Value& value) const {
  const Parameter& p = spec_.parameters[parameter];
  uint64_t bits = 0;
  if (p.type == Type::fp32) {
    const double* const wide = std::get_if<double>(&value);
    if (!wide) refuse("parameter " + p.name + " (fp32) must be a float");
    const float number = static_cast<float>(*wide);
    if (!skip_.values && std::isfinite(*wide) && !std::isfinite(number))
      refuse("parameter " + p.name + " (fp32) cannot hold " + std::to_string(*wide));
    std::memcpy(&bits, &number, sizeof number);
    return bits;
  }
  const int64_t* const integer = std::get_if<int64_t>(&value);
  if (!integer) refuse("parameter " + p.name + " (" + p.type_name + ") must be an int");
  if (p.type == Type::pointer)
    check_pointer(parameter, *integer);
  else if (!skip_.values && p.divisible && *integer % kAlignment != 0)
    refuse("parameter " + p.name + " = " + std::to_string(*integer) +
           " is no multiple of 16, as this binary was promised");
  if (p.type == Type::i32 && !skip_.values &&
      (*integer < std::numeric_limits<int32_t>::min() ||
       *integer > std::numeric_limits<int32_t>::max()))
    refuse("parameter " + p.name + " (i32) cannot hold " + std::to_string(*integer));
  std::memcpy(&bits, integer, size_of(p.type));  // little-endian: the low half of an i32
  return bits;
}

void Kernel::check_pointer(size_t parameter, int64_t address) const {
  const Parameter& p = spec_.parameters[parameter];
  if (skip_.values) return;
  if (address < 0 || (address > 0 && address < kFirstAddress))
    refuse("parameter " + p.name + " (" + p.type_name + ") cannot be at address " +
           std::to_string(address));
  if (p.divisible && address % kAlignment != 0)
    refuse("parameter " + p.name + " (" + p.type_name + ") starts " +
           std::to_string(address % kAlignment) +
           " bytes after a multiple of 16, where this binary was promised none: pass a copy of the "
           "tensor (x.clone())");
}

void Kernel::check_slot(size_t parameter, int64_t address, int64_t offset) const {
  if (address <= 0 || offset > std::numeric_limits<int64_t>::max() - address)
    refuse("parameter " + spec_.parameters[parameter].name + " cannot be " +
           std::to_string(offset) + " bytes after address " + std::to_string(address));
  check_pointer(parameter, address + offset);
}

void Kernel::check_grid(const Grid& grid) const {
  const bool fits = grid[0] >= 1 && grid[0] <= kMaxGridX && grid[1] >= 1 && grid[1] <= kMaxGridYZ &&
                    grid[2] >= 1 && grid[2] <= kMaxGridYZ;
  // HIP counts threads, not blocks, in 32 bits.
  const bool counts =
      driver_->api() == Api::cuda || !fits || grid[0] * threads() < (int64_t{1} << 32);
  if (!skip_.values && !(fits && counts))
    refuse("no GPU starts a grid of " + text(grid) +
           " blocks (1 to 2147483647 by 1 to 65535 by 1 to 65535)");
}

void Kernel::check_arch() const {
  if (runs_on(spec_.arch, device_.arch)) return;
  refuse("it is compiled for " + spec_.arch + ", but " + where() + " is " + device_.arch +
         (capability(spec_.arch) >= 90 ? " (binaries from sm_90 on run on no other architecture)"
                                       : "") +
         ". Build the kernels for " + device_.arch +
         ", or leave the folder of binaries out, so that Triton compiles them here");
}

// The manifest's parameters against the binary's own list, where the driver can read it.
void Kernel::check_layout() const {
  const auto& query = driver_->table().parameter;
  if (!query.function) return;
  size_t offset = 0, size = 0;
  for (size_t i = 0; i < parameters(); ++i) {
    const bool hidden = i >= spec_.parameters.size();
    const size_t wanted = hidden ? 8 : size_of(spec_.parameters[i].type);
    if (query.function(function_, i, &offset, &size) != 0)
      refuse("its manifest lists " + std::to_string(spec_.parameters.size()) + " parameters and " +
             std::to_string(spec_.hidden) +
             " hidden ones, its binary has fewer: build both again, together");
    if (size != wanted)
      refuse("parameter " + (hidden ? std::string("hidden") : spec_.parameters[i].name) + " has " +
             std::to_string(wanted) + " bytes in its manifest and " + std::to_string(size) +
             " in its binary: build both again, together");
  }
  if (query.function(function_, parameters(), &offset, &size) == 0)
    refuse("its manifest lists " + std::to_string(spec_.parameters.size()) + " parameters and " +
           std::to_string(spec_.hidden) +
           " hidden ones, its binary has more: build both again, together");
}

std::string Kernel::where() const {
  return "GPU " + std::to_string(device_.ordinal) + " (" + device_.name + ")";
}

void Kernel::refuse(const std::string& what) const {
  throw std::invalid_argument("vitkern: kernel " + spec_.name + ": " + what);
}

}  // namespace vitkern::cuda
