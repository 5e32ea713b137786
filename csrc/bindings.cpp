// The Python face of the native backend: names, pointers and sizes. No arithmetic here; only this
// file, watch.cpp and cuda/bindings.cpp know pybind11. Tensors come as addresses (0 is null);
// cpu/checks.cpp checks the sizes that come with them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "cpu/arena.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/engine.hpp"
#include "cpu/fingerprint.hpp"
#include "cuda/bindings.hpp"
#include "initialised.hpp"
#include "watch.hpp"

VITKERN_INITIALISED_SHARED(vitkern::Engine);
VITKERN_INITIALISED_SHARED(vitkern::Fingerprint);

namespace py = pybind11;

namespace {

using namespace vitkern;
using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

Dropout dropout(std::tuple<uint64_t, uint32_t, float> d) {
  return {std::get<0>(d), std::get<1>(d), std::get<2>(d)};
}

template <class T>
T field(const py::kwargs& kw, const char* name) {
  const py::handle value = PyDict_GetItemString(kw.ptr(), name);
  if (!value) throw py::type_error(std::string("vitkern: missing keyword '") + name + "'");
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string("vitkern: keyword '") + name + "' has the wrong type, or is " +
                         "out of range: " + py::repr(value).cast<std::string>());
  }
}

// A field of the args struct from the Python keyword of the same name.
#define INTO(args, name) args.name = field<decltype(args.name)>(kw, #name)
#define INTO_ADDRESS(args, name) \
  args.name = at<std::remove_pointer_t<decltype(args.name)>>(field<Address>(kw, #name))
#define INTO_DROPOUT(args, name) \
  args.name = dropout(field<std::tuple<uint64_t, uint32_t, float>>(kw, #name))

layernorm_args layernorm_from(const py::kwargs& kw) {
  layernorm_args a{};
  INTO(a, threads), INTO(a, dtype), INTO(a, M), INTO(a, D), INTO(a, x_stride), INTO(a, eps);
  INTO_ADDRESS(a, x), INTO_ADDRESS(a, weight), INTO_ADDRESS(a, bias), INTO_ADDRESS(a, y),
      INTO_ADDRESS(a, stats);
  return a;
}

norm_linear_args norm_linear_from(const py::kwargs& kw) {
  norm_linear_args a{};
  INTO(a, threads), INTO(a, x_dtype), INTO(a, w_dtype), INTO(a, activation), INTO(a, eps);
  INTO(a, M), INTO(a, K), INTO(a, N), INTO(a, x_stride);
  INTO_ADDRESS(a, x), INTO_ADDRESS(a, norm_weight), INTO_ADDRESS(a, norm_bias),
      INTO_ADDRESS(a, weight);
  INTO_ADDRESS(a, bias), INTO_ADDRESS(a, y), INTO_ADDRESS(a, stats), INTO_ADDRESS(a, pre);
  return a;
}

attention_args attention_from(const py::kwargs& kw) {
  attention_args a{};
  INTO(a, threads), INTO(a, dtype), INTO(a, scale), INTO_DROPOUT(a, dropout);
  INTO(a, B), INTO(a, S), INTO(a, H), INTO(a, E), INTO(a, sequences);
  INTO(a, b_stride), INTO(a, s_stride), INTO(a, part_stride), INTO(a, h_stride);
  INTO(a, bias_b_stride), INTO(a, bias_h_stride), INTO(a, bias_s_stride);
  INTO_ADDRESS(a, qkv), INTO_ADDRESS(a, bias), INTO_ADDRESS(a, offsets), INTO_ADDRESS(a, y),
      INTO_ADDRESS(a, lse);
  return a;
}

linear_residual_args linear_residual_from(const py::kwargs& kw) {
  linear_residual_args a{};
  INTO(a, threads), INTO(a, x_dtype), INTO(a, w_dtype), INTO(a, y_dtype);
  INTO(a, B), INTO(a, S), INTO(a, K), INTO(a, N), INTO(a, x_stride), INTO(a, residual_stride);
  INTO_ADDRESS(a, x), INTO_ADDRESS(a, weight), INTO_ADDRESS(a, bias), INTO_ADDRESS(a, residual);
  INTO_ADDRESS(a, gamma), INTO_ADDRESS(a, y), INTO_DROPOUT(a, dropout), INTO_DROPOUT(a, path);
  return a;
}

mlp_args mlp_from(const py::kwargs& kw) {
  mlp_args a{};
  INTO(a, threads), INTO(a, x_dtype), INTO(a, w_dtype), INTO(a, activation), INTO(a, eps);
  INTO(a, B), INTO(a, S), INTO(a, D), INTO(a, F), INTO(a, x_stride);
  INTO_ADDRESS(a, x), INTO_ADDRESS(a, norm_weight), INTO_ADDRESS(a, norm_bias),
      INTO_ADDRESS(a, fc1_weight);
  INTO_ADDRESS(a, fc1_bias), INTO_ADDRESS(a, fc2_weight), INTO_ADDRESS(a, fc2_bias),
      INTO_ADDRESS(a, gamma);
  INTO_ADDRESS(a, y), INTO_ADDRESS(a, stats), INTO_ADDRESS(a, pre), INTO_DROPOUT(a, dropout),
      INTO_DROPOUT(a, path);
  return a;
}

patch_embed_args patch_embed_from(const py::kwargs& kw) {
  patch_embed_args a{};
  INTO(a, threads), INTO(a, image_dtype), INTO(a, w_dtype), INTO_DROPOUT(a, dropout);
  INTO(a, B), INTO(a, C), INTO(a, Y), INTO(a, X), INTO(a, py), INTO(a, px), INTO(a, D), INTO(a, T);
  INTO(a, b_stride), INTO(a, c_stride), INTO(a, y_stride), INTO(a, x_stride);
  INTO_ADDRESS(a, image), INTO_ADDRESS(a, weight), INTO_ADDRESS(a, bias), INTO_ADDRESS(a, prefix);
  INTO_ADDRESS(a, position), INTO_ADDRESS(a, mean), INTO_ADDRESS(a, std), INTO_ADDRESS(a, y);
  return a;
}

calibrate_args calibrate_from(const py::kwargs& kw) {
  calibrate_args a{};
  INTO(a, threads), INTO(a, precision), INTO(a, floats), INTO(a, seconds);
  INTO_ADDRESS(a, data), INTO_ADDRESS(a, rates);
  return a;
}

EngineConfig config_from(const py::kwargs& kw) {
  EngineConfig c{};
  INTO(c, channels), INTO(c, patch_y), INTO(c, patch_x), INTO(c, width), INTO(c, heads),
      INTO(c, mlp_width);
  INTO(c, depth), INTO(c, eps), INTO(c, activation), INTO(c, precision);
  return c;
}

EngineInput input_from(const py::kwargs& kw) {
  EngineInput in{};
  INTO(in, threads), INTO(in, dtype), INTO(in, B), INTO(in, Y), INTO(in, X), INTO(in, T),
      INTO(in, pool), INTO(in, head);
  INTO_ADDRESS(in, image), INTO_ADDRESS(in, prefix), INTO_ADDRESS(in, position),
      INTO_ADDRESS(in, mean);
  INTO_ADDRESS(in, std), INTO_ADDRESS(in, y);
  const auto strides = field<std::array<int64_t, 4>>(kw, "strides");
  for (int i = 0; i < 4; ++i) in.strides[i] = strides[i];
  for (const Address a : field<std::vector<Address>>(kw, "biases"))
    in.biases.push_back(at<const float>(a));
  return in;
}

py::dict features() {
  py::dict flags;
  for (const Feature& f : cpu_features()) flags[f.name] = f.present;
  py::dict d;
  d["cpu"] = cpu_model();
  d["flags"] = flags;
  d["amx_usable"] = amx_usable();
  d["isas"] = available_isas();
  d["isa"] = isa_name(isa_named(""));
#if defined(_OPENMP)
  d["openmp"] = true;
  d["threads"] = omp_get_max_threads();
#else
  d["openmp"] = false;
  d["threads"] = 1;
#endif
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "vitkern's native CPU kernels and its GPU launcher; use vitkern.ops and vitkern.ViT instead.";
  py::enum_<DType>(m, "DType")
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("u8", DType::u8);
  py::enum_<Precision>(m, "Precision")
      .value("fp32", Precision::fp32)
      .value("tf32", Precision::tf32)
      .value("bf16", Precision::bf16);
  py::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("quick_gelu", Activation::quick_gelu)
      .value("tanh", Activation::tanh);
  py::enum_<Pool>(m, "Pool")
      .value("tokens", Pool::tokens)
      .value("token", Pool::token)
      .value("mean", Pool::mean);

  m.def("features", &features, "The CPU, its instruction sets, AMX state and threads, as a dict.");
  m.def("isas", &available_isas, "Instruction sets this build and this CPU have, best first.");
  m.def("arena_allocations", &arena_allocations,
        "How often scratch memory was asked of the system.");
  m.def("arena_trim", &arena_trim, "Give idle scratch memory back to the system.");

#define BIND(kernel)                                                \
  m.def(#kernel, [](const std::string& isa, const py::kwargs& kw) { \
    const kernel##_args args = kernel##_from(kw);                   \
    const Isa chosen = isa_named(isa);                              \
    const py::gil_scoped_release unlocked;                          \
    kernel(chosen, args);                                           \
  })
  BIND(layernorm);
  BIND(norm_linear);
  BIND(attention);
  BIND(linear_residual);
  BIND(mlp);
  BIND(patch_embed);
  BIND(calibrate);
#undef BIND

  // Methods take the holder: the object cannot die while the interpreter's lock is released.
  using EnginePtr = std::shared_ptr<Engine>;
  py::class_<Engine, EnginePtr>(
      m, "Engine", "A ViT's packed weights; forward() may run in several threads at once.")
      .def(py::init([](const std::string& isa, const py::kwargs& kw) {
        return std::make_shared<Engine>(isa_named(isa), config_from(kw));
      }))
      .def("set_matrix",
           [](const EnginePtr& e, const std::string& name, DType dtype, Address data, int64_t N,
              int64_t K) {
             const py::gil_scoped_release unlocked;
             e->set_matrix(name, dtype, at<const void>(data), N, K);
           })
      .def("set_vector", [](const EnginePtr& e, const std::string& name, Address data,
                            int64_t n) { e->set_vector(name, at<const float>(data), n); })
      .def("finish", [](const EnginePtr& e) { e->finish(); })
      .def("forward",
           [](const EnginePtr& e, const py::kwargs& kw) {
             const EngineInput input = input_from(kw);
             const py::gil_scoped_release unlocked;
             e->forward(input);
           })
      .def_property_readonly("classes", [](const EnginePtr& e) { return e->classes(); })
      .def_property_readonly("packed_bytes", [](const EnginePtr& e) { return e->packed_bytes(); })
      .def_property_readonly("isa", [](const EnginePtr& e) { return isa_name(e->isa()); });

  using FingerprintPtr = std::shared_ptr<Fingerprint>;
  py::class_<Fingerprint, FingerprintPtr>(
      m, "Fingerprint", "A few elements of arrays (address, element's bytes, sizes, strides).")
      .def(py::init(
          [](const std::vector<
              std::tuple<Address, int64_t, std::vector<int64_t>, std::vector<int64_t>>>& rows) {
            std::vector<WatchedArray> arrays;
            for (const auto& [address, element, sizes, strides] : rows)
              arrays.push_back({at<const void>(address), element, sizes, strides});
            return std::make_shared<Fingerprint>(arrays);
          }))
      .def("matches", [](const FingerprintPtr& f) { return f->matches(); });

  bind_watch(m);
  cuda::bind(m);
}
