// Units of a plan in the order in which CTAs claim them, the longest first. QueueCursor has PlaceCursor's interface and
// serves kernels whose custom mask decides how long a unit takes.
#pragma once
#include "flashpage/tile/mask/mask_tiles.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// One thread moves it. Any CTA may claim any item, and the order of the plan does not matter.
struct QueueCursor {
  UnitQueue* queue;
  const QueuedUnit* units;
  u32 tile_cell;  // of the unit that was claimed last

  FP_DEVICE void start(const MaskTilesParams& tiles) {
    queue = reinterpret_cast<UnitQueue*>(tiles.cells);
    units = queued_units(tiles, tiles.queue_begin);
  }
  FP_DEVICE void first(const AttentionParams& params, i32 tile_q, Place& place) { claim(params, tile_q, place); }
  FP_DEVICE void next(const AttentionParams& params, i32 tile_q, i32, const Place&, Place& place) {
    claim(params, tile_q, place);
  }

 private:
  FP_DEVICE void claim(const AttentionParams& params, i32 tile_q, Place& place) {
    // Each CTA of a launch claims once without getting a unit, and the last of these claims resets the counter.
    const u32 number = atomicInc(&queue->claimed, queue->num_units + gridDim.x - 1);
    place.pass = 0;
    place.parity = 0;
    place.done = number >= queue->num_units;
    if (place.done) return;
    const QueuedUnit unit = units[number];
    tile_cell = unit.cell;
    WorkItem item = plan_items(params.plan)[unit.item];
    item.partial_row = unit.partial_row;
    place.item = item;
    place.unit = make_unit(params, item, tile_q, unit.row_tile * tile_q, unit.kv_head);
  }
};

}  // namespace flashpage
