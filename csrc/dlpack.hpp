// DLPack's C exchange API, version 1 (dlpack.h), with which torch >= 2.10 shows where a tensor is:
// the parts that are read here.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace vitkern {

struct DlTensor {
  void* data;
  int32_t device[2];  // kind, number
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

// Of a class of tensors; throws what Python throws where it has none, null for another version.
inline const DlExchange* exchange_of(const pybind11::type& kind) {
  const auto* const exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(
      pybind11::object(kind.attr("__dlpack_c_exchange_api__")).ptr(), "dlpack_exchange_api"));
  if (!exchange) throw pybind11::error_already_set();
  return exchange->header.major == 1 && exchange->view_of_python ? exchange : nullptr;
}

}  // namespace vitkern
