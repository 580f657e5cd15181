// How a kernel's work may be cut and what it costs. Python fills it (flashpage/kernels/schedules.py); the planners of
// the host and of the card read it.
//
// The planner's words:
// unit   a row tile of one KV head of one request, over all tokens that it sees
// axis   the costs of all units in sequence, in nanoseconds
// lane   CTAs that take the same segments of the axis, each for its own KV heads
// wave   a range of the axis that all lanes finish before any of them continues
// piece  some of the tokens of a unit that is cut
// group  a cluster of CTAs that share a unit, a piece for each
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::plan {

struct Schedule {
  i32 num_ctas;        // CTAs to fill; the plan may use fewer
  i32 heads_on_axis;   // 1: KV heads follow each other on the axis, as many as it takes to fill all CTAs (prefill);
                       // 0: no head does, neighbouring CTAs take the heads of the same tokens (decode)
  i32 tile_q;          // packed rows of a unit
  i32 tile_kv;         // tokens of an inner step; cuts fall on multiples of it (from the request's token 0)
  float ns_per_token;  // for one unit
  float ns_per_unit;   // of starting and ending one unit, in addition to its tokens
  // The least cost of a whole unit, however few its tokens, because a CTA ends units one after another.
  float least_ns_of_unit;
  float few_rows_cost;   // factor of ns_per_token if a request's packed rows fill at most half a row tile
  float ns_per_piece;    // cost of one more piece of a cut unit (partial written, merged)
  float ns_per_merge;    // what merging adds to a launch in addition to ns_per_piece; small batches may do without cuts
  i32 min_piece_tokens;  // no piece is shorter, except whole units
  i32 max_pieces;        // of one unit; 0: no limit; a fixed split ignores it
  i32 fixed_piece_tokens;  // > 0: batch-invariant, units are cut at its multiples; -1: never cut; 0: balanced
  i32 merge_rows;          // packed rows of a merge item, at most
  i32 row_jobs;            // of a merged row: 128 columns each
  i32 wave_tokens;         // tokens of a KV head that the L2 holds: CTAs read about so many at a time; 0: no waves
  i32 are_claimed;  // 1: CTAs claim units at run time, wherever the plan puts them (tile/mask/); if there are many,
                    // they are not cut
  // Units with CTAs of their own, a group for each (own_ctas.h), if they are few enough and this is not slower.
  i32 clusters[5];             // groups of 1, 2, 4, 8 and 16 CTAs: how many run at once; 0: that size is not allowed
  i32 cluster_rows;            // packed rows of a unit that a group can merge
  i32 cluster_piece_tokens;    // no piece of a group is shorter
  float full_speed_share;      // fraction of num_ctas that saturates memory
  float ns_per_cluster_unit;   // like ns_per_unit, where no unit follows in the same CTA
  float ns_per_cluster_merge;  // like ns_per_merge, inside a group

  FP_HOST_DEVICE bool balanced() const { return fixed_piece_tokens == 0; }
  FP_HOST_DEVICE bool fixed() const { return fixed_piece_tokens > 0; }
};

inline constexpr i32 num_group_sizes = sizeof(Schedule::clusters) / sizeof(i32);

}  // namespace flashpage::plan
