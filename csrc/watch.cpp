// A forward may skip the modules of a model only while nothing about them has changed: some 3,000
// facts for ViT-B (who is whose child, hooks, classes, parameters). Each is a pointer comparison
// here. The facts come as flat tuples that their Python owner keeps, so that the garbage collector
// sees them; nothing is held between calls.
#include "watch.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "initialised.hpp"

namespace py = pybind11;

namespace vitkern {
namespace {

// Objects that are read this many steps ahead: after a forward they are not in cache, and a miss
// takes as long as ten comparisons.
constexpr Py_ssize_t kAhead = 12;

[[noreturn]] void refuse(const char* function, const char* wanted) {
  throw py::type_error(std::string("vitkern ") + function + ": expected " + wanted);
}

// The items of a flat tuple of rows of `Width` objects each.
template <Py_ssize_t Width>
struct Rows {
  explicit Rows(const py::tuple& flat, const char* wanted)
      : items(&PyTuple_GET_ITEM(flat.ptr(), 0)), count(PyTuple_GET_SIZE(flat.ptr()) / Width) {
    if (count * Width != PyTuple_GET_SIZE(flat.ptr())) refuse("unchanged", wanted);
  }
  // Row i, with the first object of a later one on its way into the cache.
  PyObject* const* operator[](Py_ssize_t i) const {
    __builtin_prefetch(items[Width * (i + kAhead < count ? i + kAhead : count - 1)]);
    return items + Width * i;
  }
  PyObject* const* items;
  Py_ssize_t count;
};

PyObject* entry_of(PyObject* dict, PyObject* key) {
  if (!PyDict_Check(dict) || !PyUnicode_Check(key)) refuse("unchanged", "a dict and a str key");
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

Py_ssize_t size_of(PyObject* dict) {
  if (!PyDict_Check(dict)) refuse("unchanged", "a dict");
  return PyDict_GET_SIZE(dict);
}

// entries: (dict, key, value, ...), dict[key] is value. absent: (dict, key, ...), no such key.
// sizes: (dict, n, ...), len(dict) == n. empty: (dict, ...). types: (object, type, ...),
// type(object) is type.
bool unchanged(const py::tuple& entries, const py::tuple& absent, const py::tuple& sizes,
               const py::tuple& empty, const py::tuple& types) {
  const Rows<3> present(entries, "entries in threes: dict, key, value");
  for (Py_ssize_t i = 0; i < present.count; ++i) {
    PyObject* const* const row = present[i];
    if (entry_of(row[0], row[1]) != row[2]) return false;
  }
  const Rows<2> missing(absent, "absent in pairs: dict, key");
  for (Py_ssize_t i = 0; i < missing.count; ++i) {
    PyObject* const* const row = missing[i];
    if (entry_of(row[0], row[1])) return false;
  }
  const Rows<2> sized(sizes, "sizes in pairs: dict, int");
  for (Py_ssize_t i = 0; i < sized.count; ++i) {
    PyObject* const* const row = sized[i];
    if (!PyLong_Check(row[1])) refuse("unchanged", "a dict and an int");
    if (size_of(row[0]) != PyLong_AsSsize_t(row[1])) return false;
  }
  const Rows<1> none(empty, "dicts");
  for (Py_ssize_t i = 0; i < none.count; ++i)
    if (size_of(none[i][0])) return false;
  const Rows<2> typed(types, "types in pairs: object, type");
  for (Py_ssize_t i = 0; i < typed.count; ++i) {
    PyObject* const* const row = typed[i];
    if (reinterpret_cast<PyObject*>(Py_TYPE(row[0])) != row[1]) return false;
  }
  return true;
}

// What a method without arguments or a property of a C type gives for an object. Called through its
// descriptor's own function pointer: half the time of a call through the interpreter.
py::object read(PyObject* descriptor, PyObject* object) {
  if (Py_TYPE(descriptor) == &PyMethodDescr_Type) {
    const auto* const method = reinterpret_cast<PyMethodDescrObject*>(descriptor);
    if (method->d_method->ml_flags == METH_NOARGS &&
        PyObject_TypeCheck(object, method->d_common.d_type))
      return py::reinterpret_steal<py::object>(method->d_method->ml_meth(object, nullptr));
  } else if (Py_TYPE(descriptor) == &PyGetSetDescr_Type) {
    const auto* const property = reinterpret_cast<PyGetSetDescrObject*>(descriptor);
    if (property->d_getset->get && PyObject_TypeCheck(object, property->d_common.d_type))
      return py::reinterpret_steal<py::object>(
          property->d_getset->get(object, property->d_getset->closure));
    refuse("reads", "an object that has the property");
  }
  return py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(descriptor, object, nullptr));
}

// Whether read(object) == expected for each of both.
bool reads(const py::object& descriptor, const py::tuple& objects, const py::tuple& expected) {
  const Py_ssize_t count = PyTuple_GET_SIZE(objects.ptr());
  if (count != PyTuple_GET_SIZE(expected.ptr())) refuse("reads", "as many values as objects");
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::object got = read(descriptor.ptr(), PyTuple_GET_ITEM(objects.ptr(), i));
    if (!got) throw py::error_already_set();
    const int same =
        PyObject_RichCompareBool(got.ptr(), PyTuple_GET_ITEM(expected.ptr(), i), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (!same) return false;
  }
  return true;
}

// ---- Where tensors are ----
// DLPack's C exchange API, version 1 (dlpack.h): the parts that are read here.

struct DlTensor {
  void* data;
  int32_t device[2];
  int32_t ndim;
  uint32_t dtype;
  int64_t *sizes, *strides;
  uint64_t byte_offset;
};

struct DlExchange {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void *allocate, *managed_from_python, *managed_to_python;
  int (*view_of_python)(void* object, DlTensor* view);  // borrows: nothing to free
  void* current_stream;
};

}  // namespace

// Addresses, sizes and strides of tensors, and whether they are still the same. One function call a
// tensor, a third of the time of its data_ptr(), numel() and stride().
class Places {
 public:
  Places(const py::type& kind, const py::tuple& tensors)
      : kind_(reinterpret_cast<PyTypeObject*>(kind.ptr())),
        exchange_(static_cast<const DlExchange*>(PyCapsule_GetPointer(
            py::object(kind.attr("__dlpack_c_exchange_api__")).ptr(), "dlpack_exchange_api"))),
        count_(PyTuple_GET_SIZE(tensors.ptr())) {
    if (!exchange_) throw py::error_already_set();
    if (exchange_->header.major != 1 || !exchange_->view_of_python)
      refuse("Places", "version 1 of DLPack's exchange API");
    for (const py::handle tensor : tensors) {
      DlTensor view;
      if (!look(tensor.ptr(), &view)) throw py::error_already_set();
      facts_.push_back(reinterpret_cast<int64_t>(view.data));
      facts_.push_back(view.ndim);
      facts_.insert(facts_.end(), view.sizes, view.sizes + view.ndim);
      facts_.insert(facts_.end(), view.strides, view.strides + view.ndim);
    }
  }

  // `tensors`: those that it was made with; not held here, so that the garbage collector sees them.
  bool match(const py::tuple& tensors) const {
    if (PyTuple_GET_SIZE(tensors.ptr()) != count_) refuse("Places", "the tensors it was made with");
    const int64_t* fact = facts_.data();
    for (Py_ssize_t i = 0; i < count_; ++i) {
      DlTensor view;
      if (!look(PyTuple_GET_ITEM(tensors.ptr(), i), &view)) {
        PyErr_Clear();  // it is now on a device, or of a dtype, that DLPack does not know
        return false;
      }
      if (*fact++ != reinterpret_cast<int64_t>(view.data) || *fact++ != view.ndim) return false;
      int64_t changes = 0;
      for (int32_t j = 0; j < view.ndim; ++j) changes |= *fact++ ^ view.sizes[j];
      for (int32_t j = 0; j < view.ndim; ++j) changes |= *fact++ ^ view.strides[j];
      if (changes) return false;
    }
    return true;
  }

 private:
  bool look(PyObject* tensor, DlTensor* view) const {
    if (!PyObject_TypeCheck(tensor, kind_)) refuse("Places", "tensors of the given class");
    return exchange_->view_of_python(tensor, view) == 0;
  }

  PyTypeObject* kind_;  // torch.Tensor: the interpreter keeps it
  const DlExchange* exchange_;
  Py_ssize_t count_;
  std::vector<int64_t> facts_;
};

}  // namespace vitkern

VITKERN_INITIALISED(vitkern::Places);

namespace vitkern {

void bind_watch(py::module_& m) {
  m.def("unchanged", &unchanged, py::arg("entries"), py::arg("absent"), py::arg("sizes"),
        py::arg("empty"), py::arg("types"),
        "Whether dicts still have these entries (dict, key, value, ...), lack these (dict, key, "
        "...), have these sizes (dict, n, ...), are empty (dict, ...) and objects have these types "
        "(object, type, ...).");
  m.def("reads", &reads, py::arg("descriptor"), py::arg("objects"), py::arg("expected"),
        "Whether a C type's method or property gives the expected value for every object.");
  py::class_<Places>(
      m, "Places", "Addresses, sizes and strides of tensors of a class with DLPack's exchange API.")
      .def(py::init<const py::type&, const py::tuple&>())
      .def("match", &Places::match, "Whether these tensors, the same objects, are still there.");
}

}  // namespace vitkern
