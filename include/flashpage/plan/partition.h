// Division in waves: each lane's segment of the axis ends at a unit's edge if one is near enough, otherwise inside a
// unit.
#pragma once
#include "flashpage/plan/cost.h"
#include "flashpage/plan/filling.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

// Where the last wave begins, and the loads of the waves before it.
struct Start {
  Cut cut;
  double at = 0.0;                // position of `cut` on the axis
  const double* loads = nullptr;  // [lanes], ns of each CTA; null: no earlier waves
};

// `Searcher` finds requests and row tiles: OneSearcher (one_searcher.h) or WarpSearcher (threads.h). request_at: the
// last request, `from` or later, that begins on the axis at or before `cost`.
//
// Guarantee: the costliest CTA ends at most 3% above the mean, or above it by at most the cost of a piece and of one
// range that cannot be divided (less than two shortest pieces and a step, times the KV heads of a CTA in small lanes).
// Below that, evening out costs more than it gains.
template <class Searcher>
class Partitioner {
 public:
  FP_HOST_DEVICE Partitioner(const CostModel& model, const CutRules& rules, const Division& division,
                             const Searcher& searcher)
      : searcher_(searcher),
        model_(model),
        rules_(rules),
        requests_(division.requests),
        batch_(division.batch),
        heads_(division.axis.heads),
        waves_(division.axis.waves),
        per_head_(division.axis.heads == 1 ? 1.0 : 1.0 / division.axis.heads),
        per_weight_(1.0 / division.lanes.weight),
        lane_(division.lane),
        lanes_(division.lanes),
        total_(division.requests[division.batch].cost),
        units_on_axis_(division.units_on_axis) {}

  // Fills all waves but the last with whole units, up to each lane's share of all waves so far. The last wave evens out
  // the remainder. `segments`: [lanes.count][waves], `loads`: [lanes.count].
  FP_HOST_DEVICE Start early_waves(Segment* segments, double* loads) const {
    if (waves_ == 1) return {};
    Cut cut;
    double at = 0.0;
    Place place;
    for (i32 wave = 1; wave < waves_; ++wave) {
      const double level = product(total_, per_weight_) * wave / waves_;
      for (i32 l = 0; l < lanes_.count; ++l) {
        const double done = wave == 1 ? 0.0 : loads[l], room = level - done;
        Choice whole{cut, 0.0};
        if (room > 0.0) whole = unit_at(cut, at, at + room, place).before;
        const Cut begin = cut;
        if (whole.cost > 0.0) {
          cut = whole.cut;
          at += whole.cost;
        }
        if (searcher_.writes()) {
          segments[l * waves_ + wave - 1] = {begin, cut};
          loads[l] = done + max_of(whole.cost, 0.0);
        }
      }
      searcher_.meet();
    }
    return {cut, at, loads};
  }

  // One more wave of whole units, from `start` to the unit edge `end` at `end_at`. Each full lane gets its share of
  // what is left, to the nearer edge.
  void whole_wave(const Start& start, const Cut& end, double end_at, Cut* ends, double* loads) const {
    Cut cut = start.cut;
    double at = start.at, done_by_rest = start.at;
    Place place;
    for (i32 l = 0; l < lanes_.count; ++l) {
      const double done = start.loads != nullptr ? start.loads[l] : 0.0, left = end_at - at;
      const double room = min_of(left, (left + done_by_rest) / (lanes_.count - l) - done);
      Choice choice{cut, 0.0};
      if (l + 1 == lanes_.count) {
        choice = {end, left};
      } else if (room > 0.0) {
        const UnitEdges unit = unit_at(cut, at, at + room, place);
        choice = unit.after.cost - room < room - unit.before.cost ? unit.after : unit.before;
      }
      ends[l] = cut = choice.cut;
      loads[l] = done + choice.cost;
      at += choice.cost;
      done_by_rest -= done;
    }
  }

  // Finds the lowest level (load of a CTA) at which the lanes, filled up to it one by one, take everything. The loss at
  // the ends of lanes (a shortfall before an edge, or one more piece) is known only afterwards. So the level is
  // guessed, the lanes are filled, and the guess is corrected, between the highest level known to be too low and the
  // lowest known to be enough.
  //
  // `ends` and `other_ends`: [lanes.count] each; the result uses one of them.
  FP_HOST_DEVICE Partition last_wave(const Start& start, Cut* ends, Cut* other_ends) const {
    Partition best{ends, start.cut}, trial{other_ends, start.cut};
    const double loss = expected_loss();
    double too_low = product(total_, per_weight_), level = too_low + loss, likely = infinite;
    for (int attempt = 0; attempt < max_attempts; ++attempt) {
      level = whole_ticks(level);
      const FillResult fill = fill_all(start, level, loss, trial);
      const double max = trial.max;
      if (attempt == 0 || max < best.max) {
        const Partition before = best;
        best = trial;
        trial = before;
      }
      const double mean = best.mean;
      if (best.max <= mean * (1.0 + good_enough)) break;
      if (fill.excess > 0.0) {
        too_low = max_of(too_low, level);
        likely = level + product(fill.excess, per_weight_);
        // A little beyond `likely`, because another level that is too low costs one more filling.
        level = max_of(likely + 0.25 * (likely - level), fill.next_level);
        if (attempt > 1) level = 0.5 * (too_low + best.max);
      } else {
        if (max > level) break;  // a unit that cannot be cut: no lower level helps
        if (attempt == 0) likely = level + product(fill.excess, per_weight_);
        level = 0.5 * (too_low + max);
      }
      // `too_low` bounds the lowest level, and after the first filling `likely` estimates it. The search stops if
      // little can be gained over either.
      if (best.max <= too_low + max_of(good_enough * too_low, small_gain(too_low))) break;
      if (attempt == 0 && best.max <= likely + small_gain(likely)) break;
      const bool as_promised = best.max <= max_of(mean * (1.0 + promised), mean + rules_.ns_per_piece);
      if (as_promised && best.max <= likely * (1.0 + 2.0 * good_enough)) break;
    }
    return best;
  }

 private:
  static constexpr int max_attempts = 8;
  static constexpr double good_enough = 0.01;  // above the mean, or above a level that is too low
  static constexpr double promised = 0.03;     // above the mean
  static constexpr double small_gain_share = 0.05, small_gain_in_pieces = 0.35;
  static constexpr double infinite = 1e300;

  FP_HOST_DEVICE double small_gain(double level) const {
    return min_of(small_gain_share * level, small_gain_in_pieces * rules_.ns_per_piece);
  }

  struct Choice {
    Cut cut;
    double cost;  // ns after OpenLane::at
  };

  // Cached numbers of the request in which a lane ends; consecutive lanes mostly end in requests of the same lengths.
  struct Place {
    i32 q_len = -1, kv_begin = 0, kv_len = -1;
    double one_head = 0.0, heads_per_ns = 0.0;
    typename Searcher::Costs costs;
  };

  // The expected loss of a lane that ends anywhere in a unit of mean cost: the distance to the edge before it, or a
  // piece and half a step if that is less. If each request is one unit, and units and lanes are at least 2 and 1.25
  // times as long as the shortest unit that may be cut, the loss by pieces that would be too short is added: a lane
  // ends at an edge if its own piece would be, and a shortest piece before an edge if the next lane's piece would be.
  FP_HOST_DEVICE double expected_loss() const {
    const double unit = units_on_axis_ > 0 ? total_ / static_cast<double>(units_on_axis_) : 0.0;
    const double of_cut = rules_.ns_per_piece + product(0.5 * rules_.step.divisor, model_.many_rows.ns);
    if (!rules_.cuttable || of_cut >= unit) return 0.5 * unit;
    const double loss = of_cut - 0.5 * of_cut * of_cut / unit;
    const double piece = product(rules_.min_piece, model_.many_rows.ns), begun = model_.ns_per_unit + piece;
    const double shortest = begun + piece;  // of a unit that may be cut
    const bool are_requests = units_on_axis_ == requests_[batch_].number;
    const bool are_long = unit >= 2.0 * shortest && product(total_, per_weight_) >= 1.25 * shortest;
    if (!are_requests || !are_long || begun <= of_cut) return loss;
    const double beyond = begun - of_cut;
    return loss + 0.5 * (product(beyond, beyond) + product(piece, piece)) / unit;
  }

  // Fills the lanes one by one. The level rises for the remaining lanes if what is left, with their expected losses,
  // would overflow the last one.
  FP_HOT FillResult fill_all(const Start& start, double level, double loss, Partition& partition) const {
    const i32 num_lanes = lanes_.count;
    partition.max = 0.0;
    partition.inside = 0;
    OpenLane lane;
    lane.begin = start.cut;
    lane.at = start.at;
    double done_by_rest = start.at;  // ns of earlier waves, of this lane and all later ones
    Place place;
    FillResult fill{0.0, infinite};
    i32 one_by_one = num_lanes;  // lanes that this loop fills; OneTileLanes fills the others
    if constexpr (Searcher::fills_lanes) {
      if (searcher_.lanes != nullptr && start.loads == nullptr) one_by_one = lanes_.num_small;
    }
    for (i32 l = 0; l < one_by_one; ++l) {
      const Lane& mine = lane_[l];
      const double left = total_ - lane.at, done = start.loads != nullptr ? start.loads[l] : 0.0;
      lane.overhead = lane.begin.inside() ? rules_.ns_per_piece : 0.0;
      const double expected = left + done_by_rest + lane.overhead + product(loss, num_lanes - 1 - l);
      const double needed = product(expected, mine.per_weight_left);
      const double raised = needed > level ? whole_ticks(needed) : level;
      lane.room = product(raised - done, mine.weight) - lane.overhead;
      lane.weight = mine.weight;
      lane.may_stay_empty = mine.heads > lanes_.fewest_heads || done > 0.0;
      Choice choice{{batch_, 0, 0, -1}, left};
      if (l + 1 < num_lanes && lane.room < left && left > 0.0) {
        double next_cost;
        choice = end_of(lane, place, next_cost);
        fill.next_level = min_of(fill.next_level, done + product(next_cost + lane.overhead, mine.heads));
      }
      const double load = done + (choice.cost > 0.0 ? product(choice.cost + lane.overhead, mine.heads) : 0.0);
      fill.excess += product(l + 1 < num_lanes ? raised - level : load - level, mine.weight);
      partition.max = max_of(partition.max, load);
      partition.inside += choice.cut.inside();
      if (searcher_.writes()) partition.ends[l] = choice.cut;
      lane.begin = choice.cut;
      lane.at += choice.cost;
      done_by_rest -= done;
    }
    if constexpr (Searcher::fills_lanes) {
      if (one_by_one < num_lanes) {
        searcher_.lanes->fill(one_by_one, num_lanes, lane_, level, loss, lane, fill, partition);
      }
    }
    partition.mean = product(total_ + product(partition.inside, rules_.ns_per_piece), per_weight_);
    return fill;
  }

  // The edges of a unit; `after` has infinite cost at the end of the axis.
  struct UnitEdges {
    Choice before;
    Choice after;
  };

  // The unit that contains `goal`. The search begins at `begin`, which lies at `at`.
  FP_HOT UnitEdges unit_at(const Cut& begin, double at, double goal, Place& place) const {
    const i32 index = searcher_.request_at(requests_, batch_, begin.request, goal);
    const Request request = requests_[index];  // one copy, so that nothing below waits for memory
    const double end = requests_[min_of(index + 1, batch_)].cost;
    if (request.tiles == 0) return {{{index, 0, 0, -1}, request.cost - at}, {{}, infinite}};  // by rounding
    if (request.tiles == 1 && heads_ == 1) {  // decode has no others; the result is that of what follows
      const double before = request.cost - at;
      return {{{index, 0, 0, -1}, before}, {{index + 1, 0, 0, -1}, before + (end - request.cost)}};
    }
    place.one_head = product(end - request.cost, per_head_);
    const bool is_known =
        request.q_len == place.q_len && request.kv_len == place.kv_len && request.kv_begin == place.kv_begin;
    if (!is_known) move_to(request, place);
    const double in_request = goal - request.cost;
    const double in_heads = in_request * place.heads_per_ns;
    // Compared one by one, because all that follows would wait for a conversion to an integer and back.
    i32 head = 0, from = 0;
    while (head + 1 < heads_ && in_heads >= head + 1) ++head;
    if (index == begin.request &&
        head <= begin.head) {  // head < begin.head: rounding put the goal before the beginning
      head = begin.head;
      from = begin.tile;
    }
    TileCosts::Found found{0, 0.0, place.one_head};
    if (request.tiles > 1) found = place.costs.tile_at(in_request - product(head, place.one_head), from);
    const double head_begin = request.cost + product(head, place.one_head) - at;
    const Cut cut{index, head, found.tile, -1};
    return {{cut, head_begin + found.begin}, {next_unit(cut, request.tiles, heads_), head_begin + found.end}};
  }

  // Fills one lane: up to the unit that would overflow it, and into that unit if this places more work than a piece
  // costs. `next_cost` is the least cost at which the lane would take more.
  FP_HOT Choice end_of(const OpenLane& lane, Place& place, double& next_cost) const {
    const UnitEdges unit = unit_at(lane.begin, lane.at, lane.at + max_of(lane.room, 0.0), place);
    const Choice &before = unit.before, &after = unit.after;
    next_cost = infinite;
    if (after.cost == infinite) return before;
    const bool has_before = before.cost > 0.0 && !before.cut.same_unit(lane.begin);
    const TokenPrice& price = model_.price(requests_[before.cut.request]);
    // No CTA that gets a piece can cost less than the cheapest piece, so this one may take as much.
    const double floor = product(cheapest_piece(price), lane.weight) - lane.overhead;
    const Choice inside = cut_inside(lane, before, price, floor);

    const double step = product(rules_.step.divisor, price.ns);
    next_cost = after.cost;
    if (has_before) {
      const double worth = before.cost + max_of(rules_.ns_per_piece, whole_ticks(product(rules_.tolerance, lane.room)));
      if (!inside.cut.inside()) return before;
      next_cost = min_of(next_cost, max_of(inside.cost, worth) + step);
      return inside.cost > worth && inside.cost <= lane.room ? inside : before;
    }
    const bool whole = !inside.cut.inside() || after.cost <= floor;
    const Choice forced = whole ? after : inside;
    if (lane.may_stay_empty && forced.cost > lane.room) return {lane.begin, 0.0};
    if (!whole) next_cost = min_of(next_cost, inside.cost + step);
    return forced;
  }

  FP_HOST_DEVICE void move_to(const Request& request, Place& place) const {
    place.q_len = request.q_len;
    place.kv_begin = request.kv_begin;
    place.kv_len = request.kv_len;
    place.heads_per_ns = heads_ > 1 && place.one_head > 0.0 ? 1.0 / place.one_head : 0.0;
    if (request.tiles > 1) place.costs = TileCosts(model_, request);
  }

  // The last cut for which the lane has room and that leaves no piece too short; a cut without a token if there is
  // none.
  FP_HOT Choice cut_inside(const OpenLane& lane, const Choice& unit, const TokenPrice& price, double floor) const {
    Choice none{unit.cut, 0.0};
    if (!rules_.cuttable) return none;
    const TokenRange range = model_.visible(requests_[unit.cut.request], unit.cut.tile);
    const bool resumed = lane.begin.inside() && lane.begin.same_unit(unit.cut);
    const i32 piece_begin = resumed ? lane.begin.token : range.begin, left = range.end - piece_begin;
    i32 shortest = rules_.min_piece;
    if (rules_.max_pieces.divisor > 1) {
      shortest = max_of(shortest, static_cast<i32>(rules_.max_pieces.div(range.size())) + 1);
    }
    if (left / 2 < shortest) return none;
    // Pieces of a unit that costs the least value would each cost as much.
    if (model_.ns_per_unit + product(price.ns, range.size()) < model_.least_ns_of_unit) return none;
    const i32 first = down_to_step(piece_begin + shortest + rules_.step.divisor - 1),
              last = down_to_step(range.end - shortest);
    if (first > last) return none;

    const double token_0 = unit.cost + model_.ns_per_unit - product(range.begin, price.ns);  // after lane.at
    const double goal = max_of(lane.room, floor);
    const double wanted = (goal - token_0) * price.per_ns;
    i32 token = down_to_step(static_cast<i32>(min_of<double>(max_of(wanted, 0.0), last)));
    if (price.ns > 0.0) {  // `wanted` is rounded: the exact costs of this cut and its neighbours decide
      const i32 step = rules_.step.divisor;
      if (token > 0 && token_0 + product(token, price.ns) > goal) token -= step;
      if (token <= last - step && token_0 + product(token + step, price.ns) <= goal) token += step;
    }
    if (token < first || (token == first && goal > lane.room)) {
      // Only shortest pieces fit: make them equal, so that the last one is not nearly twice as long.
      token = down_to_step(piece_begin + left / (left / shortest) + rules_.step.divisor / 2);
    }
    token = max_of(first, min_of(last, token));
    none.cut.token = token;
    return {none.cut, token_0 + product(token, price.ns)};
  }

  FP_HOST_DEVICE i32 down_to_step(u32 token) const { return static_cast<i32>(rules_.step.down(token)); }

  FP_HOST_DEVICE double cheapest_piece(const TokenPrice& price) const {
    return rules_.ns_per_piece + product(rules_.min_piece, price.ns);
  }

  Searcher searcher_;
  const CostModel& model_;
  const CutRules& rules_;
  const Request* requests_;
  i32 batch_;
  i32 heads_;
  i32 waves_;
  double per_head_;
  double per_weight_;
  const Lane* lane_;
  Lanes lanes_;
  double total_;
  i64 units_on_axis_;
};

}  // namespace flashpage::plan
