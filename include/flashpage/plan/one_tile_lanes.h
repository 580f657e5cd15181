// Fills the full lanes of a decode batch on the host: no request has more than one row tile, and no KV head lies on the
// axis. With few KV heads (latent rows have one) such a batch has about as many lanes as the card has CTAs. Each lane
// begins where the one before it ends, and a plan fills all of them several times, so this chain is most of the time
// that planning takes.
//
// Here the chain is computed in integers: whole ticks (cost.h), whose sums are exact. So each lane ends where
// Partitioner would end it. A plan made on a card uses Partitioner alone, and has the same bytes
// (tests/planner/test_table_plans.py).
#pragma once
#include "flashpage/plan/cost.h"
#include "flashpage/plan/filling.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

using Ticks = i64;

// `ns`: whole ticks (whole_ticks).
inline Ticks to_ticks(double ns) { return static_cast<Ticks>(ns * ticks_per_ns); }
inline double to_ns(Ticks ticks) { return static_cast<double>(ticks) / ticks_per_ns; }

// Exact quotients of 0 <= n < 2^63, by one multiplication with a reciprocal that is rounded up, like FastDiv's.
class TickDivisor {
 public:
  explicit TickDivisor(Ticks divisor) {  // divisor: 2 or more
    while ((divisor - 1) >> shift_ > 1) ++shift_;
    multiplier_ = static_cast<u64>(((Wide{1} << (64 + shift_)) + divisor - 1) / divisor);
  }
  i64 div(Ticks n) const { return static_cast<i64>(static_cast<u64>(n * Wide{multiplier_} >> 64) >> shift_); }

 private:
  using Wide = unsigned __int128;

  i32 shift_ = 0;
  u64 multiplier_;
};

// A request on the axis, with costs in ticks.
struct alignas(32) TickedRequest {
  Ticks begin;
  Ticks token_0;  // where token 0 would be if the tokens before `first` cost as much as others
  i32 first;      // first token that a row sees
  i32 end;        // first token that no row sees
  i32 last_cut;   // the last token at which it may be cut; -1: there is none
};

// Where lanes may end: the rules of Partitioner::end_of and cut_inside, in ticks. A step of tokens is a power of two,
// so `& -step` rounds down to a step.
struct TickedRules {
  TickedRules(const CostModel& model, const CutRules& rules)
      : step(rules.step.divisor),
        min_piece(rules.min_piece),
        per_token(to_ticks(model.many_rows.ns)),
        per_step(per_token * step),
        per_piece(to_ticks(rules.ns_per_piece)),
        cheapest_piece(per_piece + per_token * min_piece),
        most_room_of_piece(static_cast<Ticks>(0.99 / CutRules::tolerance) * per_piece),
        steps(per_step) {}

  i32 step, min_piece;  // tokens; a cut lies at a whole step
  Ticks per_token, per_step, per_piece, cheapest_piece;
  // Up to this room CutRules::tolerance of it is less than a piece costs, so that it need not be computed. The factor
  // 0.99 leaves a margin for rounding.
  Ticks most_room_of_piece;
  TickDivisor steps;

  // OpenLane in ticks: it begins at token `token` of a request (-1: at its first one).
  struct Open {
    i32 request;
    i32 token;
    Ticks at;
    Ticks overhead;
    Ticks room;
  };

  struct End {
    i32 request;
    i32 token;
    Ticks taken;      // after Open::at
    Ticks next_cost;  // least cost, after Open::at, at which the lane would take more
  };

  // The end of a lane in the request `found`, or at one of its edges. `least_next`: the least next_cost of all lanes so
  // far, without this lane's overhead; only a lower next_cost is used, so one above it need not be exact. Conditions
  // are joined by & and | in place of && and ||, as a mispredicted branch takes as long as the whole lane.
  FP_HOT End end_of(const Open& lane, i32 index, const TickedRequest& found, Ticks request_end,
                    Ticks least_next) const {
    const Ticks before = found.begin - lane.at, after = request_end - lane.at, token_0 = found.token_0 - lane.at;
    const bool has_before = before > 0;
    const i32 piece_begin = ((lane.token >= 0) & (index == lane.request)) ? lane.token : found.first;
    const i32 tokens = found.end - piece_begin, first_cut = (piece_begin + min_piece + step - 1) & -step;
    const bool may_cut = (tokens >= 2 * min_piece) & (first_cut <= found.last_cut);

    const Ticks floor = cheapest_piece - lane.overhead, wanted = max_of(lane.room, floor) - token_0;
    i32 cut = static_cast<i32>(min_of<i64>(steps.div(max_of<Ticks>(wanted, 0)) * step, found.last_cut));
    const bool is_short = may_cut & ((cut < first_cut) | ((cut == first_cut) & (floor > lane.room)));
    cut = max_of(first_cut, cut);
    Ticks of_piece = token_0 + cut * per_token, gain = per_piece;
    if (lane.room > most_room_of_piece) {
      gain = max_of(gain, to_ticks(whole_ticks(product(CutRules::tolerance, to_ns(lane.room)))));
    }
    const Ticks worth = before + gain;
    Ticks beyond = has_before ? max_of(of_piece, worth) : of_piece;
    // A piece that does not fit after other units matters only if it says where the lane would take more.
    if (is_short & (!has_before | (of_piece <= lane.room) | (min_of(beyond + per_step, after) < least_next))) {
      cut = max_of(first_cut, min_of(found.last_cut, equal_piece(piece_begin, tokens)));
      of_piece = token_0 + cut * per_token;
      beyond = has_before ? max_of(of_piece, worth) : of_piece;
    }
    const bool is_worth = has_before ? (of_piece > worth) & (of_piece <= lane.room) : after > floor;
    const bool takes_piece = may_cut & is_worth, may_take_more = has_before ? may_cut : takes_piece;
    const Ticks more = min_of(after, beyond + per_step), whole = has_before ? before : after;
    return {index + (!takes_piece & !has_before), takes_piece ? cut : -1, takes_piece ? of_piece : whole,
            may_take_more ? more : after};
  }

  // The cut after the first of as many equal pieces as are long enough.
  i32 equal_piece(i32 begin, i32 tokens) const { return (begin + tokens / (tokens / min_piece) + step / 2) & -step; }
};

class OneTileLanes {
 public:
  // Whether lanes may be filled here: all costs are exact in ticks, and the schedule has no option that decode kernels
  // leave out (other prices of few rows, steps that are no power of two, a limit of pieces). `longest`: tokens of the
  // longest request. `most_ns` is within the range of whole_ticks.
  static bool may_fill(const CostModel& model, const CutRules& rules, double total, i64 longest) {
    constexpr double least_ns = 1.0, most_ns = 1 << 30;
    const double ns = model.many_rows.ns, of_tokens = ns * (longest + rules.min_piece + rules.step.divisor);
    const double of_unit = max_of(max_of(model.ns_per_unit, model.least_ns_of_unit), rules.ns_per_piece);
    const bool are_exact = ns >= least_ns && max_of(max_of(total, of_tokens), of_unit) < most_ns;
    return are_exact && ns == model.few_rows.ns && rules.cuttable && rules.step.multiplier == 0 &&
           rules.max_pieces.divisor == 1;
  }

  static constexpr i32 past_end = 2;  // entries after the requests: the axis' end, and one that ends each search

  // `ticked`: memory of batch + past_end entries.
  OneTileLanes(const CostModel& model, const CutRules& rules, const Request* requests, i32 batch, TickedRequest* ticked)
      : rules_(model, rules), ticked_(ticked), batch_(batch) {
    const Ticks per_unit = to_ticks(model.ns_per_unit), least = to_ticks(model.least_ns_of_unit) - per_unit;
    const i64 least_tokens = max_of<i64>(2 * rules_.min_piece, ceil_div(max_of<Ticks>(least, 0), rules_.per_token));
    for (i32 i = 0; i < batch; ++i) {
      const TokenRange seen = model.visible(requests[i], 0);
      const Ticks begin = to_ticks(requests[i].cost);
      const i32 last_cut = seen.size() >= least_tokens ? (seen.end - rules_.min_piece) & -rules_.step : -1;
      ticked[i] = {begin, begin + per_unit - rules_.per_token * seen.begin, seen.begin, seen.end, last_cut};
    }
    ticked[batch] = {to_ticks(requests[batch].cost), 0, 0, 0, -1};
    ticked[batch + 1] = {never, 0, 0, 0, -1};
  }

  // Fills the lanes from `first` on, as Partitioner::fill_all does. `lane`: where the first one begins. Adds to
  // `result` and `partition`. It is not inlined, which leaves Partitioner's loop its registers.
  [[gnu::noinline]] void fill(i32 first, i32 num_lanes, const Lane* lanes, double level_ns, double loss,
                              const OpenLane& lane, FillResult& result, Partition& partition) const {
    const TickedRules rules = rules_;
    const TickedRequest* const ticked = ticked_;
    Cut* const ends = partition.ends;
    const Ticks level = to_ticks(level_ns), total = ticked[batch_].begin;
    const auto needed_ns = [=](i32 l, Ticks left) {
      return product(to_ns(left) + product(loss, num_lanes - 1 - l), lanes[l].per_weight_left);
    };
    TickedRules::Open open{lane.begin.request, lane.begin.token, to_ticks(lane.at),
                           lane.begin.token >= 0 ? rules.per_piece : 0, 0};
    Ticks most = 0, next_level = never;
    double excess = result.excess;
    i32 l = first, inside = 0;
    for (; l + 1 < num_lanes; ++l) {
      const Ticks left = total - open.at;
      const double needed = needed_ns(l, left + open.overhead);
      Ticks raised = level;
      if (needed > level_ns) {
        raised = to_ticks(whole_ticks(needed));
        excess += whole_ticks(needed) - level_ns;
      }
      open.room = raised - open.overhead;
      if (open.room >= left || left <= 0) break;
      const Ticks goal = open.at + max_of<Ticks>(open.room, 0);
      i32 index = open.request;
      while (ticked[index + 1].begin <= goal) ++index;
      const TickedRules::End end =
          rules.end_of(open, index, ticked[index], ticked[index + 1].begin, next_level - open.overhead);
      next_level = min_of(next_level, end.next_cost + open.overhead);
      most = max_of(most, end.taken + open.overhead);
      inside += end.token >= 0;
      ends[l] = {end.request, 0, 0, end.token};
      open.request = end.request;
      open.token = end.token;
      open.overhead = end.token >= 0 ? rules.per_piece : 0;
      open.at += end.taken;
    }
    // The lane that takes all that is left, and empty ones after it.
    const Ticks left = total - open.at, load = left > 0 ? left + (open.token >= 0 ? rules.per_piece : 0) : 0;
    excess += l + 1 == num_lanes ? to_ns(load - level) : -level_ns;
    for (i32 i = l + 1; i + 1 < num_lanes && loss > level_ns; ++i) {
      excess += max_of(level_ns, whole_ticks(needed_ns(i, 0))) - level_ns;
    }
    for (; l < num_lanes; ++l) ends[l] = {batch_, 0, 0, -1};
    result.excess = excess;
    if (next_level < never) result.next_level = min_of(result.next_level, to_ns(next_level));
    partition.max = max_of(partition.max, to_ns(max_of(most, load)));
    partition.inside += inside;
  }

 private:
  static constexpr Ticks never = Ticks{1} << 62;

  TickedRules rules_;
  const TickedRequest* ticked_;
  i32 batch_;
};

}  // namespace flashpage::plan
