// What the two loops that fill lanes share (partition.h, one_tile_lanes.h): the rules of cuts, the lane that is being
// filled, and results.
#pragma once
#include "flashpage/plan/cost.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

// The segments of the last wave.
struct Partition {
  Cut* ends;  // [lanes]: a lane begins where the previous one ends
  Cut begin{};
  double mean = 0.0;  // load of a CTA if all loads were equal, ns
  double max = 0.0;   // load of the costliest CTA, ns
  i32 inside = 0;     // number of cuts inside a unit

  FP_HOST_DEVICE Segment segment(i32 lane) const { return {lane == 0 ? begin : ends[lane - 1], ends[lane]}; }
};

// Where units may be cut, and what a cut costs.
struct CutRules {
  static constexpr double tolerance = 0.005;  // of a lane's load: a cut that adds less to it is not made

  CutRules() = default;
  explicit CutRules(const Schedule& schedule)
      : cuttable(schedule.fixed_piece_tokens >= 0),
        step(make_fast_div(schedule.fixed() ? schedule.fixed_piece_tokens : max_of(schedule.tile_kv, 1))),
        min_piece(schedule.fixed() ? 1 : max_of(schedule.min_piece_tokens, 1)),
        max_pieces(make_fast_div(schedule.fixed() || schedule.max_pieces == 0 ? 1 : schedule.max_pieces + 1)),
        ns_per_piece(schedule.fixed() ? 0.0 : whole_ticks(schedule.ns_per_piece)) {}

  bool cuttable;
  FastDiv step;        // tokens
  i32 min_piece;       // tokens
  FastDiv max_pieces;  // the maximum plus one; 1: no limit
  double ns_per_piece;
};

// A lane that is being filled. Costs are positions on the axis, without the extra cost of starting inside a unit.
struct OpenLane {
  Cut begin;
  double at = 0.0;  // ns on the axis at which `begin` lies
  double overhead;  // ns of starting inside a unit; 0: it starts at an edge
  double room;      // ns that fit after `at`
  double weight;    // Lane::weight
  bool may_stay_empty;
};

// The outcome of filling all lanes up to one level.
struct FillResult {
  double excess;      // ns that did not fit at the level (negative: ns that would have fit in addition); on the axis
  double next_level;  // below it, no lane would take more
};

}  // namespace flashpage::plan
