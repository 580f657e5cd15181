// Where each lane's share of the cost axis ends: at a unit's edge where that is near enough, else inside a unit.
#pragma once
#include <algorithm>
#include <vector>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

// A place on the axis: the start of a unit, or a token inside it.
struct Cut {
  i32 request = 0;
  i32 unit = 0;    // within the request: KV head * row tiles + row tile (teams: the row tile)
  i32 token = -1;  // first token after the cut; -1: the unit's start

  bool inside() const { return token >= 0; }
  bool same_unit(const Cut& other) const { return request == other.request && unit == other.unit; }
};

struct Partition {
  std::vector<Cut> ends;  // lane l walks from ends[l - 1] (the first one from the start) to ends[l]
  double total = 0.0;     // of all CTAs, ns
  double max = 0.0;       // of the costliest CTA
  double mean = 0.0;      // over the CTAs that were to be filled
  i32 inside = 0;         // cuts inside a unit
};

class Partitioner {
 public:
  Partitioner(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 copies,
              i64 units_on_axis, const std::vector<Lane>& lanes)
      : model_(model),
        requests_(requests),
        batch_(batch),
        copies_(copies),
        lanes_(lanes),
        cuttable_(schedule.fixed_piece_tokens >= 0),
        step_(schedule.fixed() ? schedule.fixed_piece_tokens : max_of(schedule.tile_kv, 1)),
        min_piece_(schedule.fixed() ? 1 : max_of(schedule.min_piece_tokens, 1)),
        max_pieces_(schedule.fixed() ? 0 : schedule.max_pieces),
        ns_per_piece_(schedule.fixed() ? 0.0 : schedule.ns_per_piece),
        total_(requests[batch].cost),
        mean_unit_(units_on_axis > 0 ? total_ / static_cast<double>(units_on_axis) : 0.0) {
    for (const Lane& lane : lanes) {
      shares_ += lane.share;
      widest_ = max_of(widest_, lane.share);
    }
  }

  // Pieces cost something, and how many there will be is known only afterwards: guess, cut, and correct the guess.
  void run(Partition& best) const {
    static thread_local Partition trial;
    double inside_share = first_guess();
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
      Partition& target = attempt == 0 ? best : trial;
      cut_all(inside_share, target);
      if (attempt > 0 && trial.max < best.max) std::swap(best, trial);
      if (best.max <= best.mean * (1.0 + snap_tolerance)) return;
      const double found = target.inside / max_of(1.0, static_cast<double>(lanes_.size()) - 1.0);
      if (found == inside_share) return;
      inside_share = found;
    }
  }

 private:
  static constexpr int max_attempts = 4;
  // A unit's edge within this of the lane's share is taken instead of a cut; 3% are promised.
  static constexpr double snap_tolerance = 0.02;
  // What all later lanes together may be asked to take over because a lane stopped at an edge before its share.
  static constexpr double drift_tolerance = 0.01;

  // A lane while it is being filled; costs are on the axis, without what starting inside a unit costs extra.
  struct Filling {
    Cut begin;
    double at;        // of begin
    double overhead;  // of starting inside a unit
    double target;    // what to take, beyond `at`
    double most;      // what may be taken
    double mean;      // per share
    double shares_after, left_after;  // shares and cost of the later lanes if exactly `target` is taken
    bool may_stay_empty;
  };

  struct Choice {
    Cut cut;
    double cost;  // beyond Filling::at
  };

  double first_guess() const {
    const double mean = total_ / shares_;
    if (!cuttable_ || mean_unit_ < 2.0 * min_piece_ * model_.ns_per_token) return 0.0;
    return max_of(0.0, 1.0 - 2.0 * snap_tolerance * mean / mean_unit_);
  }

  void cut_all(double inside_share, Partition& partition) const {
    const double expected = inside_share * ns_per_piece_;  // at each lane's end
    const i32 num_lanes = static_cast<i32>(lanes_.size());
    partition.ends.resize(lanes_.size());
    partition.max = 0.0;
    partition.inside = 0;
    Filling lane{};
    lane.mean = (total_ + expected * (num_lanes - 1)) / shares_;
    double shares = shares_;
    for (i32 l = 0; l < num_lanes; ++l) {
      const double share = lanes_[l].share;
      const double left = total_ - lane.at;
      lane.overhead = lane.begin.inside() ? ns_per_piece_ : 0.0;
      lane.target = (left + lane.overhead + expected * (num_lanes - 1 - l)) / shares * share - lane.overhead;
      lane.most = lane.mean * share * (1.0 + snap_tolerance) - lane.overhead;
      lane.shares_after = shares - share;
      lane.left_after = left - lane.target + expected * (num_lanes - 1 - l);
      lane.may_stay_empty = share < widest_;
      Choice choice{{batch_, 0, -1}, left};
      if (l + 1 < num_lanes && lane.target < left && left > 0.0) choice = end_of(lane);
      const double load = choice.cost > 0.0 ? choice.cost + lane.overhead : 0.0;
      partition.max = max_of(partition.max, load / share);
      partition.inside += choice.cut.inside();
      partition.ends[l] = choice.cut;
      lane.begin = choice.cut;
      lane.at += choice.cost;
      shares -= share;
    }
    partition.total = total_ + partition.inside * ns_per_piece_;
    partition.mean = partition.total / shares_;
  }

  Choice end_of(const Filling& lane) const {
    const double goal = lane.at + lane.target;
    const i32 index = request_at(lane.begin.request, goal);
    const Request& request = requests_[index];
    if (request.tiles == 0) return {{index, 0, -1}, request.cost - lane.at};

    // The unit that holds the goal: its place on the axis and its tokens.
    const TileCosts costs(model_, request);
    const double one_copy = (requests_[index + 1].cost - request.cost) / copies_;
    const double in_request = goal - request.cost;
    const i32 copy = one_copy > 0.0 ? min_of(copies_ - 1, static_cast<i32>(in_request / one_copy)) : 0;
    const i32 tile = costs.tile_at(in_request - copy * one_copy);
    const double base = request.cost + copy * one_copy;
    const double unit_begin = base + costs.prefix(tile), unit_end = base + costs.prefix(tile + 1);
    const Cut before{index, copy * request.tiles + tile, -1};
    const Cut after = before.unit + 1 < copies_ * request.tiles ? Cut{index, before.unit + 1, -1} : Cut{index + 1, 0, -1};
    const bool has_before = !before.same_unit(lane.begin) && unit_begin > lane.at;
    return choose(lane, has_before, {before, unit_begin - lane.at}, {after, unit_end - lane.at}, tile);
  }

  Choice choose(const Filling& lane, bool has_before, const Choice& before, const Choice& after, i32 tile) const {
    const double over = after.cost - lane.target, under = lane.target - before.cost;
    const bool after_fits = after.cost <= lane.most || after.cost + lane.overhead <= cheapest_piece();
    const bool before_fits =
        has_before && lane.left_after + under <= lane.mean * (1.0 + drift_tolerance) * lane.shares_after;
    if (after_fits && (!before_fits || over <= under)) return after;
    if (before_fits) return before;

    Choice best = has_before && under < over ? before : after;
    const Choice inside = cut_inside(lane, before, tile);
    if (inside.cut.inside() && distance(inside, lane) < distance(best, lane)) best = inside;
    if (lane.may_stay_empty && best.cost > lane.most) {
      return has_before ? before : Choice{lane.begin, 0.0};
    }
    return best;
  }

  static double distance(const Choice& choice, const Filling& lane) {
    return choice.cost > lane.target ? choice.cost - lane.target : lane.target - choice.cost;
  }

  // The cut nearest to the lane's target that leaves no piece too short; without a token where there is none.
  Choice cut_inside(const Filling& lane, const Choice& unit, i32 tile) const {
    Choice none{{unit.cut.request, unit.cut.unit, -1}, 0.0};
    if (!cuttable_) return none;
    const TokenRange range = model_.visible(requests_[unit.cut.request], tile);
    const bool resumed = lane.begin.inside() && lane.begin.same_unit(unit.cut);
    const i64 piece_begin = resumed ? lane.begin.token : range.begin;
    const i64 shortest = max_pieces_ > 0 ? max_of(min_piece_, ceil_div(range.size(), max_pieces_)) : min_piece_;
    const i64 first = round_up<i64>(piece_begin + shortest, step_);
    const i64 last = (range.end - shortest) / step_ * step_;
    if (first > last) return none;

    // No CTA that gets a piece can be cheaper than the cheapest piece: this one may take as much.
    const double goal = max_of(lane.target, cheapest_piece() - lane.overhead);
    const double token_0 = unit.cost + model_.ns_per_unit - range.begin * model_.ns_per_token;  // beyond lane.at
    const double wanted = model_.ns_per_token > 0.0 ? (goal - token_0) / model_.ns_per_token : 0.0;
    const i64 nearest = static_cast<i64>(max_of(wanted, 0.0) / step_ + 0.5) * step_;
    const i64 token = max_of(first, min_of(last, nearest));
    return {{unit.cut.request, unit.cut.unit, static_cast<i32>(token)}, token_0 + token * model_.ns_per_token};
  }

  double cheapest_piece() const { return ns_per_piece_ + min_piece_ * model_.ns_per_token; }

  // The last request from `from` on that begins at or before `cost`.
  i32 request_at(i32 from, double cost) const {
    i32 low = from, step = 1;
    while (low + step <= batch_ && requests_[low + step].cost <= cost) {
      low += step;
      step *= 2;
    }
    i32 high = min_of(low + step, batch_);  // requests_[batch_].cost is the total, which is above the goal
    while (high - low > 1) {
      const i32 middle = low + (high - low) / 2;
      (requests_[middle].cost <= cost ? low : high) = middle;
    }
    return low;
  }

  const CostModel& model_;
  const Request* requests_;
  i32 batch_;
  i32 copies_;
  const std::vector<Lane>& lanes_;
  bool cuttable_;
  i32 step_;       // tokens
  i32 min_piece_;  // tokens
  i32 max_pieces_;
  double ns_per_piece_;
  double total_;
  double mean_unit_;
  double shares_ = 0.0;
  double widest_ = 0.0;
};

}  // namespace flashpage::plan
