// The Python face of the GPU launcher. Values are checked to be ints or floats here, and
// against the binary's promises in kernel.cpp; the lock of the interpreter is released for every
// call that may reach the driver.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../initialised.hpp"
#include "graph.hpp"
#include "variants.hpp"

VITKERN_INITIALISED(vitkern::cuda::Slot);
VITKERN_INITIALISED(vitkern::cuda::Graph);
VITKERN_INITIALISED(vitkern::cuda::Variants);
VITKERN_INITIALISED_SHARED(vitkern::cuda::Driver);
VITKERN_INITIALISED_SHARED(vitkern::cuda::Kernel);
VITKERN_INITIALISED_SHARED(vitkern::cuda::LaunchList);

namespace py = pybind11;

namespace vitkern::cuda {
namespace {

int64_t integer_from(py::handle object) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow != 0)
    throw py::value_error("vitkern: " + py::str(object).cast<std::string>() +
                          " does not fit in 64 bits");
  return value;
}

// No conversions: an int where a float belongs means that two arguments changed places.
Value value_from(py::handle object) {
  if (PyFloat_Check(object.ptr())) return PyFloat_AS_DOUBLE(object.ptr());
  if (PyLong_Check(object.ptr())) return integer_from(object);
  if (py::isinstance<Slot>(object)) return object.cast<Slot>();
  throw py::type_error(
      "vitkern: a kernel's values are ints (addresses too), floats and Slots, not " +
      py::str(py::type::of(object)).cast<std::string>());
}

std::vector<Value> values_from(const py::sequence& objects) {
  std::vector<Value> values;
  values.reserve(objects.size());
  // An object of its own: a sequence may make its items when it is asked for them.
  for (const py::object object : objects) values.push_back(value_from(object));
  return values;
}

Handle stream_from(uintptr_t address) { return reinterpret_cast<Handle>(address); }

std::vector<Parameter> parameters_from(
    const std::vector<std::tuple<std::string, std::string, bool>>& rows) {
  std::vector<Parameter> parameters;
  for (const auto& [name, type, divisible] : rows)
    parameters.push_back({name, type, type_named(type), divisible});
  return parameters;
}

Skip skip_from(const std::set<std::string>& names) {
  Skip skip;
  for (const std::string& name : names) {
    if (name == "arch")
      skip.arch = true;
    else if (name == "layout")
      skip.layout = true;
    else if (name == "values")
      skip.values = true;
    else if (name == "shared")
      skip.shared = true;
    else
      throw py::value_error("vitkern: no check is called '" + name + "'");
  }
  return skip;
}

}  // namespace

void bind(py::module_& m) {
  py::register_exception<DriverError>(m, "DriverError", PyExc_RuntimeError);

  m.def("runs_on", &runs_on, py::arg("binary"), py::arg("device"),
        "Whether a binary for one architecture runs on a device of another.");

  py::class_<Driver, std::shared_ptr<Driver>>(
      m, "Driver", "A GPU vendor's driver library, with the binaries loaded through it.")
      .def(py::init([](const std::string& api, const std::string& path) {
             const Api chosen = api_named(api);
             const py::gil_scoped_release unlocked;
             return std::make_shared<Driver>(chosen, path);
           }),
           py::arg("api") = "cuda", py::arg("path") = "")
      .def_property_readonly("api",
                             [](const Driver& d) { return d.api() == Api::cuda ? "cuda" : "hip"; })
      .def_property_readonly("path", &Driver::path)
      .def_property_readonly("device_count", &Driver::device_count)
      .def(
          "device",
          [](Driver& driver, int ordinal) {
            const Device& device = [&]() -> const Device& {
              const py::gil_scoped_release unlocked;
              return driver.device(ordinal);
            }();
            py::dict d;
            d["name"] = device.name;
            d["arch"] = device.arch;
            d["shared_limit"] = device.shared_limit;
            return d;
          },
          py::arg("ordinal"), "Its name, architecture and shared memory per block, as a dict.");

  py::class_<Slot>(m, "Slot",
                   "A pointer that LaunchList.run() is given: slots[index] + offset bytes.")
      .def(py::init([](int64_t index, int64_t offset) { return Slot{index, offset}; }),
           py::arg("index"), py::arg("offset") = 0);

  py::class_<Kernel, std::shared_ptr<Kernel>>(
      m, "Kernel", "One compiled kernel on one device; launch() may run in several threads.")
      .def(py::init([](std::shared_ptr<Driver> driver, int device, const py::bytes& image,
                       const std::string& name, const std::string& arch, int num_warps,
                       int warp_size, int shared,
                       const std::vector<std::tuple<std::string, std::string, bool>>& parameters,
                       int hidden, const std::set<std::string>& skip) {
             const Specification specification{
                 name, arch, num_warps, warp_size, shared, parameters_from(parameters), hidden};
             const Skip skipped = skip_from(skip);
             const std::string_view bytes = image;
             const py::gil_scoped_release unlocked;
             return std::make_shared<Kernel>(std::move(driver), device, bytes, specification,
                                             skipped);
           }),
           py::arg("driver"), py::arg("device"), py::arg("image"), py::arg("name"), py::arg("arch"),
           py::arg("num_warps"), py::arg("warp_size"), py::arg("shared"), py::arg("parameters"),
           py::arg("hidden"), py::arg("_skip") = std::set<std::string>{})
      .def(
          "launch",
          [](const Kernel& kernel, const Grid& grid, uintptr_t stream, const py::sequence& values) {
            const std::vector<Value> converted = values_from(values);
            const py::gil_scoped_release unlocked;
            kernel.launch(grid, stream_from(stream), converted);
          },
          py::arg("grid"), py::arg("stream"), py::arg("values"),
          "Start it on a stream (its handle; 0 is the default one), values in manifest order.")
      .def_property_readonly("name", [](const Kernel& k) { return k.specification().name; })
      .def_property_readonly("device", [](const Kernel& k) { return k.device().ordinal; });

  py::class_<Variants>(m, "Variants",
                       "Which binary serves a launch of one Triton kernel, by its arguments "
                       "(torch.Tensor, a letter for each parameter, the device's number or -1).")
      .def(py::init<const py::type&, std::string, int>())
      .def(
          "start",
          [](const Variants& known, const py::dict& arguments, int num_warps, int num_stages,
             const Grid& grid, uintptr_t stream) {
            return known.start(arguments, {num_warps, num_stages}, grid, stream_from(stream));
          },
          "Start a launch; False if its variant was not met before.")
      .def("add", [](Variants& known, const py::dict& arguments, int num_warps, int num_stages,
                     std::shared_ptr<Kernel> kernel) {
        known.add(arguments, {num_warps, num_stages}, std::move(kernel));
      });

  py::class_<LaunchList, std::shared_ptr<LaunchList>>(
      m, "LaunchList",
      "Launches that are checked and packed once; run() starts them all in one call.")
      .def(py::init<>())
      .def(
          "add",
          [](LaunchList& list, std::shared_ptr<Kernel> kernel, const Grid& grid,
             const py::sequence& values) {
            list.add(std::move(kernel), grid, values_from(values));
          },
          py::arg("kernel"), py::arg("grid"), py::arg("values"))
      .def(
          "run",
          [](LaunchList& list, uintptr_t stream, const std::vector<int64_t>& slots) {
            list.freeze();  // under the interpreter's lock, as add() is
            const py::gil_scoped_release unlocked;
            list.run(stream_from(stream), slots);
          },
          py::arg("stream"), py::arg("slots") = std::vector<int64_t>{})
      .def_property_readonly("launches", &LaunchList::launches)
      .def_property_readonly("slots", &LaunchList::slots);

  py::class_<Graph>(m, "Graph",
                    "A launch list as a CUDA graph; run() may be called in several threads.")
      .def(py::init([](std::shared_ptr<LaunchList> list, const std::vector<int64_t>& slots) {
             if (list) list->freeze();  // under the interpreter's lock, as add() is
             const py::gil_scoped_release unlocked;
             return std::make_unique<Graph>(std::move(list), slots);
           }),
           py::arg("launches"), py::arg("slots") = std::vector<int64_t>{})
      .def(
          "run",
          [](Graph& graph, uintptr_t stream, const std::vector<int64_t>& slots) {
            const py::gil_scoped_release unlocked;
            graph.run(stream_from(stream), slots);
          },
          py::arg("stream"), py::arg("slots") = std::vector<int64_t>{})
      .def_property_readonly("launches", &Graph::launches);
}

}  // namespace vitkern::cuda
