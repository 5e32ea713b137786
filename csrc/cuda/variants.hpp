// Which binary serves a launch: the variant that gpu/launch.py describes in words (types,
// constants, what is divisible, warps and stages), here as a string of bytes. A launch whose
// variant was met before is packed and started without any Python code.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../dlpack.hpp"
#include "kernel.hpp"

namespace vitkern::cuda {

// Of one Triton kernel on one device. The interpreter's lock is held in every call.
class Variants {
 public:
  // parameters: a letter for each of the source's: c(onstant), d(ivisible or not makes two
  // variants), p(lain). device: the number of the GPU that tensors must be on, -1 for the CPU.
  Variants(const pybind11::type& tensor, std::string parameters, int device);

  struct Settings {
    int num_warps, num_stages;
  };

  // Starts a launch by its arguments, in the source's order; false if its variant was not met
  // before, or if an argument is of a kind that only Python knows.
  bool start(const pybind11::dict& arguments, Settings settings, const Grid& grid,
             Handle stream) const;

  // The binary that serves launches like this one from now on.
  void add(const pybind11::dict& arguments, Settings settings, std::shared_ptr<Kernel> kernel);

 private:
  // What is written to: the variant's key, and the values that its binary takes.
  struct Launch {
    std::string key;
    std::vector<Value> values;
  };
  bool read(const pybind11::dict& arguments, Settings settings, Launch& launch) const;
  bool read_value(PyObject* value, char kind, Launch& launch) const;
  bool read_tensor(PyObject* tensor, char kind, Launch& launch) const;

  PyTypeObject* tensor_;                  // torch.Tensor: the interpreter keeps it
  const DlExchange* exchange_ = nullptr;  // null: an older torch
  std::string parameters_;
  int device_;
  std::unordered_map<std::string, std::shared_ptr<Kernel>> kernels_;
};

}  // namespace vitkern::cuda
