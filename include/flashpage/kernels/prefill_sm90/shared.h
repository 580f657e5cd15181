// The roles of the warps of prefill_sm90, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/converted_tiles.h"
#include "flashpage/tile/load/prefill_rows.h"
#include "flashpage/tile/load/transposed_values.h"
#include "flashpage/tile/mask/unit_queue.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/rope/rotated_rows.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Releases a tile that a warp has read to the loading warps of all CTAs of the cluster, which load it together.
template <class Traits, class Ring>
FP_DEVICE void release_tile(const Ring& ring, u32 use, int lane) {
  if constexpr (Traits::ctas == 1) {
    if (lane == 0) ring.release(use);
  } else {
    if (lane < Traits::ctas) ring.release_to(use, lane);
  }
}

template <class Traits>
struct PrefillWarps {
  static constexpr bool by_rows = Traits::loader == Loader::rows;
  static constexpr bool converts = Traits::loader == Loader::converted;
  static constexpr bool transposes = Traits::loader == Loader::transposed;
  static constexpr bool by_columns = Traits::loader == Loader::columns;  // V lies in rows of columns already
  static constexpr bool multiplies_fp8 = transposes || by_columns;
  static constexpr bool by_boxes = Traits::loader == Loader::boxes || multiplies_fp8;
  static constexpr bool rotates = Shape<Traits>::rotate;  // Q and K, in place
  static_assert(!rotates || Traits::loader == Loader::boxes || by_rows);
  static constexpr int loading = 4;  // a warpgroup, because setmaxnreg works on warpgroups
  static constexpr int computing = Traits::warps_q;
  static constexpr int groups = computing / 4;  // warpgroups
  static constexpr int group_rows = 64;         // of each group, the height of its products
  static constexpr int threads = 32 * (loading + computing);
  static_assert(Traits::ctas == 1 || (Traits::ctas == 2 && by_boxes));
  static constexpr int row_warps = 2;    // warps that load K, or V, by rows
  static constexpr int transposing = 2;  // warps that transpose V
  static constexpr int tile_arrivals = by_rows    ? 32 * row_warps
                                       : converts ? loading
                                                  : 1;  // arrivals for a tile of K or V
  static constexpr int value_arrivals = transposes ? transposing : tile_arrivals;
  static constexpr int key_arrivals = rotates ? loading : tile_arrivals + (by_rows && has_mask_tiles<Traits> ? 1 : 0);
  static constexpr int query_arrivals = converts || rotates ? loading : 32;
  static constexpr int place_readers =  // the loading warps that read places are included
      computing + (by_columns || (Traits::loader == Loader::boxes && !rotates) ? 3 : 4);
  // Three warpgroups of wide heads, as soft caps have them, leave 32.
  static constexpr int loading_registers = rotates                                                           ? 88
                                           : groups == 3 && Traits::head_dim_vo > 96 && Traits::tile_kv > 64 ? 32
                                                                                                             : 56;
  // An SM has 512 registers for a thread of each warpgroup together; setmaxnreg takes multiples of eight.
  static constexpr int computing_registers = (512 / Traits::ctas_per_sm - loading_registers) / groups / 8 * 8;
  static_assert(groups == 2 || (groups <= 3 && !converts && !multiplies_fp8 && !rotates));
};

// Token numbers that computing warps read with each tile.
struct alignas(16) UnitTokens {
  i32 first;  // of the first tile; may be before the unit's first token
  i32 end;
  i32 clear_begin;  // tiles that start from clear_begin to clear_end need no mask
  i32 clear_end;
};

// A unit that the loading warps pass to the computing ones.
struct TiledPlace {
  UnitTokens tokens;
  Place place;
  u32 tile_cell;  // cell of the row tile's first tile
  u8* lane_bits;  // bits of the request's mixed tiles
};

// The destination of a unit's output that waits in its slot of query_ring until the warp that loads the next Q stores
// it.
struct WaitingRows {
  i32 row;  // first row of out; none: computing warps store the rows themselves
  i32 head;
  static constexpr i32 none = -1;
};

// Staged fp8 rows on their way to the ring; empty if tiles are loaded as they are multiplied.
template <class Traits, Loader loader>
struct PrefillStaged {
  using Values = typename Shape<Traits>::ValueRows;
  using ValueBoxes = Values;  // layout in which the copy engine writes V
  static constexpr int staged_bytes = 0, sum_bytes = 0;
};
template <class Traits>
struct PrefillStaged<Traits, Loader::converted> {
  using Values = typename Shape<Traits>::ValueRows;
  using ValueBoxes = Values;
  using Tiles = ConvertedTiles<Traits, Traits::tile_kv>;
  static constexpr int staged_bytes = Tiles::warps * sizeof(typename Tiles::Staged), sum_bytes = 0;
  typename Tiles::Staged staged[Tiles::warps];
  typename Tiles::Barriers staged_barriers[Tiles::warps];
};
template <class Traits>
struct PrefillStaged<Traits, Loader::transposed> {
  using Transposed =
      TransposedValues<typename Traits::Cache, Traits::head_dim_vo, Traits::tile_kv, PrefillWarps<Traits>::transposing>;
  using Values = typename Transposed::To;
  using ValueBoxes = typename Transposed::From;
  // Sums over many tiles in fp32 (kernels/prefill_sm90/compute_fp8.h), if there is room.
  static constexpr int sum_bytes = Traits::head_dim_vo <= 128 ? Traits::tile_q * Traits::head_dim_vo * 4 : 0;
  static constexpr int staged_stages = 2, staged_bytes = staged_stages * ValueBoxes::tile_bytes;
  alignas(1024) u8 staged[staged_stages][ValueBoxes::tile_bytes];
  alignas(1024) u8 sums[max_of(sum_bytes, 1)];
  SlotRing<staged_stages> staged_ring;
};

template <class Traits>
struct PrefillStaged<Traits, Loader::columns> {
  using Values = SwizzledRows<typename Traits::Cache, Traits::tile_kv, Traits::head_dim_vo>;
  using ValueBoxes = Values;
  static constexpr int sum_bytes = PrefillStaged<Traits, Loader::transposed>::sum_bytes, staged_bytes = 0;
  alignas(1024) u8 sums[max_of(sum_bytes, 1)];
};

// Addresses of rows that are copied one by one; empty for other loaders.
template <class Traits, bool by_rows>
struct PrefillRowTables {};
template <class Traits>
struct PrefillRowTables<Traits, true> {
  static constexpr int warps = PrefillWarps<Traits>::row_warps;
  typename PrefillRows<Traits, typename Shape<Traits>::KeyRows, Traits::tile_kv, warps>::Table keys[warps];
  typename PrefillRows<Traits, typename Shape<Traits>::ValueRows, Traits::tile_kv, warps>::Table values[warps];
};

// The steps of the rotation, and barriers of K and Q that have arrived but are not rotated yet; empty without RoPE.
template <class Traits, int key_stages, int queries, bool rotates>
struct PrefillRotation {
  FP_DEVICE void init() {}
};
template <class Traits, int key_stages, int queries>
struct PrefillRotation<Traits, key_stages, queries, true> {
  using Warps = PrefillWarps<Traits>;
  RotationSteps<Traits::head_dim_qk / 2> steps;
  SlotRing<key_stages> landed_keys;  // never released by themselves: key_ring and query_ring release the slots
  SlotRing<queries> landed_queries;

  // Called by one thread.
  FP_DEVICE void init() {
    landed_keys.init(Warps::by_rows ? 32 * Warps::row_warps : 1, 1);
    landed_queries.init(32, 1);
  }
};

template <class Traits>
struct PrefillShared : PrefillStaged<Traits, Traits::loader> {
  using S = Shape<Traits>;
  using Warps = PrefillWarps<Traits>;
  static constexpr int tokens = Traits::tile_kv, stages = Traits::stages;
  static constexpr int key_stages = stages + (Warps::rotates ? 1 : 0);  // one is multiplied, one rotated, one loaded
  using Keys = typename S::KeyRows;
  using Values = typename PrefillShared::PrefillStaged::Values;
  using QueryRows = SwizzledRows<typename S::Query, Traits::head_dim_qk, Traits::tile_q>;
  using OutRows = SwizzledRows<typename Traits::Out, Traits::head_dim_vo, Traits::tile_q>;
  // A group's output replaces its rows of Q, or their sums, on the way to whole lines of the output.
  static constexpr int query_bytes =
      PrefillShared::sum_bytes > 0 ? QueryRows::tile_bytes : max_of(QueryRows::tile_bytes, OutRows::tile_bytes);
  static constexpr int extra_bytes = PrefillShared::staged_bytes + PrefillShared::sum_bytes;
  static constexpr int ring_bytes = key_stages * Keys::tile_bytes + stages * Values::tile_bytes;
  static constexpr int most_bytes = cta_shared_bytes(Traits::ctas_per_sm);
  static constexpr int places_ahead = 4;  // units known to the loading warps, the current one included
  using RowTables = PrefillRowTables<Traits, Warps::by_rows>;
  static constexpr int other_bytes = PrefillShared::extra_bytes + (Warps::by_rows ? sizeof(RowTables) : 0) + 2048;
  static constexpr int queries =
      2 * query_bytes + ring_bytes + other_bytes <= most_bytes ? 2 : 1;  // Q tiles in shared memory
  // TMA stores of the output need a second Q buffer (with one, the next Q is loaded right away). fp8 keeps its output
  // in `sums`, and loaders that convert or rotate Q have no registers for it.
  static constexpr bool leaves_by_boxes = queries > 1 && !Warps::converts && !Warps::multiplies_fp8 && !Warps::rotates;

  alignas(1024) u8 query[queries][query_bytes];
  alignas(1024) u8 keys[key_stages][Keys::tile_bytes];
  alignas(1024) u8 values[stages][Values::tile_bytes];
  TiledPlace places[places_ahead];
  typename select_type<has_mask_tiles<Traits>, QueueCursor, PlaceCursor>::type
      cursor;  // of the warp that goes through the plan
  SlotRing<key_stages> key_ring;
  SlotRing<stages> value_ring;
  SlotRing<places_ahead> place_ring;
  SlotRing<queries> query_ring;
  // One barrier for each slot if another CTA writes to it too, because that CTA may be a tile ahead.
  static constexpr int edges = Traits::ctas == 1 ? 1 : stages;
  u64 edge[edges];  // barriers of a tile of values that the loading warp clears before it signals it
  WaitingRows waiting_rows[leaves_by_boxes ? queries : 1];
  float query_factors[Warps::converts ? queries : 1][Traits::tile_q / 16];  // factors of the scores of sixteen rows
  typename select_type<has_mask_tiles<Traits>, VisitedTile[stages], NextTile>::type
      visited;  // for each slot of key_ring
  RowTables row_tables;
  PrefillRotation<Traits, key_stages, queries, Warps::rotates> rotation;

  // Whether the loading warp stores this CTA's rows of a unit: only whole units of the output. Computing and loading
  // warps both decide by this. `cta_row`: the CTA's first row in the unit.
  FP_DEVICE static bool leave_by_boxes(const AttentionParams& params, const WorkItem& item, const Unit& unit,
                                       int cta_row) {
    return leaves_by_boxes && params.out_box_rows > 0 && item.partial_row < 0 &&
           unit.num_rows - cta_row >= params.cta_rows;
  }
};

template <class Traits>
struct FitsNextToTwoQueries {
  static constexpr bool value = PrefillShared<Traits>::queries > 1;
};

// Given with the stages that the kernel uses. Loading warps that convert K and V also convert Q, and no keys while they
// do; a third stage covers that gap. It is used if it fits next to two Q tiles; the same holds if V is transposed.
// Other loaders have Given::stages.
template <class Given>
struct PrefillStages {
  static constexpr bool may_take_fewer = PrefillWarps<Given>::converts || PrefillWarps<Given>::multiplies_fp8;
  static constexpr int least = may_take_fewer ? min_of(Given::stages, 2) : Given::stages;
  using Traits = WithStages<Given, fitting_stages<FitsNextToTwoQueries, Given, Given::stages, 1, least>()>;
};

}  // namespace flashpage
