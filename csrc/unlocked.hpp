// The interpreter's lock, released while C++ computes.
#pragma once
#include <Python.h>

#include <chrono>
#include <thread>

namespace vitkern {

// As pybind11's gil_scoped_release, but for daemon threads: while the interpreter exits, Python
// ends a thread that asks for the lock by unwinding its stack, and from a destructor that aborts
// the process. Such a thread sleeps here instead, until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace vitkern
