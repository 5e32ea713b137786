#include "graph.hpp"

#include <algorithm>
#include <utility>

namespace vitkern::cuda {
namespace {

// Lets this thread make and free graphs while a stream of the process is captured: they have
// nothing to do with that stream, but the driver would end the capture.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) {
    known_ = driver.table().capture_mode.function(&mode_) == 0;
  }
  ~Relaxed() {
    if (known_) driver_.table().capture_mode.function(&mode_);
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then the thread's own
  bool known_ = false;
};

}  // namespace

Graph::Graph(std::shared_ptr<LaunchList> list, const std::vector<int64_t>& slots)
    : list_(std::move(list)) {
  if (!list_ || list_->steps().empty() || !list_->frozen())
    throw std::invalid_argument("vitkern: a graph is made of launches, in a list that is closed");
  list_->check(slots);
  if (!list_->driver().has_graphs())
    throw DriverError("vitkern: graphs of launches are made on NVIDIA GPUs only");
  const Current current(list_->driver(), list_->device());
  const Relaxed relaxed(list_->driver());
  try {
    build(slots);
  } catch (...) {
    destroy();
    throw;
  }
}

Graph::~Graph() {
  const Relaxed relaxed(list_->driver());
  destroy();
}

void Graph::build(const std::vector<int64_t>& slots) {
  const Driver& driver = list_->driver();
  const Table& t = driver.table();
  constexpr std::string_view doing = "making a graph of launches";
  driver.must(doing, t.graph_create, &graph_, 0u);
  Handle previous = nullptr;
  for (const LaunchList::Step& step : list_->steps()) {
    Cells cells = step.cells(slots);
    Pointers pointers;
    const KernelNode wanted = step.kernel->node(step.grid, cells, pointers);
    Handle node = nullptr;
    driver.must(doing, t.graph_add, &node, graph_, static_cast<const Handle*>(&previous),
                size_t{previous ? 1u : 0u}, &wanted);
    if (!step.packed.slots.empty()) moved_.push_back({&step, node});
    previous = node;
  }
  driver.must(doing, t.graph_instantiate, &executable_, graph_, 0ull);
  slots_ = slots;
}

void Graph::run(Handle stream, const std::vector<int64_t>& slots) {
  list_->check(slots);
  const Driver& driver = list_->driver();
  const Table& t = driver.table();
  const Current current(driver, list_->device());
  int capturing = 0;
  if (t.is_capturing.function(stream, &capturing) != 0 || capturing)
    return list_->run(stream, slots);  // which says what is wrong, if something is
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slots != slots_) {
    const std::vector<int64_t> before = std::exchange(slots_, {});  // unknown if a call fails
    for (const Moved& moved : moved_) {
      const auto& places = moved.step->packed.slots;
      if (!before.empty() && std::all_of(places.begin(), places.end(), [&](const auto& place) {
            return slots[place.second.index] == before[place.second.index];
          }))
        continue;
      Cells cells = moved.step->cells(slots);
      Pointers pointers;
      const KernelNode wanted = moved.step->kernel->node(moved.step->grid, cells, pointers);
      driver.must("changing a graph's addresses", t.graph_set, executable_, moved.node, &wanted);
    }
    slots_ = slots;
  }
  driver.must("starting a graph of launches", t.graph_launch, executable_, stream);
}

// The driver frees what is still running when it has run. Nothing can be done about an error.
void Graph::destroy() noexcept {
  const Table& t = list_->driver().table();
  if (executable_) t.graph_free_executable.function(executable_);
  if (graph_) t.graph_free.function(graph_);
  executable_ = graph_ = nullptr;
}

}  // namespace vitkern::cuda
