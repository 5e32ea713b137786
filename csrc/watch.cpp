// A forward may skip the modules of a model only while nothing about them has changed: some 2,000
// facts for ViT-B (who is whose child, hooks, classes, parameters). Each is a pointer comparison
// here. The facts come as flat tuples that their Python owner keeps, so that the garbage collector
// sees them; no object is held between calls.
#include "watch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dlpack.hpp"
#include "initialised.hpp"

namespace py = pybind11;

namespace vitkern {
namespace {

// Objects that are read this many steps ahead: after a forward they are not in cache, and a miss
// takes as long as ten comparisons.
constexpr Py_ssize_t kAhead = 12;
constexpr Py_ssize_t kHeaderWords = sizeof(PyObject) / sizeof(char*);

// Brings into the cache what an object points to. Its layout is not known here: any of its first
// words may be an address, and a prefetch of one that is not does nothing.
void fetch_inside(PyObject* object, Py_ssize_t words, int lines) {
  const char* const* const word = reinterpret_cast<const char* const*>(object);
  const Py_ssize_t size = Py_TYPE(object)->tp_basicsize / Py_ssize_t(sizeof *word);
  for (Py_ssize_t i = kHeaderWords; i < size && i < kHeaderWords + words; ++i)
    for (int line = 0; line < lines; ++line) __builtin_prefetch(word[i] + 64 * line);
}
void fetch_table(PyObject* dict) { fetch_inside(dict, 4, 1); }
void fetch_record(PyObject* tensor) { fetch_inside(tensor, 1, 4); }

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
    __builtin_prefetch(first(i + kAhead));
    return items + Width * i;
  }
  // The same where that object is a dict, whose table is looked at.
  PyObject* const* with_table(Py_ssize_t i) const {
    fetch_table(first(i + kAhead / 2));
    return (*this)[i];
  }
  PyObject* first(Py_ssize_t i) const { return items[Width * (i < count ? i : count - 1)]; }
  PyObject* const* items;
  Py_ssize_t count;
};

Py_ssize_t size_of(PyObject* dict) {
  if (!PyDict_Check(dict)) refuse("unchanged", "a dict");
  return PyDict_GET_SIZE(dict);
}

PyObject* entry_of(PyObject* dict, PyObject* key) {
  if (!PyDict_Check(dict) || !PyUnicode_Check(key)) refuse("unchanged", "a dict and a str key");
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// Whether dicts have exactly these entries in this order; the rows of a dict follow each other.
bool tables_hold(const Rows<3>& rows) {
  for (Py_ssize_t i = 0; i < rows.count;) {
    PyObject* const dict = rows.items[3 * i];
    const Py_ssize_t size = size_of(dict);
    Py_ssize_t place = 0, seen = 0;
    PyObject *key, *value;
    for (; i < rows.count && rows.items[3 * i] == dict; ++i, ++seen) {
      PyObject* const* const row = rows.with_table(i);
      if (!PyDict_Next(dict, &place, &key, &value) || key != row[1] || value != row[2])
        return false;
    }
    if (seen != size) return false;
  }
  return true;
}

// Whether dicts are empty and objects have their types.
bool empty_and_typed(const py::tuple& empty, const py::tuple& types) {
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

// What each flat tuple says, row by row:
//   tables   dict, key, value: the dict's entries, all of them and in order
//   entries  dict, key, value: one entry, whatever else is there
//   absent   dict, key: no such entry
//   empty    dict
//   types    object, type: the object's own class
bool unchanged(const py::tuple& tables, const py::tuple& entries, const py::tuple& absent,
               const py::tuple& empty, const py::tuple& types) {
  if (!tables_hold(Rows<3>(tables, "tables in threes: dict, key, value"))) return false;
  const Rows<3> present(entries, "entries in threes: dict, key, value");
  for (Py_ssize_t i = 0; i < present.count; ++i) {
    PyObject* const* const row = present.with_table(i);
    if (entry_of(row[0], row[1]) != row[2]) return false;
  }
  const Rows<2> missing(absent, "absent in pairs: dict, key");
  for (Py_ssize_t i = 0; i < missing.count; ++i) {
    PyObject* const* const row = missing[i];
    if (entry_of(row[0], row[1])) return false;
  }
  return empty_and_typed(empty, types);
}

// A method without arguments or a property of a C type, called through its descriptor's own
// function pointer: half the time of a call through the interpreter.
class Reader {
 public:
  explicit Reader(PyObject* descriptor) : descriptor_(descriptor) {
    if (Py_TYPE(descriptor) == &PyMethodDescr_Type) {
      const auto* const method = reinterpret_cast<PyMethodDescrObject*>(descriptor);
      if (method->d_method->ml_flags != METH_NOARGS) return;
      kind_ = method->d_common.d_type;
      method_ = method->d_method->ml_meth;
    } else if (Py_TYPE(descriptor) == &PyGetSetDescr_Type) {
      const auto* const property = reinterpret_cast<PyGetSetDescrObject*>(descriptor);
      kind_ = property->d_common.d_type;
      get_ = property->d_getset->get;
      closure_ = property->d_getset->closure;
    }
  }

  py::object operator()(PyObject* object) const {
    if (kind_ && !PyObject_TypeCheck(object, kind_))
      refuse("reads", "an object that has the property");
    return unchecked(object);
  }
  // Whether objects of a class have the property.
  bool takes(PyTypeObject* kind) const { return !kind_ || PyType_IsSubtype(kind, kind_); }
  // The same as a call, of an object whose class it takes.
  py::object unchecked(PyObject* object) const {
    PyObject* const got = get_      ? get_(object, closure_)
                          : method_ ? method_(object, nullptr)
                                    : PyObject_CallFunctionObjArgs(descriptor_, object, nullptr);
    if (!got) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(got);
  }

 private:
  PyObject* descriptor_;
  PyTypeObject* kind_ = nullptr;
  PyCFunction method_ = nullptr;
  getter get_ = nullptr;
  void* closure_ = nullptr;
};

// Whether the descriptor gives each object's expected value.
bool reads(const py::object& descriptor, const py::tuple& objects, const py::tuple& expected) {
  const Py_ssize_t count = PyTuple_GET_SIZE(objects.ptr());
  if (count != PyTuple_GET_SIZE(expected.ptr())) refuse("reads", "as many values as objects");
  const Reader read(descriptor.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::object got = read(PyTuple_GET_ITEM(objects.ptr(), i));
    const int same =
        PyObject_RichCompareBool(got.ptr(), PyTuple_GET_ITEM(expected.ptr(), i), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (!same) return false;
  }
  return true;
}

// A dict's version, which every write changes to one that no dict had before (PEP 509); 0 where
// Python has none: from 3.12 on it is no longer public.
uint64_t version_of_dict(PyObject* dict) {
  if (!PyDict_Check(dict)) refuse("unchanged", "a dict");
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

}  // namespace

// ---- What the facts were ----

// `unchanged`, asked again and again: entries are looked up only after a dict was written to.
class Watch {
 public:
  // `dicts`: all that the next three tuples name, the same objects at each call.
  bool holds(const py::tuple& dicts, const py::tuple& tables, const py::tuple& entries,
             const py::tuple& absent, const py::tuple& empty, const py::tuple& types) {
    const Rows<1> watched(dicts, "dicts");
    if (untouched(watched)) return empty_and_typed(empty, types);
    versions_.clear();
    if (!unchanged(tables, entries, absent, empty, types)) return false;
    for (Py_ssize_t i = 0; i < watched.count; ++i)
      versions_.push_back(version_of_dict(watched[i][0]));
    return true;
  }

 private:
  bool untouched(const Rows<1>& dicts) const {
    if (versions_.size() != static_cast<size_t>(dicts.count)) return false;
    for (Py_ssize_t i = 0; i < dicts.count; ++i) {
      const uint64_t version = version_of_dict(dicts[i][0]);
      if (!version || version != versions_[i]) return false;
    }
    return true;
  }

  std::vector<uint64_t> versions_;  // of dicts whose entries were the expected ones
};

// ---- Where tensors are ----

// Versions, addresses, dtypes, devices, sizes and strides of tensors, and whether they are still
// the same. Two function calls a tensor, a third of the time of asking for each by its method.
class Places {
 public:
  Places(const py::type& kind, const py::object& version, const py::tuple& tensors)
      : version_(version),
        read_version_(version.ptr()),
        kind_(reinterpret_cast<PyTypeObject*>(kind.ptr())),
        exchange_(exchange_of(kind)),
        count_(PyTuple_GET_SIZE(tensors.ptr())) {
    if (!exchange_) refuse("Places", "version 1 of DLPack's exchange API");
    if (!read_version_.takes(kind_)) refuse("Places", "a property of the class");
    for (const py::handle tensor : tensors) {
      if (!PyObject_TypeCheck(tensor.ptr(), kind_)) refuse("Places", "tensors of the given class");
      DlTensor view;
      if (!look(tensor.ptr(), &view)) throw py::error_already_set();
      const Kind own = kind_of(view);
      facts_.insert(facts_.end(), {version_of(tensor.ptr()), address(view), own[0], own[1]});
      facts_.insert(facts_.end(), view.sizes, view.sizes + view.ndim);
      facts_.insert(facts_.end(), view.strides, view.strides + view.ndim);
    }
  }

  // `tensors`: those that it was made with; not held here, so that the garbage collector sees them.
  bool match(const py::tuple& tensors) const {
    if (PyTuple_GET_SIZE(tensors.ptr()) != count_) refuse("Places", "the tensors it was made with");
    const int64_t* fact = facts_.data();
    PyObject* const* const items = &PyTuple_GET_ITEM(tensors.ptr(), 0);
    const PyTypeObject* checked = nullptr;  // mostly they are all Parameters
    for (Py_ssize_t i = 0; i < count_; ++i) {
      PyObject* const tensor = items[i];
      if (i + kAhead < count_) __builtin_prefetch(items[i + kAhead]);
      if (i + kAhead / 2 < count_) fetch_record(items[i + kAhead / 2]);
      if (Py_TYPE(tensor) != checked) {
        if (!PyObject_TypeCheck(tensor, kind_)) refuse("Places", "tensors of the given class");
        checked = Py_TYPE(tensor);
      }
      DlTensor view;
      if (!look(tensor, &view)) {
        PyErr_Clear();  // it is now on a device, or of a dtype, that DLPack does not know
        return false;
      }
      const Kind own = kind_of(view);
      if (fact[0] != version_of(tensor) || fact[1] != address(view) || fact[2] != own[0] ||
          fact[3] != own[1])
        return false;
      fact += 4;
      int64_t changes = 0;
      for (int32_t j = 0; j < view.ndim; ++j) changes |= *fact++ ^ view.sizes[j];
      for (int32_t j = 0; j < view.ndim; ++j) changes |= *fact++ ^ view.strides[j];
      if (changes) return false;
    }
    return true;
  }

 private:
  using Kind = std::array<int64_t, 2>;  // axes and dtype; device

  // Of an object that is known to be of the class.
  bool look(PyObject* tensor, DlTensor* view) const {
    return exchange_->view_of_python(tensor, view) == 0;
  }

  static int64_t address(const DlTensor& view) { return reinterpret_cast<int64_t>(view.data); }

  static Kind kind_of(const DlTensor& view) {
    return {int64_t(view.ndim) << 32 | view.dtype,
            int64_t(view.device[0]) << 32 | uint32_t(view.device[1])};
  }

  int64_t version_of(PyObject* tensor) const {
    const int64_t version = PyLong_AsLongLong(read_version_.unchecked(tensor).ptr());
    if (version == -1 && PyErr_Occurred()) throw py::error_already_set();
    return version;
  }

  py::object version_;  // keeps what the next one points to
  Reader read_version_;
  PyTypeObject* kind_;  // torch.Tensor: the interpreter keeps it
  const DlExchange* exchange_;
  Py_ssize_t count_;
  std::vector<int64_t> facts_;
};

}  // namespace vitkern

VITKERN_INITIALISED(vitkern::Places);
VITKERN_INITIALISED(vitkern::Watch);

namespace vitkern {

void bind_watch(py::module_& m) {
  m.def("unchanged", &unchanged, py::arg("tables"), py::arg("entries"), py::arg("absent"),
        py::arg("empty"), py::arg("types"),
        "Whether dicts still have exactly these entries (dict, key, value, ...), have these "
        "among others (dict, key, value, ...), lack these (dict, key, ...), are empty (dict, ...) "
        "and objects have these types (object, type, ...).");
  py::class_<Watch>(m, "Watch",
                    "unchanged() for facts that are asked for again and again, with all the dicts "
                    "of the first three tuples.")
      .def(py::init<>())
      .def("holds", &Watch::holds, py::arg("dicts"), py::arg("tables"), py::arg("entries"),
           py::arg("absent"), py::arg("empty"), py::arg("types"));
  m.def("reads", &reads, py::arg("descriptor"), py::arg("objects"), py::arg("expected"),
        "Whether a C type's method or property gives the expected value for every object.");
  py::class_<Places>(
      m, "Places",
      "Versions, addresses, dtypes, devices, sizes and strides of tensors of a class with DLPack's "
      "exchange API (class, its property of the version, tensors).")
      .def(py::init<const py::type&, const py::object&, const py::tuple&>())
      .def("match", &Places::match, "Whether these tensors, the same objects, are still there.");
}

}  // namespace vitkern
