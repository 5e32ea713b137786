// The Python face of the native backend: names, pointers and sizes. No arithmetic here; only files
// of this folder and cuda/bindings.cpp know pybind11. Tensors come as addresses (0 is null);
// cpu/checks.cpp checks the sizes that come with them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <tuple>
#include <utility>

#include "cpu/arena.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/engine.hpp"
#include "cpu/fingerprint.hpp"
#include "cpu/steps.hpp"
#include "cpu/threads.hpp"
#include "cuda/bindings.hpp"
#include "initialised.hpp"
#include "keywords.hpp"
#include "unlocked.hpp"
#include "watch.hpp"

VITKERN_INITIALISED_SHARED(vitkern::Engine);
VITKERN_INITIALISED_SHARED(vitkern::Fingerprint);
VITKERN_INITIALISED_SHARED(vitkern::Packed);

namespace py = pybind11;

namespace {

using namespace vitkern;
using Address = uintptr_t;

// A layout as Python has it: an integer, to be compared and given back.
int code_of(const Layout& layout) {
  return static_cast<int>(layout.isa) << 8 | static_cast<int>(layout.precision);
}
Layout layout_of(int code) {
  for (const std::string& name : available_isas())
    for (const Precision precision : {Precision::fp32, Precision::tf32, Precision::bf16}) {
      const Layout known = engine_layout(isa_named(name), precision);
      if (code_of(known) == code) return known;
    }
  throw py::value_error("vitkern: no layout has the number " + std::to_string(code));
}

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

py::dict cpu_facts() {
  py::dict flags;
  for (const Feature& f : cpu_features()) flags[f.name] = f.present;
  py::dict d;
  d["cpu"] = cpu_model();
  d["flags"] = flags;
  d["amx_usable"] = amx_usable();
  d["amx_palettes"] = amx_palettes();
  return d;
}

py::list sets_here() {
  py::list found;
  for (const InstructionSet& one : instruction_sets()) {
    py::dict d;
    d["name"] = one.name;
    d["base"] = one.base;
    d["machine"] = one.machine;
    d["needs"] = one.needs;
    d["built"] = one.built;
    d["runs_here"] = one.runs_here;
    d["pays"] = one.pays;
    found.append(d);
  }
  return found;
}

py::dict features() {
  py::dict d = cpu_facts();
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
      .value("u8", DType::u8)
      .value("i8", DType::i8);
  py::enum_<Precision>(m, "Precision")
      .value("fp32", Precision::fp32)
      .value("tf32", Precision::tf32)
      .value("bf16", Precision::bf16)
      .value("int8", Precision::int8);
  py::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("quick_gelu", Activation::quick_gelu)
      .value("silu", Activation::silu)
      .value("tanh", Activation::tanh);
  py::enum_<NormKind>(m, "NormKind").value("layer", NormKind::layer).value("rms", NormKind::rms);
  py::enum_<Order>(m, "Order")
      .value("pre_norm", Order::pre_norm)
      .value("post_norm", Order::post_norm)
      .value("parallel", Order::parallel);
  py::enum_<Pool>(m, "Pool")
      .value("tokens", Pool::tokens)
      .value("token", Pool::token)
      .value("mean", Pool::mean);

  m.def("features", &features, "The CPU, its instruction sets, AMX state and threads, as a dict.");
  m.def("cpu_facts", &cpu_facts,
        "The CPU, its features and AMX state; VITKERN_ISA is not looked at.");
  m.def("instruction_sets", &sets_here,
        "Every set of isas.inc, best first: what it needs, whether it is built, runs and pays.");
  m.def("isas", &available_isas, "Instruction sets this build and this CPU have, best first.");
  m.def("operator_isas", &operator_isas,
        "Those of isas() with operators that are not another set's, best first.");
  m.def(
      "operator_isa",
      [](const std::string& isa, DType weight) {
        return isa_name(operators_isa(operator_set(isa, weight), weight));
      },
      "The set whose operators multiply by weights of a dtype where this one is asked for.");
  m.def("arena_allocations", &arena_allocations,
        "How often scratch memory was asked of the system.");
  m.def(
      "profile_steps",
      [](bool on) {
        const auto seconds = profile_steps(on);
        py::dict found;
        for (int i = 0; i < kSteps; ++i) found[kStepNames[i]] = seconds[i];
        return found;
      },
      "Turn the engine's profile on (from zero) or off; each step's seconds, summed over threads.");
  m.def("arena_trim", &arena_trim,
        "Give idle scratch memory, and what malloc holds free, back to the system.");

  m.def("set_cpus", &set_cpus, "How many CPUs calls of several threads share.");
  m.def("cpus", &cpus, "How many CPUs calls of several threads share.");
  py::class_<Grant>(m, "Grant", "Threads of a call, as a kernel asks for them; freed with it.")
      .def(py::init([](int wanted) {
        const Unlocked unlocked;
        return std::make_unique<Grant>(wanted);
      }))
      .def_property_readonly("threads", &Grant::threads);

#define VITKERN_BOUND(kernel, find)                                 \
  m.def(#kernel, [](const std::string& isa, const py::kwargs& kw) { \
    const auto args = from_keywords<kernel##_args>(kw);             \
    const Isa chosen = find;                                        \
    const Unlocked unlocked;                                        \
    kernel(chosen, args);                                           \
  });
#define VITKERN_OPERATOR(kernel) VITKERN_BOUND(kernel, operator_set(isa, weight_of(args)))
#define VITKERN_ENGINE(kernel)  // Engine's methods call it
#define VITKERN_MEASUREMENT(kernel) VITKERN_BOUND(kernel, engine_set(isa, args.precision))
#include "cpu/kernels.inc"

  m.def(
      "engine_layout",
      [](const std::string& isa, Precision precision) {
        return code_of(engine_layout(engine_set(isa, precision), precision));
      },
      "Which panels an engine reads; equal ones are the same bit by bit.");
  m.def(
      "engine_isa",
      [](const std::string& isa, Precision precision) {
        return isa_name(engine_isa(engine_set(isa, precision), precision));
      },
      "The set whose kernels an engine of this precision runs where this set is asked for.");
  m.def(
      "operator_layout",
      [](const std::string& isa, DType weight) {
        return code_of(operator_layout(operator_set(isa, weight), weight));
      },
      "Which panels the operators read, by the dtype of the weight.");

  m.def(
      "panel_form",
      [](int layout) {
        const PanelForm form = form_of(layout_of(layout));
        return std::tuple(std::string(form.kind), form.columns, form.steps, form.terms);
      },
      "How the elements of a layout's panels lie: kind, columns, steps of a block, terms.");

  // Methods take the holder: the object cannot die while the interpreter's lock is released.
  using PackedHolder = std::shared_ptr<Packed>;
  py::class_<Packed, PackedHolder>(m, "Packed", "A weight (N, K) in panels; it never changes.")
      .def(py::init([](int layout, DType dtype, Address data, int64_t N, int64_t K) {
        const Layout known = layout_of(layout);
        const Unlocked unlocked;
        return std::make_shared<Packed>(known, dtype, at<const void>(data), N, K);
      }))
      .def_static("of_panels",
                  [](int layout, Address panels, size_t bytes, int64_t N, int64_t K,
                     const py::object& owner) {
                    // The last thread to let go of the panels may not hold the interpreter's lock.
                    const std::shared_ptr<void> kept(new py::object(owner), [](void* object) {
                      const py::gil_scoped_acquire locked;
                      delete static_cast<py::object*>(object);
                    });
                    return std::make_shared<Packed>(layout_of(layout), at<const void>(panels),
                                                    bytes, N, K, kept);
                  })
      .def("unpack",
           [](const PackedHolder& p, DType dtype, Address data) {
             const Unlocked unlocked;
             return p->unpack(dtype, at<void>(data));
           })
      .def_property_readonly("layout", [](const PackedHolder& p) { return code_of(p->layout()); })
      .def_property_readonly(
          "panels", [](const PackedHolder& p) { return reinterpret_cast<Address>(p->panels()); })
      .def_property_readonly("bytes", [](const PackedHolder& p) { return p->bytes(); })
      .def_property_readonly("shape",
                             [](const PackedHolder& p) { return std::pair(p->N(), p->K()); });

  using EnginePtr = std::shared_ptr<Engine>;
  py::class_<Engine, EnginePtr>(
      m, "Engine", "A ViT's packed weights; forward() may run in several threads at once.")
      .def(py::init([](const std::string& isa, const py::kwargs& kw) {
        const auto config = from_keywords<EngineConfig>(kw);
        return std::make_shared<Engine>(engine_set(isa, config.precision), config);
      }))
      .def(
          "set_matrix",
          [](const EnginePtr& e, const std::string& name, DType dtype, Address data, int64_t N,
             int64_t K, Address scales) {
            const Unlocked unlocked;
            e->set_matrix(name, dtype, at<const void>(data), N, K, at<const float>(scales));
          },
          py::arg("name"), py::arg("dtype"), py::arg("data"), py::arg("N"), py::arg("K"),
          py::arg("scales") = Address{0})
      .def("set_packed", [](const EnginePtr& e, const std::string& name,
                            const PackedHolder& matrix) { e->set_packed(name, matrix); })
      .def("set_vector", [](const EnginePtr& e, const std::string& name, Address data,
                            int64_t n) { e->set_vector(name, at<const float>(data), n); })
      .def("finish", [](const EnginePtr& e) { e->finish(); })
      .def("forward",
           [](const EnginePtr& e, const py::kwargs& kw) {
             const auto input = from_keywords<EngineInput>(kw);
             const Unlocked unlocked;
             e->forward(input);
           })
      .def("forward_all",
           [](const EnginePtr& e, const std::vector<py::kwargs>& all) {
             std::vector<EngineInput> inputs;
             for (const py::kwargs& kw : all) inputs.push_back(from_keywords<EngineInput>(kw));
             const Unlocked unlocked;
             e->forward(inputs);
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
