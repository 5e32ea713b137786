// Whether Python objects are still as they were, without running any Python code.
#pragma once
#include <pybind11/pybind11.h>

namespace vitkern {

void bind_watch(pybind11::module_& m);

}  // namespace vitkern
