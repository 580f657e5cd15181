// How a kernel's work may be cut and what it costs: given by Python (flashpage/kernels/schedules.py), read by the
// planner, on the host and on a card.
//
// The planner's words:
//   unit   a row tile of one KV head of one request, over all tokens that it sees
//   axis   the costs of all units, one behind the other, in nanoseconds
//   lane   CTAs that take the same segments of the axis, each for its own KV heads
//   wave   a range of the axis that all lanes finish before any of them goes on
//   piece  some of the tokens of a unit that is cut
//   group  a cluster of CTAs that share a unit, a piece each
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::plan {

struct Schedule {
  i32 num_ctas;            // CTAs to fill; the plan may use fewer
  i32 heads_on_axis;       // 1: KV heads lie on the axis one behind the other, as many as it takes to fill all CTAs
                           // (prefill); 0: none does, neighbouring CTAs take the heads of the same tokens (decode)
  i32 tile_q;              // packed rows of a unit
  i32 tile_kv;             // tokens of an inner step; cuts fall on its multiples (from the request's token 0)
  float ns_per_token;      // one unit, one token
  float ns_per_unit;       // fixed cost of starting and ending one unit
  float few_rows_cost;     // factor of ns_per_token where a request's packed rows fill at most half a row tile
  float ns_per_piece;      // what one more piece of a cut unit costs (partial written, merged)
  float ns_per_merge;      // what merging adds to a launch, beyond ns_per_piece: small batches may do without cuts
  i32 min_piece_tokens;    // no piece shorter than this unless the unit is
  i32 max_pieces;          // of one unit; 0: no limit; a fixed split knows none
  i32 fixed_piece_tokens;  // > 0: batch-invariant, units are cut at its multiples; -1: never cut; 0: balance
  i32 merge_rows;          // packed rows a merge item at most
  i32 wave_tokens;         // of a KV head, that the L2 keeps: CTAs read about so many at a time; 0: no waves
  i32 are_claimed;         // CTAs take units as they go, whoever has them here (tile/mask/): many are not cut
  // Units with CTAs of their own, a group for each (own_ctas.h): where they are few enough and not dearer.
  i32 clusters[5];             // groups of 1, 2, 4, 8 and 16 CTAs: how many run at once; 0: none of that size may be
  i32 cluster_rows;            // packed rows of a unit that a group merges, at most
  i32 cluster_piece_tokens;    // no piece shorter there
  float full_speed_share;      // of num_ctas: with so many memory is as busy as with all
  float ns_per_cluster_merge;  // ns_per_merge inside a group

  FP_HOST_DEVICE bool balanced() const { return fixed_piece_tokens == 0; }
  FP_HOST_DEVICE bool fixed() const { return fixed_piece_tokens > 0; }
};

inline constexpr i32 num_group_sizes = sizeof(Schedule::clusters) / sizeof(i32);

}  // namespace flashpage::plan
