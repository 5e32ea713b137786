// How long the steps of the engine's forwards take: a profile that is off unless somebody asks.
//
// Every thread says when it begins a group of images and when it is done with a step of it; the
// time since it spoke last is the step's, waiting for the others included. While the profile is off
// that is one load of a flag for each step, a handful of them for a block.
#pragma once
#include <array>

namespace vitkern {

enum class Step { embed, qkv, attention, proj, mlp, head };
constexpr int kSteps = 6;
constexpr const char* kStepNames[kSteps] = {"embed", "qkv", "attention", "proj", "mlp", "head"};

void steps_begin();    // by a thread, before its first step
void step_done(Step);  // by a thread: what it did since it spoke last

// Turns the profile on (from zero) or off, and returns the seconds of each step, summed over
// threads, since it was turned on.
std::array<double, kSteps> profile_steps(bool on);

}  // namespace vitkern
