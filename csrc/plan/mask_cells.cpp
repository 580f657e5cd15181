// The size of a batch's mask tiles in memory, and the offsets of their parts.
#include "flashpage/plan/mask_cells.h"

#include "flashpage.h"
#include "flashpage/plan/lanes.h"

using namespace flashpage;

// An upper bound of the units of any plan within these sizes, including the pieces of cut units.
static i64 most_units(const fp_masked_batch& batch, i64 group, const fp_schedule& schedule) {
  const i64 units = batch.num_kv_heads * (batch.rows * group / schedule.tile_q + batch.requests);
  // In each wave, a CTA's share may begin and end inside a unit.
  if (schedule.fixed_piece_tokens == 0) return units + 2 * plan::max_waves * schedule.num_ctas;
  if (schedule.fixed_piece_tokens < 0) return units;
  // A unit of t tokens adds at most t / piece. A request of q rows and t tokens has q * t bits and some rows, or the
  // cells of its units' tokens.
  const i64 tokens_of_units = 8 * batch.mask_bytes * (group + schedule.tile_q) / schedule.tile_q +
                              batch.tile_cells * cell_tiles * schedule.tile_kv;
  return units + batch.num_kv_heads * (tokens_of_units / schedule.fixed_piece_tokens + 1);
}

int64_t fp_mask_cells(const fp_masked_batch* batch, const fp_schedule* schedule, MaskTilesParams* params) {
  const i32 group = batch->num_q_heads / batch->num_kv_heads;
  const i64 tile_cells = batch->has_custom_mask
                             ? mask_tile_cells(batch->mask_bytes, batch->rows, batch->requests, group)
                             : batch->tile_cells;
  const i64 cells = unit_cells * most_units(*batch, group, *schedule);
  params->queue_begin = round_up<i64>(first_tile_cell + batch->tile_heads * tile_cells, unit_cells);
  params->list_begin = params->queue_begin + cells;
  params->group = make_fast_div(group);
  params->tile_q = schedule->tile_q;
  params->tile_kv = schedule->tile_kv;
  params->tile_heads = batch->tile_heads;
  params->lanes_begin = params->list_begin + cells;
  if (!batch->has_custom_mask) return params->lanes_begin;
  const i64 tiles = row_tiles_before(batch->mask_bytes, batch->rows, schedule->tile_kv);
  return params->lanes_begin + tiles * 4 * lane_word_bytes(schedule->tile_kv) / 8;
}
