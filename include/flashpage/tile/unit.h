// One unit of a work item: a row tile of one KV head and its token range; and the mapping from packed rows to q, out
// and partials.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/plan/visible.h"

namespace flashpage {

struct Unit {
  i32 first_row;  // packed, in the request
  i32 num_rows;   // packed rows of the tile that exist
  i32 kv_head;
  i32 kv_begin;  // tokens that some row of the tile may see: the item's range, clipped by causal and window
  i32 kv_end;
  i32 all_begin;  // tokens that every row of the tile sees: tiles inside this range need no mask
  i32 all_end;
};

// The row and the query head of a packed row.
struct PackedRow {
  i32 row;   // of the request
  i32 head;  // query head
};

// Params are AttentionParams or MaskTilesParams.
template <class Params>
FP_DEVICE PackedRow unpack_row(const Params& params, i32 kv_head, i32 packed_row) {
  u32 row, head_in_group;
  params.group.divmod(packed_row, row, head_in_group);
  return {static_cast<i32>(row), static_cast<i32>(kv_head * params.group.divisor + head_in_group)};
}

// The tokens of the item's range that one row sees.
template <class Params>
FP_DEVICE TokenRange visible_range(const Params& params, const WorkItem& item, i32 position) {
  return {first_visible(params, position, item.kv_begin), visible_end(params, position, item.kv_end)};
}

FP_DEVICE Unit make_unit(const AttentionParams& params, const WorkItem& item, i32 tile_q, i32 first_row, i32 kv_head) {
  i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
  i32 num_rows = min_of(tile_q, packed_rows - first_row);
  i32 top = query_position(item, static_cast<i32>(params.group.div(first_row)));
  i32 bottom = query_position(item, static_cast<i32>(params.group.div(first_row + num_rows - 1)));
  TokenRange first = visible_range(params, item, top), last = visible_range(params, item, bottom);
  return {first_row, num_rows, kv_head, first.begin, max_of(first.begin, last.end), last.begin, first.end};
}

// The work that a CTA does now: a unit, and a pass over some of its value columns.
struct Place {
  WorkItem item;
  Unit unit;
  i32 pass;
  i32 parity;  // alternates between 0 and 1
  bool done;   // no work is left; the other fields are undefined
};

// The place after `here` in a ring of three.
FP_DEVICE i32 next_place(i32 here) { return here == 2 ? 0 : here + 1; }

// Visits the places of a CTA's items. One thread advances it and writes the places; the CTA reads them.
struct PlaceCursor {
  CtaItems cta;
  i32 next_item;
  i32 units_left;  // of the item, after the last unit
  const CtaStart* begin;

  FP_DEVICE void start(const PlanHeader* plan, i32 index) { begin = &cta_start(plan, index); }

  // The first place of the CTA. The first item is loaded even if the CTA has none, so that the load does not wait for
  // the range.
  FP_DEVICE void first(const AttentionParams& params, i32 tile_q, Place& place) {
    const CtaStart start = *begin;
    first(params, tile_q, start, place);
  }
  // As above, with the CTA's start already loaded by the caller.
  FP_DEVICE void first(const AttentionParams& params, i32 tile_q, const CtaStart& start, Place& place) {
    cta = start.items;
    next_item = cta.begin;
    place.pass = 0;
    place.parity = 0;
    place.done = cta.begin == cta.end;
    open_item(params, tile_q, start.first, place);
  }
  FP_DEVICE void next(const AttentionParams& params, i32 tile_q, i32 passes, const Place& last, Place& place) {
    if (passes > 1 && last.pass + 1 < passes) {
      place = last;
      ++place.pass;
    } else {
      next_unit(params, tile_q, last, place);
    }
    place.parity = last.parity ^ 1;
  }

 private:
  FP_DEVICE void next_unit(const AttentionParams& params, i32 tile_q, const Place& last, Place& place) {
    place.pass = 0;
    place.done = units_left == 0 && next_item == cta.end;
    if (units_left > 0) {
      --units_left;
      place.item = last.item;
      i32 packed_rows = last.item.q_len * static_cast<i32>(params.group.divisor);
      i32 row = last.unit.first_row + tile_q;
      place.unit = row < packed_rows ? make_unit(params, last.item, tile_q, row, last.unit.kv_head)
                                     : make_unit(params, last.item, tile_q, 0, last.unit.kv_head + 1);
    } else if (!place.done) {
      open_item(params, tile_q, item_of_cta(plan_items(params.plan)[next_item], cta), place);
    }
  }

  FP_DEVICE void open_item(const AttentionParams& params, i32 tile_q, const WorkItem& item, Place& place) {
    ++next_item;
    units_left = item.num_units - 1;
    place.item = item;
    place.unit = make_unit(params, item, tile_q, item.first_packed_row, item.kv_head);
  }
};

}  // namespace flashpage
