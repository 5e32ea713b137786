// A stand-in for libcuda.so.1 on machines without a GPU. It holds each call to the rules of a real
// driver, as far as the launcher can break them, with the facts read from the real cubin; device
// memory is the process's own; and a launch that passes goes to a callback, which executes it.
// Functions that begin with fake_ are the tests' own.
#include "state.hpp"

#define API extern "C" __attribute__((visibility("default")))

// ---- The tests' side ----------------------------------------------------------------------------

API void fake_reset(const int* archs, int count) {
  const Lock lock(mutex);
  devices.assign(archs, archs + count);
  for (auto& context : contexts) context.release();  // handles of an earlier test stay readable
  contexts.clear();
  for (auto& stream : streams) stream->capturing = false;
  journal.clear(), reason.clear(), wanted_call.clear();
  initialized = false;
  pause_before_launch = 0;
  stack.clear();
}
API void fake_execute(int (*callback)(const Launch*)) { execute = callback; }
API void fake_explain(const char* why) { reason = why; }
API void fake_fail(const char* call, int status) { wanted_call = call, wanted_status = status; }
API void fake_pause(int microseconds) { pause_before_launch = microseconds; }
API int fake_readable(const void* address) {
  char byte;
  return copy(&byte, address, 1);
}
API const char* fake_journal() { return journal.c_str(); }

// ---- Devices and contexts -----------------------------------------------------------------------

API int cuInit(unsigned) {
  BEGIN();
  initialized = true;
  while (contexts.size() < devices.size()) {
    const int i = static_cast<int>(contexts.size());
    contexts.push_back(std::make_unique<Context>(Context{i, devices[i]}));
  }
  return kSuccess;
}
API int cuDeviceGetCount(int* count) {
  BEGIN();
  *count = static_cast<int>(devices.size());
  return kSuccess;
}
API int cuDeviceGet(int* device, int ordinal) {
  BEGIN();
  if (ordinal < 0 || ordinal >= static_cast<int>(devices.size()))
    return fail(kInvalidDevice, text("device %d of %zu", ordinal, devices.size()));
  *device = ordinal;
  return kSuccess;
}
API int cuDeviceGetName(char* name, int length, int device) {
  BEGIN();
  std::snprintf(name, length, "Stand-in %d", devices[device]);
  return kSuccess;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN();
  const int arch = devices[device];
  if (attribute == 75)
    *value = arch / 10;
  else if (attribute == 76)
    *value = arch % 10;
  else if (attribute == 97)
    *value = shared_limit(arch);
  else
    return fail(kInvalidValue, text("device attribute %d", attribute));
  return kSuccess;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN();
  *context = contexts[device].get();
  return kSuccess;
}
API int cuCtxGetCurrent(void** context) {
  BEGIN();
  *context = current();
  return kSuccess;
}
API int cuCtxPushCurrent_v2(void* context) {
  BEGIN();
  for (const auto& c : contexts)
    if (c.get() == context) {
      stack.push_back(c.get());
      return kSuccess;
    }
  return fail(kInvalidContext, "no such context");
}
API int cuCtxPopCurrent_v2(void** context) {
  BEGIN();
  if (stack.empty()) return fail(kInvalidContext, "no context to pop");
  *context = stack.back();
  stack.pop_back();
  return kSuccess;
}
API int cuCtxSynchronize() {
  BEGIN(Capture::unsafe);
  return kSuccess;
}
API int cuGetErrorString(int status, const char** string) {
  static thread_local std::string kept;
  kept = "stand-in error " + std::to_string(status) + (reason.empty() ? "" : ": " + reason);
  *string = kept.c_str();
  return kSuccess;
}

// ---- Modules and functions ----------------------------------------------------------------------

API int cuModuleLoadData(void** module, const void* image) {
  BEGIN(Capture::unsafe);
  if (!current()) return fail(kInvalidContext, "cuModuleLoadData without a current context");
  auto m = std::make_unique<Module>();
  const auto* const bytes = static_cast<const uint8_t*>(image);
  const std::string wrong = cubin::parse(bytes, m->image);
  if (!wrong.empty()) return fail(kInvalidImage, wrong);
  const int binary = m->image.arch, device = current()->arch;
  if (m->image.exact ? binary != device : binary / 10 != device / 10 || binary > device)
    return fail(kNoBinaryForGpu, text("binary for sm_%d on a device of sm_%d", binary, device));
  m->context = current();
  m->bytes.assign(bytes, bytes + m->image.size);
  *module = m.get();
  note(text("loaded sm_%d on device %d", binary, m->context->device));
  modules.push_back(std::move(m));
  return kSuccess;
}
API int cuModuleUnload(void* module) {
  BEGIN(Capture::unsafe);
  static_cast<Module*>(module)->alive = false;
  return kSuccess;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  BEGIN();
  auto* const m = static_cast<Module*>(module);
  const auto found = m->image.functions.find(name);
  if (!m->alive || found == m->image.functions.end())
    return fail(kNotFound, std::string("no kernel ") + name);
  functions.push_back(std::make_unique<Function>(Function{m, &found->second}));
  *function = functions.back().get();
  return kSuccess;
}
API int cuFuncGetAttribute(int* value, int attribute, void* function) {
  BEGIN();
  const cubin::Function& facts = *static_cast<Function*>(function)->facts;
  if (attribute != 0) return fail(kInvalidValue, text("function attribute %d", attribute));
  const int fit = 65536 / std::max(8, (facts.registers + 7) / 8 * 8) / 32 * 32;
  *value = facts.threads ? facts.threads : std::min(1024, fit);
  return kSuccess;
}
API int cuFuncSetAttribute(void* function, int attribute, int value) {
  BEGIN();
  auto* const f = static_cast<Function*>(function);
  const int limit = shared_limit(f->module->context->arch);
  if (attribute != 8 || value < 0 || value > limit)
    return fail(kInvalidValue,
                text("function attribute %d = %d, at most %d", attribute, value, limit));
  f->dynamic_limit = value;
  note(text("opted in to %d", value));
  return kSuccess;
}
API int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  BEGIN();
  const auto& parameters = static_cast<Function*>(function)->facts->parameters;
  if (index >= parameters.size()) return fail(kInvalidValue, text("no parameter %zu", index));
  *offset = parameters[index].offset;
  *size = parameters[index].size;
  return kSuccess;
}

// ---- Launches, streams and graphs ---------------------------------------------------------------

API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                       unsigned by, unsigned bz, unsigned shared, void* stream, void** parameters,
                       void** extra) {
  if (pause_before_launch) usleep(pause_before_launch);  // time for other threads to interfere
  Node node{static_cast<Function*>(function), {gx, gy, gz}, bx, shared, {}};
  {
    BEGIN();
    if (by != 1 || bz != 1 || extra) return fail(kInvalidValue, "blocks of one dimension only");
    if (const int status = make_node(node, parameters)) return status;
    Stream* const s = stream ? known(stream) : nullptr;
    if (stream && (!s || !s->alive)) return fail(kInvalidHandle, "no such stream");
    if (s && s->context != current()) return fail(kInvalidHandle, "a stream of another device");
    for (const auto& other : streams)
      if (!s && other->capturing) {
        other->invalidated = true;
        return fail(kCaptureImplicit, "launch on the default stream while another is captured");
      }
    note(text("launch %s (%u, %u, %u) x %u, %u bytes, stream %d",
              node.function->facts->name.c_str(), gx, gy, gz, bx, shared, s != nullptr));
    if (s && s->capturing) {
      s->nodes.push_back(std::move(node));
      return kSuccess;
    }
  }
  return run(node);  // without the lock: it may call Python, which may wait for another thread
}
API int cuStreamCreate(void** stream, unsigned) {
  BEGIN(Capture::unsafe);
  if (!current()) return fail(kInvalidContext, "cuStreamCreate without a current context");
  streams.push_back(std::make_unique<Stream>(Stream{current(), {}}));
  *stream = streams.back().get();
  return kSuccess;
}
API int cuStreamDestroy_v2(void* stream) {
  BEGIN();
  static_cast<Stream*>(stream)->alive = false;
  return kSuccess;
}
API int cuStreamBeginCapture_v2(void* stream, int) {
  BEGIN();
  Stream* const s = known(stream);
  if (!s || s->capturing) return fail(kCaptureUnsupported, "this stream cannot be captured");
  s->capturing = true, s->invalidated = false;
  s->nodes.clear();
  return kSuccess;
}
API int cuStreamIsCapturing(void* stream, int* status) {
  BEGIN();
  const Stream* const s = stream ? known(stream) : nullptr;
  if (stream && (!s || !s->alive)) return fail(kInvalidHandle, "no such stream");
  *status = s && s->capturing;
  return kSuccess;
}
API int cuStreamEndCapture(void* stream, void** graph) {
  BEGIN();
  Stream* const s = known(stream);
  if (!s || !s->capturing) return fail(kInvalidValue, "this stream is not being captured");
  s->capturing = false;
  if (s->invalidated) return fail(kCaptureInvalidated, "the capture had failed before");
  graphs.push_back(std::make_unique<Graph>(Graph{s->context, std::move(s->nodes)}));
  *graph = graphs.back().get();
  return kSuccess;
}

// ---- Graphs -------------------------------------------------------------------------------------

API int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN();
  if (*mode < 0 || *mode > kRelaxed) return fail(kInvalidValue, text("capture mode %d", *mode));
  std::swap(*mode, capture_mode);
  return kSuccess;
}
API int cuGraphCreate(void** graph, unsigned flags) {
  BEGIN();
  if (flags || !current()) return fail(kInvalidValue, "a graph without a context");
  graphs.push_back(std::make_unique<Graph>(Graph{current(), {}}));
  *graph = graphs.back().get();
  return kSuccess;
}
API int cuGraphAddKernelNode_v2(void** node, void* graph, void* const* after, size_t count,
                                const NodeParameters* wanted) {
  BEGIN();
  Graph* const g = known_graph(graph, false);
  if (!g) return fail(kInvalidHandle, "no such graph");
  if (wanted->extra || wanted->kernel || wanted->context || wanted->block[1] != 1 ||
      wanted->block[2] != 1)
    return fail(kInvalidValue, "a node of a function and its parameters, in blocks of one line");
  const unsigned* const grid = wanted->grid;
  Node made{static_cast<Function*>(wanted->function),
            {grid[0], grid[1], grid[2]},
            wanted->block[0],
            wanted->shared,
            {}};
  if (const int status = make_node(made, wanted->parameters)) return status;
  std::vector<size_t> earlier;
  for (size_t i = 0; i < count; ++i) {
    const Place& place = *static_cast<const Place*>(after[i]);
    if (place.graph != g) return fail(kInvalidValue, "waits for a node of another graph");
    earlier.push_back(place.index);
  }
  g->nodes.push_back(std::move(made));
  g->after.push_back(std::move(earlier));
  places.push_back(std::make_unique<Place>(Place{g, g->nodes.size() - 1}));
  *node = places.back().get();
  return kSuccess;
}
API int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  BEGIN(Capture::unsafe);
  Graph* const g = known_graph(graph, false);
  if (!g) return fail(kInvalidHandle, "no such graph");
  graphs.push_back(std::make_unique<Graph>(*g));
  graphs.back()->made_of = g;
  *executable = graphs.back().get();
  return kSuccess;
}
API int cuGraphExecKernelNodeSetParams_v2(void* executable, void* node,
                                          const NodeParameters* wanted) {
  BEGIN();
  Graph* const g = known_graph(executable, true);
  const Place& place = *static_cast<const Place*>(node);
  if (!g || !g->made_of->alive || place.graph != g->made_of)
    return fail(kInvalidHandle, "a node of no graph, or of another");
  Node changed = g->nodes[place.index];
  if (changed.function != wanted->function) return fail(kInvalidValue, "another function");
  std::copy(wanted->grid, wanted->grid + 3, changed.grid);
  changed.block = wanted->block[0], changed.shared = wanted->shared;
  if (const int status = make_node(changed, wanted->parameters)) return status;
  g->nodes[place.index] = std::move(changed);
  return kSuccess;
}
API int cuGraphExecDestroy(void* executable) {
  BEGIN(Capture::unsafe);
  Graph* const g = known_graph(executable, true);
  if (!g) return fail(kInvalidHandle, "no such executable graph");
  g->alive = false;
  return kSuccess;
}
API int cuGraphDestroy(void* graph) {
  BEGIN(Capture::unsafe);
  Graph* const g = known_graph(graph, false);
  if (!g) return fail(kInvalidHandle, "no such graph");
  g->alive = false;
  return kSuccess;
}
API int fake_graphs() {  // executable ones that were not destroyed
  const Lock lock(mutex);
  return static_cast<int>(std::count_if(graphs.begin(), graphs.end(),
                                        [](const auto& g) { return g->alive && g->made_of; }));
}
// Of the nodes that wait for nothing more the last one runs first: an order that was left out
// shows.
API int cuGraphLaunch(void* executable, void* stream) {
  Graph now{nullptr, {}};
  {
    BEGIN();
    const Graph* const g = known_graph(executable, true);
    if (!g) return fail(kInvalidHandle, "no such executable graph");
    if (current() != g->context) return fail(kInvalidContext, "a graph of another device");
    Stream* const s = stream ? known(stream) : nullptr;
    if (stream && (!s || !s->alive)) return fail(kInvalidHandle, "no such stream");
    if (s && s->capturing) {
      s->invalidated = true;
      return fail(kCaptureUnsupported, "a graph started on a stream that is captured");
    }
    now = *g;
  }
  now.after.resize(now.nodes.size());  // of a capture: its nodes are in order
  std::vector<char> done(now.nodes.size());
  for (size_t count = 0; count < done.size(); ++count) {
    size_t next = now.made_of->after.empty() ? count : done.size();
    for (size_t i = done.size(); next == done.size() && i-- > 0;)
      if (!done[i] && std::all_of(now.after[i].begin(), now.after[i].end(),
                                  [&](size_t earlier) { return done[earlier]; }))
        next = i;
    done[next] = true;
    if (const int status = run(now.nodes[next])) return status;
  }
  return kSuccess;
}
