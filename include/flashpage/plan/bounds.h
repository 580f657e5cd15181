// Upper bounds of a plan's size for any batch within capacities. Workspaces are sized by them.
#pragma once
#include <vector>

#include "flashpage/plan/lanes.h"
#include "flashpage/plan/lengths.h"
#include "flashpage/plan/own_ctas.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

struct Capacity {
  i64 batch;
  i64 q_rows;  // of the batch; 0: one row in each request
  i64 kv_tokens;
  i64 kv_tokens_of_one = max_i32;  // of any one request
};

struct Bounds {
  i64 bytes;
  i64 partial_rows;
};

// Balanced: at most two pieces for each cut, and one cut for each lane. Fixed split: one piece for each chunk and row
// tile; the worst batch has all rows and all tokens in one request.
inline Bounds bounds(const Capacity& capacity, const Heads& heads, const Schedule& schedule) {
  std::vector<Lane> small(schedule.num_ctas);
  // A single request that has all tokens gives the most lanes and waves.
  const KvTokens kv{.all = capacity.kv_tokens, .longest = capacity.kv_tokens};
  const Axis axis = make_axis(schedule, heads.num_kv_heads, kv);
  const Lanes lanes = Lanes::make(schedule, heads.num_kv_heads, axis, small.data());
  const bool one_row = capacity.q_rows == 0;
  const i64 group = heads.group(), num_kv_heads = heads.num_kv_heads;
  const i64 parts = one_row ? capacity.batch : most_parts(heads.visibility, capacity.batch, capacity.q_rows);
  const i64 packed_rows = (one_row ? capacity.batch : capacity.q_rows) * group;
  const i64 packed_rows_of_one = one_row ? group : packed_rows;
  const i64 unit_rows = min_of<i64>(schedule.tile_q, packed_rows_of_one);
  const i64 merges_of_unit = ceil_div<i64>(unit_rows, schedule.merge_rows);
  i64 most_heads = 1;
  for (i32 l = 0; l < lanes.num_small; ++l) most_heads = max_of<i64>(most_heads, small[l].heads);

  i64 items = most_items(parts, axis, lanes, small.data()), merges = 0, partial_rows = 0;
  if (schedule.fixed()) {
    const i64 chunks =
        capacity.kv_tokens / schedule.fixed_piece_tokens;  // in addition to one started chunk for each unit
    const i64 chunks_of_one = min_of(chunks, capacity.kv_tokens_of_one / schedule.fixed_piece_tokens);
    const i64 tiles = ceil_div<i64>(packed_rows, schedule.tile_q) + parts;
    const i64 tiles_of_one = ceil_div<i64>(packed_rows_of_one, schedule.tile_q);
    const i64 cut_tiles = min_of(tiles, chunks * tiles_of_one);
    const i64 axis_heads = max_of<i64>(axis.heads, most_heads);
    items += axis_heads * (2 * cut_tiles + min_of(chunks * tiles_of_one, chunks_of_one * tiles));
    merges = num_kv_heads * cut_tiles * merges_of_unit;
    const i64 chunk_rows = min_of(chunks * packed_rows_of_one, chunks_of_one * packed_rows);
    partial_rows = num_kv_heads * (min_of(packed_rows, chunks * packed_rows_of_one) + chunk_rows);
  } else if (schedule.balanced() && capacity.kv_tokens >= 2 * static_cast<i64>(schedule.min_piece_tokens)) {
    const i64 cuts = (lanes.count - 1) * (num_kv_heads / axis.heads);
    merges = cuts * merges_of_unit;
    partial_rows = 2 * cuts * unit_rows;
  }
  const i64 bytes = static_cast<i64>(sizeof(PlanHeader)) + schedule.num_ctas * static_cast<i64>(sizeof(CtaStart)) +
                    items * static_cast<i64>(sizeof(WorkItem)) + merges * merge_bytes;
  return {bytes, partial_rows};
}

// Bounds of batches whose units may have CTAs of their own (own_ctas.h): each CTA has one item, which KV heads share.
inline Bounds bounds_with_own_ctas(const Capacity& capacity, const Heads& heads, const Schedule& schedule) {
  Bounds most = bounds(capacity, heads, schedule);
  if (!schedule.balanced()) return most;
  const i64 rows = min_of(schedule.cluster_rows, schedule.tile_q),
            merges_of_unit = ceil_div<i64>(rows, schedule.merge_rows);
  for (i32 i = 0; i < num_group_sizes; ++i) {
    const i64 units = schedule.clusters[i], ctas = units << i;
    const bool may_cut = i > 0;
    const i64 bytes = static_cast<i64>(sizeof(PlanHeader)) + schedule.num_ctas * static_cast<i64>(sizeof(CtaStart)) +
                      ctas / heads.num_kv_heads * static_cast<i64>(sizeof(WorkItem)) +
                      (may_cut ? units * merges_of_unit * merge_bytes : 0);
    most.bytes = max_of(most.bytes, bytes);
    if (may_cut) most.partial_rows = max_of(most.partial_rows, ctas * rows);
  }
  return most;
}

}  // namespace flashpage::plan
