// The keywords of a Python call as the fields of a C++ struct, for the structs of arguments.inc and
// engine_arguments.inc. A keyword that no field reads is a TypeError, and so is a field without a
// keyword: nothing is silently zero.
#pragma once
#include <pybind11/pybind11.h>

#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/engine.hpp"

namespace vitkern {

// visit(name, field) for every field of a struct, in their order.
#define STRUCT(Struct)   \
  template <class Visit> \
  void each_field(Struct& s, const Visit& visit) {
#define FIELD(type, name) visit(#name, s.name);
#define END }
#include "cpu/arguments.inc"
#include "cpu/engine_arguments.inc"
#undef END
#undef FIELD
#undef STRUCT

// A field from its Python value, or pybind11::cast_error. An array comes as an address, 0 is null.
template <class T>
void convert(pybind11::handle value, T& field) {
  if constexpr (std::is_enum_v<T>) {  // pybind11 would look the type up by its name at every call
    static const auto* const type = pybind11::detail::get_type_info(typeid(T));
    pybind11::detail::type_caster_generic caster(type);
    if (!caster.load(value, false) || !caster.value) throw pybind11::cast_error();
    field = *static_cast<const T*>(caster.value);
  } else {
    field = value.cast<T>();
  }
}
template <class T>
void convert(pybind11::handle value, T*& field) {
  field = reinterpret_cast<T*>(value.cast<uintptr_t>());
}
inline std::span<PyObject*> items_of(const pybind11::object& list) {
  return {PySequence_Fast_ITEMS(list.ptr()),
          static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()))};
}
inline pybind11::object as_list(pybind11::handle value) {
  PyObject* const list = PySequence_Fast(value.ptr(), "");
  if (!list) {
    PyErr_Clear();
    throw pybind11::cast_error();
  }
  return pybind11::reinterpret_steal<pybind11::object>(list);
}
template <class... Fields>
void convert_items(pybind11::handle value, Fields&... fields) {
  const pybind11::object list = as_list(value);
  if (items_of(list).size() != sizeof...(fields)) throw pybind11::cast_error();
  size_t i = 0;
  (convert(items_of(list)[i++], fields), ...);
}
inline void convert(pybind11::handle value, Strides& s) {
  convert_items(value, s[0], s[1], s[2], s[3]);
}
inline void convert(pybind11::handle value, Dropout& d) {
  convert_items(value, d.seed, d.threshold, d.scale);
}
template <class T>
void convert(pybind11::handle value, std::vector<T*>& field) {
  const pybind11::object list = as_list(value);
  for (PyObject* const item : items_of(list)) convert(item, field.emplace_back());
}

// The names of a struct's fields, as the strings that Python's own keywords are: found by address.
template <class Struct>
const std::vector<PyObject*>& field_names() {
  static const std::vector<PyObject*> names = [] {
    std::vector<PyObject*> made;
    Struct any{};
    each_field(any,
               [&](const char* name, auto&) { made.push_back(PyUnicode_InternFromString(name)); });
    return made;
  }();
  return names;
}

[[noreturn]] inline void refuse_unknown(const pybind11::kwargs& given,
                                        const std::vector<PyObject*>& names) {
  namespace py = pybind11;
  py::set unknown(given);
  std::string known;
  for (PyObject* const name : names) {
    unknown.attr("discard")(py::handle(name));
    known += (known.empty() ? "" : ", ") + py::handle(name).cast<std::string>();
  }
  throw py::type_error("vitkern: unknown keyword " +
                       py::repr(*unknown.begin()).cast<std::string>() + "; known: " + known);
}

template <class Struct>
Struct from_keywords(const pybind11::kwargs& given) {
  namespace py = pybind11;
  const std::vector<PyObject*>& names = field_names<Struct>();
  Struct s{};
  auto at = names.begin();
  each_field(s, [&](const char* name, auto& field) {
    const py::handle value = PyDict_GetItemWithError(given.ptr(), *at++);
    if (!value) throw py::type_error(std::string("vitkern: missing keyword '") + name + "'");
    try {
      convert(value, field);
    } catch (const py::cast_error&) {
      throw py::type_error(
          std::string("vitkern: keyword '") + name +
          "' has the wrong type, or is out of range: " + py::repr(value).cast<std::string>());
    }
  });
  if (given.size() != names.size()) refuse_unknown(given, names);
  return s;
}

}  // namespace vitkern
