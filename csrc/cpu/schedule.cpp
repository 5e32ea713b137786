#include "schedule.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace vitkern {

struct Schedule::Plan {
  std::vector<ImageGroup> alone, together;
  double time = 0;
};

namespace {

// A thread of a team does so much of what it does alone: it waits at barriers, and its part of a
// GEMM is small.
constexpr double kTeamRate = 0.9;
// Multiply-adds of attention take so much longer than a GEMM's.
constexpr double kAttention = 1.5;
// With so many images for each thread, the last ones to end are a small part of the time.
constexpr int64_t kMany = 8;

class Planner {
 public:
  Planner(const forward_args& a, int64_t group_rows) : a_(a), group_rows_(group_rows) {
    done_.push_back(0);
    for (int64_t i = 0; i < a.B; ++i) done_.push_back(done_.back() + multiply_adds(i));
  }

  // Equal images are shared out evenly, and the rest is computed together. Uneven ones are ordered
  // by length and taken one by one; those of which a thread alone would be at work when the others
  // have ended, the first (much longer than the others) or the last, are better computed together.
  Schedule::Plan best() const {
    const int64_t threads = a_.threads;
    if (threads == 1) return made(0, 0);
    if (tokens(0) == tokens(a_.B - 1)) return made(0, a_.B % threads);
    Schedule::Plan found = made(0, 0);
    int64_t first = 0;
    const auto consider = [&](int64_t head, int64_t tail) {
      Schedule::Plan other = made(head, tail);
      if (other.time >= found.time) return;
      found = std::move(other);
      first = head;
    };
    const int64_t most = std::min<int64_t>(threads - 1, a_.B);
    for (int64_t i = 1; i <= most && cost({i - 1, i}) * a_.threads > cost({i - 1, a_.B}); ++i)
      consider(i, 0);
    const int64_t head = first, rest = a_.B - head;
    for (int64_t i = 1; i <= std::min(most, rest) && rest < kMany * threads; ++i) consider(head, i);
    return found;
  }

 private:
  int64_t tokens(int64_t i) const { return a_.rows[i + 1] - a_.rows[i]; }
  int64_t rows(ImageGroup g) const { return a_.rows[g.end] - a_.rows[g.begin]; }
  double cost(ImageGroup g) const { return done_[g.end] - done_[g.begin]; }

  double multiply_adds(int64_t i) const {  // of a block
    const auto S = static_cast<double>(tokens(i)), D = static_cast<double>(a_.D);
    return S * D * (4 * D + 2 * static_cast<double>(a_.F) + kAttention * 2 * S);
  }

  // Where a group of these images ends that begins with the first and has about so many rows.
  ImageGroup filled(ImageGroup images, double wanted) const {
    ImageGroup group{images.begin, images.begin + 1};
    while (group.end < images.end &&
           static_cast<double>(rows(group)) + static_cast<double>(tokens(group.end)) / 2 <= wanted)
      ++group.end;
    return group;
  }

  // Groups of at least group_rows rows.
  std::vector<ImageGroup> cut(ImageGroup images) const {
    std::vector<ImageGroup> groups;
    while (images.begin < images.end) {
      ImageGroup group{images.begin, images.begin + 1};
      while (group.end < images.end && rows(group) < group_rows_) ++group.end;
      groups.push_back(group);
      images.begin = group.end;
    }
    return groups;
  }

  // As many groups as that, or a multiple of the threads, as even as images allow.
  std::vector<ImageGroup> shared_out(ImageGroup images) const {
    const auto least = static_cast<int64_t>(cut(images).size());
    int64_t left = (least + a_.threads - 1) / a_.threads * a_.threads;
    std::vector<ImageGroup> groups;
    for (; images.begin < images.end; left = std::max<int64_t>(left - 1, 1)) {
      const double even = static_cast<double>(rows(images)) / static_cast<double>(left);
      groups.push_back(filled(images, even));
      images.begin = groups.back().end;
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [&](ImageGroup a, ImageGroup b) { return cost(a) > cost(b); });
    return groups;
  }

  // When the last thread ends, if each takes the next group as soon as it is free.
  double time_alone(const std::vector<ImageGroup>& groups) const {
    std::priority_queue<double, std::vector<double>, std::greater<>> ends;
    double last = 0;
    for (int64_t i = 0; i < a_.threads; ++i) ends.push(0);
    for (const ImageGroup group : groups) {
      const double end = ends.top() + cost(group);
      ends.pop();
      ends.push(end);
      last = std::max(last, end);
    }
    return last;
  }

  // The first `head` and the last `tail` images are computed together.
  Schedule::Plan made(int64_t head, int64_t tail) const {
    const ImageGroup first{0, head}, middle{head, a_.B - tail}, last{a_.B - tail, a_.B};
    Schedule::Plan plan{shared_out(middle), cut(first)};
    for (const ImageGroup group : cut(last)) plan.together.push_back(group);
    plan.time = time_alone(plan.alone) + (cost(first) + cost(last)) / (a_.threads * kTeamRate);
    return plan;
  }

  const forward_args& a_;
  const int64_t group_rows_;
  std::vector<double> done_;  // multiply-adds of the images before each
};

}  // namespace

Schedule::Schedule(const forward_args& a, int64_t group_rows)
    : plan_(new Plan(Planner(a, group_rows).best())) {}

Schedule::~Schedule() { delete plan_; }

ImageGroups Schedule::alone() const {
  return {plan_->alone.data(), static_cast<int64_t>(plan_->alone.size())};
}

ImageGroups Schedule::together() const {
  return {plan_->together.data(), static_cast<int64_t>(plan_->together.size())};
}

double Schedule::time() const { return plan_->time; }

}  // namespace vitkern
