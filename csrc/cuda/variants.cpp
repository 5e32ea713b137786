#include "variants.hpp"

#include <cstring>
#include <limits>
#include <utility>

namespace py = pybind11;

namespace vitkern::cuda {
namespace {

// DLPack's kinds of devices.
constexpr int32_t kCpu = 1, kCuda = 2, kRocm = 10;

template <class T>
void append(std::string& key, char mark, T value) {
  char bytes[1 + sizeof value];
  bytes[0] = mark;
  std::memcpy(bytes + 1, &value, sizeof value);
  key.append(bytes, sizeof bytes);
}

bool integer(PyObject* object, int64_t& value) {
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// A constant by its value; false for what is no plain one.
bool append_constant(std::string& key, PyObject* value) {
  if (value == Py_None) {
    key += 'n';
  } else if (PyBool_Check(value)) {
    key += value == Py_True ? 'y' : 'z';
  } else if (PyLong_Check(value)) {
    int64_t number = 0;
    if (!integer(value, number)) return false;
    append(key, 'i', number);
  } else if (PyFloat_Check(value)) {
    append(key, 'f', PyFloat_AS_DOUBLE(value));
  } else if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) throw py::error_already_set();
    append(key, 's', size);
    key.append(text, static_cast<size_t>(size));
  } else if (PyTuple_Check(value)) {
    append(key, '(', PyTuple_GET_SIZE(value));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      if (!append_constant(key, PyTuple_GET_ITEM(value, i))) return false;
  } else {
    return false;
  }
  return true;
}

}  // namespace

Variants::Variants(const py::type& tensor, std::string parameters, int device)
    : tensor_(reinterpret_cast<PyTypeObject*>(tensor.ptr())),
      parameters_(std::move(parameters)),
      device_(device) {
  if (parameters_.find_first_not_of("cdp") != std::string::npos)
    throw py::value_error("vitkern: a parameter is c(onstant), d(ivisible) or p(lain)");
  if (py::hasattr(tensor, "__dlpack_c_exchange_api__")) exchange_ = exchange_of(tensor);
}

bool Variants::start(const py::dict& arguments, Settings settings, const Grid& grid,
                     Handle stream) const {
  Launch launch;
  if (!read(arguments, settings, launch)) return false;
  const auto found = kernels_.find(launch.key);
  if (found == kernels_.end()) return false;
  const std::shared_ptr<Kernel> kernel = found->second;
  const py::gil_scoped_release unlocked;
  kernel->launch(grid, stream, launch.values);
  return true;
}

void Variants::add(const py::dict& arguments, Settings settings, std::shared_ptr<Kernel> kernel) {
  if (!kernel) throw py::type_error("vitkern: a variant is served by a Kernel, not by None");
  Launch launch;
  if (!read(arguments, settings, launch)) return;
  if (launch.values.size() != kernel->specification().parameters.size())
    throw py::value_error("vitkern: kernel " + kernel->specification().name +
                          " takes other arguments than these");
  kernels_[launch.key] = std::move(kernel);
}

bool Variants::read(const py::dict& arguments, Settings settings, Launch& launch) const {
  if (PyDict_GET_SIZE(arguments.ptr()) != static_cast<Py_ssize_t>(parameters_.size())) return false;
  launch.key.reserve(256);
  launch.values.reserve(kMaxParameters);
  append(launch.key, 'w', settings);
  Py_ssize_t place = 0;
  PyObject *name, *value;
  for (const char kind : parameters_) {
    if (!PyDict_Next(arguments.ptr(), &place, &name, &value)) return false;
    // Its own while it is read: what is asked of a tensor may run Python code.
    const py::object kept = py::reinterpret_borrow<py::object>(value);
    if (kind == 'c' || value == Py_None) {
      launch.key += 'c';
      if (!append_constant(launch.key, value)) return false;
    } else if (PyTuple_Check(value)) {
      append(launch.key, '(', PyTuple_GET_SIZE(value));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
        if (!read_value(PyTuple_GET_ITEM(value, i), kind, launch)) return false;
    } else if (!read_value(value, kind, launch)) {
      return false;
    }
  }
  return true;
}

bool Variants::read_value(PyObject* value, char kind, Launch& launch) const {
  if (PyLong_Check(value)) {
    int64_t number = 0;
    if (!integer(value, number)) return false;
    const bool wide = number < std::numeric_limits<int32_t>::min() ||
                      number > std::numeric_limits<int32_t>::max();
    const bool divisible = kind == 'd' && number % kAlignment == 0;
    launch.key += wide ? (divisible ? 'L' : 'l') : (divisible ? 'I' : 'i');
    launch.values.emplace_back(number);
    return true;
  }
  if (PyFloat_Check(value)) {
    launch.key += 'f';
    launch.values.emplace_back(PyFloat_AS_DOUBLE(value));
    return true;
  }
  return PyObject_TypeCheck(value, tensor_) && read_tensor(value, kind, launch);
}

bool Variants::read_tensor(PyObject* tensor, char kind, Launch& launch) const {
  uint64_t dtype = 0;
  int64_t address = 0;
  int device = -1;
  if (exchange_) {
    DlTensor view;
    if (exchange_->view_of_python(tensor, &view) != 0) {
      PyErr_Clear();  // of a device or a dtype that DLPack does not know
      return false;
    }
    const bool on_gpu = view.device[0] == kCuda || view.device[0] == kRocm;
    if (!on_gpu && view.device[0] != kCpu) return false;
    dtype = view.dtype;
    address = reinterpret_cast<int64_t>(view.data) + static_cast<int64_t>(view.byte_offset);
    device = on_gpu ? view.device[1] : -1;
  } else {
    const py::handle object(tensor);
    if (!py::bool_(object.attr("is_cpu")) && !py::bool_(object.attr("is_cuda"))) return false;
    // torch's dtypes live as long as the interpreter, so that an address is a name.
    dtype = reinterpret_cast<uint64_t>(py::object(object.attr("dtype")).ptr());
    address = object.attr("data_ptr")().cast<int64_t>();
    device = object.attr("get_device")().cast<int>();  // -1 for the CPU
  }
  if (device != device_) return false;
  append(launch.key, kind == 'd' && address % kAlignment == 0 ? 'T' : 't', dtype);
  launch.values.emplace_back(address);
  return true;
}

}  // namespace vitkern::cuda
