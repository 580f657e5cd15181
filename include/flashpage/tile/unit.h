// One unit of a work item: a row tile of one KV head, its token range, and the way from packed rows to q, out and partials.
#pragma once
#include "flashpage/params.h"

namespace flashpage {

struct Unit {
  i32 first_row;  // packed, within the request
  i32 num_rows;   // packed rows of the tile that exist
  i32 kv_head;
  i32 kv_begin;   // tokens that some row of the tile may see: causal and window clip the item's range
  i32 kv_end;
  i32 all_begin;  // tokens that every row of the tile sees: tiles inside need no mask
  i32 all_end;
};

// Where one packed row lies.
struct PackedRow {
  i32 row;   // of the request
  i32 head;  // query head
};

FP_DEVICE PackedRow unpack_row(const AttentionParams& params, i32 kv_head, i32 packed_row) {
  u32 row, head_in_group;
  params.group.divmod(packed_row, row, head_in_group);
  return {static_cast<i32>(row), static_cast<i32>(kv_head * params.group.divisor + head_in_group)};
}

// Row r of a request stands at this token position: right-aligned.
FP_DEVICE i32 query_position(const WorkItem& item, i32 row) { return item.kv_len - item.q_len + row; }

// The tokens [begin, end) that one row sees of the item's range, by causal and window.
struct TokenRange {
  i32 begin;
  i32 end;
};

FP_DEVICE TokenRange visible_range(const AttentionParams& params, const WorkItem& item, i32 position) {
  i32 begin = params.window_left >= 0 ? max_of(item.kv_begin, position - params.window_left) : item.kv_begin;
  i32 end = params.causal ? min_of(item.kv_end, position + 1) : item.kv_end;
  return {begin, end};
}

FP_DEVICE Unit make_unit(const AttentionParams& params, const WorkItem& item, i32 tile_q, i32 first_row, i32 kv_head) {
  i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
  i32 num_rows = min_of(tile_q, packed_rows - first_row);
  i32 top = query_position(item, static_cast<i32>(params.group.div(first_row)));
  i32 bottom = query_position(item, static_cast<i32>(params.group.div(first_row + num_rows - 1)));
  TokenRange first = visible_range(params, item, top), last = visible_range(params, item, bottom);
  return {first_row, num_rows, kv_head, first.begin, max_of(first.begin, last.end), last.begin, first.end};
}

// The run of an item: next row tile, and after the last one the first row tile of the next KV head.
template <class Body>
FP_DEVICE void for_each_unit(const AttentionParams& params, const WorkItem& item, i32 tile_q, Body&& body) {
  i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
  i32 first_row = item.first_packed_row, kv_head = item.kv_head;
  for (i32 i = 0; i < item.num_units; ++i) {
    body(make_unit(params, item, tile_q, first_row, kv_head));
    first_row += tile_q;
    if (first_row >= packed_rows) {
      first_row = 0;
      ++kv_head;
    }
  }
}

// The items of this CTA.
template <class Body>
FP_DEVICE void for_each_item(const PlanHeader* plan, Body&& body) {
  for_each_item(plan, static_cast<i32>(blockIdx.x), body);
}

}  // namespace flashpage
