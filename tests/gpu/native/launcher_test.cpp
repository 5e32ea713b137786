// The GPU launcher without Python, for ASan and UBSan: hostile images, blocks, grids, values and
// slots against the stand-in driver. Images are in heap blocks of exactly their size, so that a
// read beyond one is found.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/graph.hpp"
#include "cuda/image.hpp"

using namespace vitkern::cuda;

namespace {

int failures = 0, checks = 0;

void expect(bool right, const std::string& what) {
  ++checks;
  if (right) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

// body() must throw an Error whose text has `part` in it.
template <class Error = std::invalid_argument>
void refuses(const std::string& part, const std::function<void()>& body) {
  std::string said = "nothing";
  try {
    body();
  } catch (const Error& error) {
    said = error.what();
  }
  expect(said.find(part) != std::string::npos, "wanted \"" + part + "\", got: " + said);
}

// ---- A cubin of one kernel, affine(*fp32 x, i32 n, fp32 f, i64 s) in blocks of 128 threads
// -------

template <class T>
void put(std::vector<char>& at, size_t offset, T value) {
  if (at.size() < offset + sizeof value) at.resize(offset + sizeof value);
  std::memcpy(&at[offset], &value, sizeof value);
}

std::vector<char> cubin() {
  constexpr size_t kNames = 64, kInfo = 128, kTables = 320;
  const char names[] = "\0.shstrtab\0.text.affine\0.nv.info.affine";
  const struct {
    uint32_t name, type;
    uint64_t offset, size;
  } sections[] = {{0, 0, 0, 0},
                  {1, 3, kNames, sizeof names},
                  {11, 1, kInfo, 0},
                  {24, 1, kInfo, 7 * 16}};  // below
  std::vector<char> image(kTables);
  std::memcpy(&image[0], "\177ELF\002\001\001\063\007", 9);  // ABI version 7: e_flags is the arch
  put<uint16_t>(image, 18, kCuda);
  put<uint64_t>(image, 40, kTables);
  put<uint32_t>(image, 48, 80);
  put<uint16_t>(image, 58, 64);
  put<uint16_t>(image, 60, 4);
  put<uint16_t>(image, 62, 1);
  std::memcpy(&image[kNames], names, sizeof names);
  const auto record = [&](size_t i, uint8_t attribute, uint32_t a, uint32_t b, uint32_t c) {
    put<uint32_t>(image, kInfo + 16 * i, 4u | attribute << 8 | 12u << 16);
    put<uint32_t>(image, kInfo + 16 * i + 4, a);
    put<uint32_t>(image, kInfo + 16 * i + 8, b);
    put<uint32_t>(image, kInfo + 16 * i + 12, c);
  };
  const uint32_t sizes[] = {8, 4, 4, 8, 8, 8}, offsets[] = {0, 8, 12, 16, 24, 32};
  for (uint32_t i = 0; i < 6; ++i) record(i, 0x17, 0, i | offsets[i] << 16, sizes[i] << 18);
  record(6, 0x10, 128, 1, 1);
  for (size_t i = 0; i < 4; ++i) {
    put<uint32_t>(image, kTables + 64 * i, sections[i].name);
    put<uint32_t>(image, kTables + 64 * i + 4, sections[i].type);
    put<uint64_t>(image, kTables + 64 * i + 24, sections[i].offset);
    put<uint64_t>(image, kTables + 64 * i + 32, sections[i].size);
    put<uint64_t>(image, kTables + 64 * i + 56, 0);
  }
  return image;
}

std::string_view view(const std::vector<char>& image) { return {image.data(), image.size()}; }

Specification affine() {
  return {"affine",
          "sm_80",
          4,
          32,
          0,
          {{"x", "*fp32", Type::pointer, true},
           {"n", "i32", Type::i32, true},
           {"f", "fp32", Type::fp32, false},
           {"s", "i64", Type::i64, false}},
          2};
}

// ---- The stand-in driver
// -------------------------------------------------------------------------

template <class Function>
Function* stand_in(const char* name) {
  static void* const library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

std::string journal() { return stand_in<const char*()>("fake_journal")(); }

size_t launched() {
  size_t count = 0;
  const std::string text = journal();
  for (size_t at = 0; (at = text.find("\nlaunch ", at)) != std::string::npos; ++at) ++count;
  return count;
}

// ---- Tests
// ---------------------------------------------------------------------------------------

void test_images() {
  const std::vector<char> whole = cubin();
  expect(image_damage(view(whole), kCuda).empty(), "the whole image is accepted");
  expect(!image_damage(view(whole), kAmdGpu).empty(), "another vendor's image is refused");
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::vector<char> part(whole.begin(), whole.begin() + static_cast<int64_t>(size));
    expect(!image_damage(view(part), kCuda).empty(), "a part of " + std::to_string(size));
  }
  // Any verdict will do: what is looked for is a read beyond the image.
  for (size_t at = 0; at < whole.size(); ++at)
    for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{0x7f}, uint64_t{0xffff},
                                 uint64_t{1} << 31, uint64_t{1} << 63, ~uint64_t{0}})
      for (const size_t bytes : {1, 2, 4, 8}) {
        std::vector<char> wrong = whole;
        std::memcpy(&wrong[at], &value, std::min(bytes, whole.size() - at));
        image_damage(view(wrong), kCuda);
        ++checks;
      }
}

void test_kernels(const std::shared_ptr<Driver>& driver) {
  const std::vector<char> image = cubin();
  const auto make = [&](const auto& change) {
    Specification s = affine();
    change(s);
    Kernel(driver, 0, view(image), s, {});
  };
  constexpr int kMost = std::numeric_limits<int>::max();
  make([](Specification&) {});
  refuses("needs a driver", [&] { Kernel(nullptr, 0, view(image), affine(), {}); });
  refuses("numbered from 0", [&] { Kernel(driver, -1, view(image), affine(), {}); });
  refuses<DriverError>("opening GPU 7", [&] { Kernel(driver, 7, view(image), affine(), {}); });
  refuses("no compiled kernel", [&] { Kernel(driver, 0, "", affine(), {}); });
  for (const int wrong : {0, -1, 33, 1 << 16, 1 << 30, kMost, -kMost - 1})
    for (int Specification::* field : {&Specification::num_warps, &Specification::warp_size})
      refuses("impossible", [&] { make([&](auto& s) { s.num_warps = 64, s.*field = wrong; }); });
  refuses("impossible", [&] { make([](auto& s) { s.num_warps = s.warp_size = 1 << 16; }); });
  refuses("binary allows 128", [&] { make([](auto& s) { s.num_warps = 8; }); });
  for (const int wrong : {-1, 1 << 20, kMost, -kMost - 1})
    refuses("of shared memory", [&] { make([&](auto& s) { s.shared = wrong; }); });
  refuses("no zero", [&] { make([](auto& s) { s.name = std::string("affine\0", 7); }); });
  refuses("no zero", [&] { make([](auto& s) { s.name.clear(); }); });
  refuses<DriverError>("no kernel", [&] { make([](auto& s) { s.name = "nonesuch"; }); });
  for (const std::string arch : {"", "sm_", "sm_90", "gfx942", "sm_99999999999999999999"})
    refuses("compiled for", [&] { make([&](auto& s) { s.arch = arch; }); });
  refuses("has more", [&] { make([](auto& s) { s.parameters.pop_back(); }); });
  refuses("has fewer", [&] { make([](auto& s) { s.parameters.resize(9, s.parameters[0]); }); });
  refuses("has fewer", [&] { make([](auto& s) { s.hidden = 3; }); });
  for (const int few : {0, 1}) refuses("has more", [&] { make([&](auto& s) { s.hidden = few; }); });
  refuses("cannot take -1", [&] { make([](auto& s) { s.hidden = -1; }); });
  refuses("room for 64", [&] { make([](auto& s) { s.hidden = kMost; }); });
  refuses("room for 64", [&] { make([](auto& s) { s.parameters.resize(63, s.parameters[0]); }); });
  refuses("bytes in its manifest",
          [&] { make([](auto& s) { s.parameters[1].type = Type::i64; }); });
  for (const std::string type : {"", "i16", "fp64", "tensordesc<fp32>"})
    refuses("no parameter type", [&] { type_named(type); });
}

void test_launches(const std::shared_ptr<Kernel>& kernel) {
  alignas(16) static float memory[4];
  const auto x = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = -kMost - 1;
  const std::vector<Value> good = {x, int64_t{16}, 0.5, int64_t{3}};
  const size_t before = launched();
  kernel->launch({1, 1, 1}, nullptr, good);
  expect(launched() == before + 1, "a right launch is started");

  const auto with = [&](size_t i, Value value) {
    std::vector<Value> values = good;
    values[i] = value;
    kernel->launch({1, 1, 1}, nullptr, values);
  };
  for (const int64_t bad : {int64_t{1}, int64_t{4095}, x + 4, int64_t{-16}, kLeast, kMost})
    refuses("parameter x", [&] { with(0, bad); });
  for (const int64_t bad : {int64_t{17}, int64_t{1} << 31, -(int64_t{1} << 31) - 16, kLeast, kMost})
    refuses("parameter n", [&] { with(1, bad); });
  for (const double bad : {1e300, -1e300, std::numeric_limits<double>::max()})
    refuses("cannot hold", [&] { with(2, bad); });
  with(2, std::numeric_limits<double>::infinity());
  with(2, std::numeric_limits<double>::quiet_NaN());
  for (const int64_t extreme : {kLeast, kMost}) with(3, extreme);
  for (const size_t i : {0, 1, 3}) refuses("must be an int", [&] { with(i, 1.0); });
  refuses("must be a float", [&] { with(2, int64_t{1}); });
  for (size_t i = 1; i < 4; ++i) refuses("cannot be slot", [&] { with(i, Slot{0, 0}); });
  refuses("outside a launch list", [&] { with(0, Slot{0, 0}); });
  for (const size_t count : {0, 3, 5, 1000})
    refuses("takes 4 values",
            [&] { kernel->launch({1, 1, 1}, nullptr, std::vector<Value>(count, int64_t{16})); });
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, int64_t{1} << 32, kLeast})
    for (size_t axis = 0; axis < 3; ++axis) {
      Grid grid{1, 1, 1};
      grid[axis] = bad;
      refuses("starts a grid", [&] { kernel->launch(grid, nullptr, good); });
    }
  refuses("starts a grid", [&] { kernel->launch({kMost, kMost, kMost}, nullptr, good); });
}

void test_launch_lists(const std::shared_ptr<Kernel>& kernel) {
  alignas(16) static float memory[8];
  const auto x = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto values = [](Slot slot) {
    return std::vector<Value>{slot, int64_t{16}, 0.5, int64_t{3}};
  };
  LaunchList list;
  refuses("not of None", [&] { list.add(nullptr, {1, 1, 1}, {}); });
  for (const Slot bad : {Slot{-1, 0}, Slot{kMost, 0}, Slot{kMaxSlots, 0}, Slot{0, -1}})
    refuses("cannot be slot", [&] { list.add(kernel, {1, 1, 1}, values(bad)); });
  expect(list.launches() == 0 && list.slots() == 0, "what was refused left nothing behind");
  list.run(nullptr, {});
  list.add(kernel, {1, 1, 1}, values({0, 0}));
  list.add(kernel, {1, 1, 1}, values({1, 16}));
  for (const std::vector<int64_t>& bad :
       {std::vector<int64_t>{}, {x}, {x, x, x}, std::vector<int64_t>(1000, x)})
    refuses("has 2 slots", [&] { list.run(nullptr, bad); });
  for (const int64_t bad : {int64_t{0}, int64_t{-16}, kMost - 15, -kMost - 1, x + 4})
    refuses("parameter x", [&] { list.run(nullptr, {x, bad}); });
  LaunchList far;
  far.add(kernel, {1, 1, 1}, values({0, kMost - 15}));
  refuses("parameter x", [&] { far.run(nullptr, {x}); });

  const size_t before = launched();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { list.run(nullptr, {x, x}); });
  for (std::thread& thread : threads) thread.join();
  expect(launched() == before + 8, "four threads start two kernels each");
  list.freeze();
  refuses("cannot be added to", [&] { list.add(kernel, {1, 1, 1}, values({0, 0})); });
}

void test_graphs(const std::shared_ptr<Kernel>& kernel) {
  alignas(16) static float memory[8];
  const auto x = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  const auto list = std::make_shared<LaunchList>();
  list->freeze();
  refuses("made of launches", [] { Graph(nullptr, {}); });
  refuses("made of launches", [&] { Graph(list, {}); });
  const auto two = std::make_shared<LaunchList>();
  for (const int64_t slot : {0, 1})
    two->add(kernel, {1, 1, 1}, {Slot{slot, 0}, int64_t{16}, 0.5, int64_t{3}});
  refuses("list that is closed", [&] { Graph(two, {x, x}); });
  two->freeze();
  for (const std::vector<int64_t>& bad : {std::vector<int64_t>{}, {x}, {x, x, x}})
    refuses("has 2 slots", [&] { Graph(two, bad); });
  Graph graph(two, {x, x});
  refuses("has 2 slots", [&] { graph.run(nullptr, {}); });
  refuses("parameter x", [&] { graph.run(nullptr, {x, x + 4}); });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { graph.run(nullptr, {x, x + 16}); });
  for (std::thread& thread : threads) thread.join();
  graph.run(nullptr, {x, x});
  expect(graph.launches() == 2, "a graph has its list's launches");
}

}  // namespace

int main() {
  test_images();
  refuses<DriverError>("cannot be loaded", [] { Driver(Api::cuda, "/no/such/library.so"); });
  refuses<DriverError>("no function hipInit", [] { Driver(Api::hip, FAKE_CUDA); });
  refuses("no GPU driver API", [] { api_named("metal"); });
  const auto driver = std::make_shared<Driver>(Api::cuda, FAKE_CUDA);
  test_kernels(driver);
  const std::vector<char> image = cubin();
  const auto kernel = std::make_shared<Kernel>(driver, 0, view(image), affine(), Skip{});
  test_launches(kernel);
  test_launch_lists(kernel);
  test_graphs(kernel);
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return failures != 0;
}
