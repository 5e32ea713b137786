#include "schedule.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace vitkern {

struct Schedule::Plan {
  struct Step {
    std::vector<ImageGroup> groups;
    int team_size;
  };
  std::vector<Step> steps;
  std::vector<Stage> stages;  // views of the steps
  double time = 0;

  void append(Plan after) {
    for (Step& step : after.steps) steps.push_back(std::move(step));
    time += after.time;
  }
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
  Planner(const forward_args& a, int threads, int64_t group_rows)
      : a_(a), threads_(threads), group_rows_(group_rows) {
    done_.push_back(0);
    for (int64_t i = 0; i < a.B; ++i) done_.push_back(done_.back() + multiply_adds(i));
  }

  // Equal images are shared out evenly, and the rest is computed by teams. Uneven ones are ordered
  // by length and taken one by one; those of which a thread alone would be at work when the others
  // have ended, the first (much longer than the others) or the last, are better left to teams.
  Schedule::Plan best() const {
    if (threads_ == 1) return made(0, 0);
    if (tokens(0) == tokens(a_.B - 1)) return made(0, a_.B % threads_);
    Schedule::Plan found = made(0, 0);
    int64_t first = 0;
    const auto consider = [&](int64_t head, int64_t tail) {
      Schedule::Plan other = made(head, tail);
      if (other.time >= found.time) return;
      found = std::move(other);
      first = head;
    };
    const int64_t most = std::min<int64_t>(threads_ - 1, a_.B);
    for (int64_t i = 1; i <= most && cost({i - 1, i}) * threads_ > cost({i - 1, a_.B}); ++i)
      consider(i, 0);
    const int64_t head = first, rest = a_.B - head;
    for (int64_t i = 1; i <= std::min(most, rest) && rest < kMany * threads_; ++i)
      consider(head, i);
    return found;
  }

 private:
  int64_t tokens(int64_t i) const { return a_.rows[i + 1] - a_.rows[i]; }
  int64_t rows(ImageGroup g) const { return a_.rows[g.end] - a_.rows[g.begin]; }
  double cost(ImageGroup g) const { return done_[g.end] - done_[g.begin]; }

  double multiply_adds(int64_t i) const {  // of a block
    const auto S = static_cast<double>(tokens(i)), D = static_cast<double>(a_.D);
    return S * D * (4 * D + (a_.gated ? 3 : 2) * static_cast<double>(a_.F) + kAttention * 2 * S);
  }

  // Where a group of these images ends that begins with the first and has about so many rows.
  ImageGroup filled(ImageGroup images, double wanted) const {
    ImageGroup group{images.begin, images.begin + 1};
    while (group.end < images.end &&
           static_cast<double>(rows(group)) + static_cast<double>(tokens(group.end)) / 2 <= wanted)
      ++group.end;
    return group;
  }

  // How many groups of at least so many rows these images make.
  int64_t groups_of(ImageGroup images, int64_t least) const {
    int64_t count = 0, in_group = 0;
    for (int64_t i = images.begin; i < images.end; ++i) {
      if (in_group == 0) ++count;
      in_group += tokens(i);
      if (in_group >= least) in_group = 0;
    }
    return count;
  }

  // Groups for so many teams: as even as images allow, the same number for each team.
  std::vector<ImageGroup> shared_out(ImageGroup images, int64_t teams) const {
    const int64_t least = groups_of(images, group_rows_ * (threads_ / teams));
    int64_t left = (least + teams - 1) / teams * teams;
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

  // When the last of the threads ends, if each takes the next group as soon as it is free.
  double time_of_threads(const std::vector<ImageGroup>& groups) const {
    std::priority_queue<double, std::vector<double>, std::greater<>> ends;
    double last = 0;
    for (int i = 0; i < threads_; ++i) ends.push(0);
    for (const ImageGroup group : groups) {
      const double end = ends.top() + cost(group);
      ends.pop();
      ends.push(end);
      last = std::max(last, end);
    }
    return last;
  }

  // When the last of some teams ends, which take turns.
  double time_of_teams(const std::vector<ImageGroup>& groups, int64_t teams) const {
    std::vector<double> ends(static_cast<size_t>(teams));
    for (size_t i = 0; i < groups.size(); ++i)
      ends[i % ends.size()] +=
          cost(groups[i]) / (static_cast<double>(threads_ / teams) * kTeamRate);
    return *std::max_element(ends.begin(), ends.end());
  }

  Schedule::Plan alone(ImageGroup images) const {
    Schedule::Plan plan;
    if (images.begin == images.end) return plan;
    plan.steps.push_back({shared_out(images, threads_), 1});
    plan.time = time_of_threads(plan.steps[0].groups);
    return plan;
  }

  // Fewer images than threads by teams of several: of the numbers of teams that leave no thread
  // without work, the one that ends first. Images that do not divide by it go to larger teams.
  Schedule::Plan by_teams(ImageGroup images) const {
    Schedule::Plan best;
    const int64_t count = images.end - images.begin;
    for (int64_t teams = std::min<int64_t>(count, threads_ / 2); teams > 0; --teams) {
      if (threads_ % teams != 0) continue;
      const int64_t end = images.end - count % teams;
      Schedule::Plan plan;
      plan.steps.push_back(
          {shared_out({images.begin, end}, teams), static_cast<int>(threads_ / teams)});
      plan.time = time_of_teams(plan.steps[0].groups, teams);
      plan.append(by_teams({end, images.end}));
      if (best.steps.empty() || plan.time < best.time) best = std::move(plan);
    }
    return best;
  }

  // The first `head` and the last `tail` images are computed by teams.
  Schedule::Plan made(int64_t head, int64_t tail) const {
    Schedule::Plan plan = alone({head, a_.B - tail});
    plan.append(by_teams({0, head}));
    plan.append(by_teams({a_.B - tail, a_.B}));
    return plan;
  }

  const forward_args& a_;
  const int64_t threads_, group_rows_;
  std::vector<double> done_;  // multiply-adds of the images before each
};

Schedule::Plan* planned(const forward_args& a, int threads, int64_t group_rows) {
  auto* const plan = new Schedule::Plan(Planner(a, threads, group_rows).best());
  for (const auto& [groups, team_size] : plan->steps)
    plan->stages.push_back({groups.data(), static_cast<int64_t>(groups.size()), team_size});
  return plan;
}

}  // namespace

Schedule::Schedule(const forward_args& a, int threads, int64_t group_rows)
    : plan_(planned(a, threads, group_rows)) {}

Schedule::~Schedule() { delete plan_; }

Stages Schedule::stages() const {
  return {plan_->stages.data(), static_cast<int64_t>(plan_->stages.size())};
}

double Schedule::time() const { return plan_->time; }

}  // namespace vitkern
