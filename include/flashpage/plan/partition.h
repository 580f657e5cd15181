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
  i32 copy = 0;    // of the request on the axis: its KV head (teams: 0)
  i32 tile = 0;    // row tile
  i32 token = -1;  // first token after the cut; -1: the unit's start

  bool inside() const { return token >= 0; }
  bool same_unit(const Cut& other) const {
    return request == other.request && copy == other.copy && tile == other.tile;
  }
};

// The start of the unit after the one that `cut` is in.
inline Cut next_unit(const Cut& cut, i32 tiles, i32 copies) {
  if (cut.tile + 1 < tiles) return {cut.request, cut.copy, cut.tile + 1, -1};
  if (cut.copy + 1 < copies) return {cut.request, cut.copy + 1, 0, -1};
  return {cut.request + 1, 0, 0, -1};
}

struct Partition {
  std::vector<Cut> ends;  // lane l walks from ends[l - 1] (the first one from the start) to ends[l]
  double mean = 0.0;      // load of a CTA if all were alike, ns
  double max = 0.0;       // of the costliest CTA, ns
  i32 inside = 0;         // cuts inside a unit
};

// The costliest CTA ends at most 3% over the mean, or over it by no more than one stretch that cannot be divided (less
// than two shortest pieces and a step; times the KV heads that one CTA takes, where teams are not full) and the cost of
// a piece: below that, evening out would cost more than it gains.
class Partitioner {
 public:
  Partitioner(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 copies,
              i64 units_on_axis, const std::vector<Lane>& lanes)
      : model_(model),
        requests_(requests),
        batch_(batch),
        copies_(copies),
        per_copy_(1.0 / copies),
        lanes_(lanes),
        cuttable_(schedule.fixed_piece_tokens >= 0),
        step_(make_fast_div(schedule.fixed() ? schedule.fixed_piece_tokens : max_of(schedule.tile_kv, 1))),
        min_piece_(schedule.fixed() ? 1 : max_of(schedule.min_piece_tokens, 1)),
        max_pieces_(make_fast_div(schedule.fixed() || schedule.max_pieces == 0 ? 1 : schedule.max_pieces + 1)),
        ns_per_piece_(schedule.fixed() ? 0.0 : schedule.ns_per_piece),
        tokens_per_ns_(model.ns_per_token > 0.0 ? 1.0 / model.ns_per_token : 0.0),
        total_(requests[batch].cost),
        units_on_axis_(units_on_axis) {
    for (const Lane& lane : lanes) {
      shares_ += lane.share;
      fewest_heads_ = min_of(fewest_heads_, lane.heads);
    }
  }

  // Finds the lowest level (load of a CTA) at which the lanes, each filled up to it, take everything. What is lost at
  // the lanes' ends (a shortfall before an edge, or one more piece) is known only afterwards: guess, fill, and correct,
  // between the highest level known to be too low and the lowest known to be enough.
  void run(Partition& best) const {
    static thread_local Partition trial;
    const double loss = expected_loss();
    double too_low = 0.0, level = total_ / shares_ + loss, likely = infinite;
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
      Partition& filled = attempt == 0 ? best : trial;
      const Fill fill = fill_all(level, loss, filled);
      const double max = filled.max;
      if (attempt > 0 && max < best.max) std::swap(best, trial);
      const double mean = best.mean;
      if (best.max <= mean * (1.0 + good_enough)) return;
      if (fill.excess > 0.0) {
        too_low = max_of(too_low, level);
        likely = level + fill.excess / shares_;
        // A little beyond: one more level that is too low costs a filling.
        level = max_of(likely + 0.25 * (likely - level), fill.next_level);
        if (attempt > 1) level = 0.5 * (too_low + best.max);
      } else {
        if (max > level) return;  // a unit that cannot be cut: no lower level helps
        if (attempt == 0) likely = level + fill.excess / shares_;
        level = 0.5 * (too_low + max);
      }
      if (best.max <= too_low * (1.0 + good_enough)) return;
      const bool as_promised = best.max <= max_of(mean * (1.0 + promised), mean + ns_per_piece_);
      if (as_promised && best.max <= likely * (1.0 + 2.0 * good_enough)) return;
    }
  }

 private:
  static constexpr int max_attempts = 6;
  static constexpr double good_enough = 0.01;  // over the mean, or over a level that is too low
  static constexpr double promised = 0.03;     // over the mean
  static constexpr double tolerance = 0.005;   // of a load: no unit is cut for less
  static constexpr double infinite = 1e300;

  // A lane while it is being filled; costs are on the axis, without what starting inside a unit costs extra.
  struct Filling {
    Cut begin;
    double at = 0.0;  // of begin
    double overhead;  // of starting inside a unit
    double room;      // what fits beyond `at`
    double floor;     // no CTA that gets a piece can be cheaper than the cheapest piece: this one may take as much
    bool may_stay_empty;
  };

  struct Fill {
    double excess;      // what did not fit at the level (below 0: what more would have); on the axis
    double next_level;  // below it, no lane would take more
  };

  struct Choice {
    Cut cut;
    double cost;  // beyond Filling::at
  };

  // The request that a lane ends in. Lanes mostly go on where the one before them ended, or in a request of the same
  // lengths.
  struct Place {
    i32 index = -1;
    i32 q_len = -1, kv_len = -1;
    double one_copy = 0.0, copies_per_ns = 0.0;
    TileCosts costs;
  };

  // Of a lane's end somewhere in a unit of mean cost: the distance to the edge before it, or a piece and half a step
  // where that is less.
  double expected_loss() const {
    const double unit = units_on_axis_ > 0 ? total_ / static_cast<double>(units_on_axis_) : 0.0;
    const double of_cut = ns_per_piece_ + 0.5 * step_.divisor * model_.ns_per_token;
    return !cuttable_ || of_cut >= unit ? 0.5 * unit : of_cut - 0.5 * of_cut * of_cut / unit;
  }

  // The level is raised for the lanes to come where what is left, with their expected losses, would overflow the last
  // one.
  Fill fill_all(double level, double loss, Partition& partition) const {
    const i32 num_lanes = static_cast<i32>(lanes_.size());
    partition.ends.resize(lanes_.size());
    partition.max = 0.0;
    partition.inside = 0;
    Filling lane;
    Place place;
    Fill fill{0.0, infinite};
    double shares = shares_;
    for (i32 l = 0; l < num_lanes; ++l) {
      const double share = lanes_[l].share, heads = lanes_[l].heads, left = total_ - lane.at;
      lane.overhead = lane.begin.inside() ? ns_per_piece_ : 0.0;
      const double needed = (left + lane.overhead + loss * (num_lanes - 1 - l)) * (1.0 / shares);
      const double raised = max_of(level, needed);
      lane.room = raised * share - lane.overhead;
      lane.floor = cheapest_piece() * share - lane.overhead;
      lane.may_stay_empty = lanes_[l].heads > fewest_heads_;
      Choice choice{{batch_, 0, 0, -1}, left};
      if (l + 1 < num_lanes && lane.room < left && left > 0.0) {
        double next_cost;
        choice = end_of(lane, place, next_cost);
        fill.next_level = min_of(fill.next_level, (next_cost + lane.overhead) * heads);
      }
      const double load = choice.cost > 0.0 ? (choice.cost + lane.overhead) * heads : 0.0;
      fill.excess += (l + 1 < num_lanes ? raised - level : load - level) * share;
      partition.max = max_of(partition.max, load);
      partition.inside += choice.cut.inside();
      partition.ends[l] = choice.cut;
      lane.begin = choice.cut;
      lane.at += choice.cost;
      shares -= share;
    }
    partition.mean = (total_ + partition.inside * ns_per_piece_) / shares_;
    return fill;
  }

  // Fills one lane: up to the unit that would overflow it, and into that unit where this places more than a piece
  // costs. `next_cost` is the least cost at which the lane would take more.
  [[gnu::always_inline]] Choice end_of(const Filling& lane, Place& place, double& next_cost) const {
    const double goal = lane.at + max_of(lane.room, 0.0);
    const i32 index = request_at(lane.begin.request, goal);
    const Request& request = requests_[index];
    next_cost = infinite;
    if (request.tiles == 0) return {{index, 0, 0, -1}, request.cost - lane.at};  // rounding, at the axis' very end
    if (index != place.index) move_to(index, place);
    const double in_request = goal - request.cost;
    i32 copy = min_of(copies_ - 1, static_cast<i32>(in_request * place.copies_per_ns)), from = 0;
    if (index == lane.begin.request && copy <= lane.begin.copy) {  // less: rounding put the goal before the beginning
      copy = lane.begin.copy;
      from = lane.begin.tile;
    }
    const TileCosts::Found found = place.costs.tile_at(in_request - copy * place.one_copy, from);
    const double copy_begin = request.cost + copy * place.one_copy - lane.at;

    const Choice before{{index, copy, found.tile, -1}, copy_begin + found.begin};
    const Choice after{next_unit(before.cut, request.tiles, copies_), copy_begin + found.end};
    const bool has_before = before.cost > 0.0 && !before.cut.same_unit(lane.begin);
    const Choice inside = cut_inside(lane, before);

    const double step = step_.divisor * model_.ns_per_token;
    next_cost = after.cost;
    if (has_before) {
      const double worth = before.cost + max_of(ns_per_piece_, tolerance * lane.room);
      if (!inside.cut.inside()) return before;
      next_cost = min_of(next_cost, max_of(inside.cost, worth) + step);
      return inside.cost > worth && inside.cost <= lane.room ? inside : before;
    }
    const bool whole = !inside.cut.inside() || after.cost <= lane.floor;
    const Choice forced = whole ? after : inside;
    if (lane.may_stay_empty && forced.cost > lane.room) return {lane.begin, 0.0};
    if (!whole) next_cost = min_of(next_cost, inside.cost + step);
    return forced;
  }

  void move_to(i32 index, Place& place) const {
    const Request& request = requests_[index];
    place.index = index;
    place.one_copy = (requests_[index + 1].cost - request.cost) * per_copy_;
    if (request.q_len == place.q_len && request.kv_len == place.kv_len) return;
    place.q_len = request.q_len;
    place.kv_len = request.kv_len;
    place.copies_per_ns = place.one_copy > 0.0 ? 1.0 / place.one_copy : 0.0;
    place.costs = TileCosts(model_, request);
  }

  // The last cut that the lane has room for and that leaves no piece too short; without a token where there is none.
  [[gnu::always_inline]] Choice cut_inside(const Filling& lane, const Choice& unit) const {
    Choice none{unit.cut, 0.0};
    if (!cuttable_) return none;
    const TokenRange range = model_.visible(requests_[unit.cut.request], unit.cut.tile);
    const bool resumed = lane.begin.inside() && lane.begin.same_unit(unit.cut);
    const i32 piece_begin = resumed ? lane.begin.token : range.begin, left = range.end - piece_begin;
    i32 shortest = min_piece_;
    if (max_pieces_.divisor > 1) shortest = max_of(shortest, static_cast<i32>(max_pieces_.div(range.size())) + 1);
    if (left / 2 < shortest) return none;
    const i32 first = down_to_step(piece_begin + shortest + step_.divisor - 1),
              last = down_to_step(range.end - shortest);
    if (first > last) return none;

    const double token_0 = unit.cost + model_.ns_per_unit - range.begin * model_.ns_per_token;  // beyond lane.at
    const double goal = max_of(lane.room, lane.floor);
    const double wanted = (goal - token_0) * tokens_per_ns_;
    i32 token = down_to_step(static_cast<i32>(min_of<double>(max_of(wanted, 0.0), last)));
    if (token < first) {
      // Shortest pieces all along: make them equal, so that the last one is not nearly twice as long.
      token = down_to_step(piece_begin + left / (left / shortest) + step_.divisor / 2);
    }
    token = max_of(first, min_of(last, token));
    none.cut.token = token;
    return {none.cut, token_0 + token * model_.ns_per_token};
  }

  i32 down_to_step(u32 token) const { return static_cast<i32>(step_.div(token) * step_.divisor); }

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
  double per_copy_;
  const std::vector<Lane>& lanes_;
  bool cuttable_;
  FastDiv step_;        // tokens
  i32 min_piece_;       // tokens
  FastDiv max_pieces_;  // and one; 1: no limit
  double ns_per_piece_;
  double tokens_per_ns_;
  double total_;
  i64 units_on_axis_;
  double shares_ = 0.0;
  i32 fewest_heads_ = 0x7fffffff;
};

}  // namespace flashpage::plan
