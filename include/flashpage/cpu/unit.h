// One unit of a work item: its rows of q, and the tokens that each of them may see.
#pragma once
#include "flashpage/cpu/lanes.h"
#include "flashpage/params/params.h"
#include "flashpage/plan/visible.h"

namespace flashpage::cpu {

struct Row {
  i32 row;         // index in the request
  i32 head;        // query head
  i32 position;    // token position in the request
  i32 begin, end;  // tokens that causal and window leave visible
  float scale;     // factor of the dot product; natural-log units
};

template <int tile_q>
struct Unit {
  const WorkItem* item;
  i32 kv_head;
  i32 num_rows;
  i32 begin, end;     // tokens that any row may see
  float value_scale;  // over the output's
  Row rows[tile_q];
};

inline i32 clamp(i32 x, i32 low, i32 high) { return max_of(low, min_of(x, high)); }

// `request`: elements from the first scales to those of the request.
inline float scale_of(const float* scales, i32 stride, i32 head, i32 request) {
  return scales ? scales[head * stride + request] : 1.0f;
}

// `begin` and `end` of the rows that this makes never decrease from one packed row to the next.
inline Row make_row(const AttentionParams& params, const WorkItem& item, i32 kv_head, i32 packed_row) {
  const i32 row = static_cast<i32>(params.group.div(packed_row));
  const i32 group = static_cast<i32>(params.group.divisor);
  Row result;
  result.row = row;
  result.head = kv_head * group + packed_row - row * group;
  result.position = query_position(item, row);
  result.begin = min_of(first_visible(params, result.position, item.kv_begin), item.kv_end);
  result.end = max_of(visible_end(params, result.position, item.kv_end), result.begin);
  result.scale =
      params.score_scale *
      scale_of(params.q_scale, params.q_scale_stride, result.head, params.q_scale_request_stride * item.request) *
      scale_of(params.k_scale, params.k_scale_stride, kv_head, params.k_scale_request_stride * item.request);
  return result;
}

// Unit `index` of an item. Units run through the row tiles of one KV head, then continue with the next head.
template <int tile_q>
void make_unit(const AttentionParams& params, const WorkItem& item, i32 index, Unit<tile_q>& unit) {
  const i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
  const i32 tiles = max_of(ceil_div(packed_rows, tile_q), 1), tile = item.first_packed_row / tile_q + index;
  const i32 first = tile % tiles * tile_q;
  unit.item = &item;
  unit.kv_head = item.kv_head + tile / tiles;
  unit.num_rows = min_of(tile_q, packed_rows - first);
  unit.value_scale = params.value_scale * scale_of(params.v_scale, params.v_scale_stride, unit.kv_head,
                                                   params.v_scale_request_stride * item.request);
  if (params.out_scale) unit.value_scale /= *params.out_scale;
  for (i32 r = 0; r < unit.num_rows; ++r) unit.rows[r] = make_row(params, item, unit.kv_head, first + r);
  unit.begin = unit.rows[0].begin;
  unit.end = unit.rows[unit.num_rows - 1].end;
}

}  // namespace flashpage::cpu
