// Casters that refuse a Python object whose __init__ never ran (`Slot.__new__(Slot)`): pybind11
// would hand its methods memory that holds no object.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <typeinfo>

namespace vitkern {

// A caster of T, or of a pointer that holds one.
template <class T, class Caster>
struct Initialised : Caster {
  bool load(pybind11::handle object, bool convert) {
    namespace py = pybind11;
    static const auto* const type = py::detail::get_type_info(typeid(T));  // by its name: slow
    if (PyObject_TypeCheck(object.ptr(), type->type)) {
      auto* const made = reinterpret_cast<py::detail::instance*>(object.ptr());
      if (!made->get_value_and_holder(type).holder_constructed())
        throw py::type_error("vitkern: this " +
                             py::str(py::type::of(object).attr("__name__")).cast<std::string>() +
                             " was made without __init__: call its class instead of __new__");
    }
    return Caster::load(object, convert);
  }
};

}  // namespace vitkern

#define VITKERN_INITIALISED(T)           \
  template <>                            \
  class pybind11::detail::type_caster<T> \
      : public vitkern::Initialised<T, pybind11::detail::type_caster_base<T>> {}
#define VITKERN_INITIALISED_SHARED(T)                     \
  VITKERN_INITIALISED(T);                                 \
  template <>                                             \
  class pybind11::detail::type_caster<std::shared_ptr<T>> \
      : public vitkern::Initialised<                      \
            T, pybind11::detail::copyable_holder_caster<T, std::shared_ptr<T>>> {}
