#pragma once
#include <pybind11/pybind11.h>

namespace vitkern::cuda {

void bind(pybind11::module_& m);  // Driver, Kernel, LaunchList, Slot, DriverError and runs_on

}  // namespace vitkern::cuda
