// What the warps of prefill_sm90 share: who does what, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/converted_tiles.h"
#include "flashpage/tile/load/row_tiles.h"
#include "flashpage/tile/load/transposed_values.h"
#include "flashpage/tile/mask/unit_queue.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/rope/rotated_rows.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// By a warp that has read a tile: to who loads it, in all CTAs of a cluster, which load it together.
template <class Traits, class Ring>
FP_DEVICE void release_tile(const Ring& ring, u32 turn, int lane) {
  if constexpr (Traits::ctas == 1) {
    if (lane == 0) ring.release(turn);
  } else {
    if (lane < Traits::ctas) ring.release_to(turn, lane);
  }
}

template <class Traits>
struct PrefillWarps {
  static constexpr bool by_rows = Traits::loader == Loader::rows;
  static constexpr bool converts = Traits::loader == Loader::converted;
  static constexpr bool transposes = Traits::loader == Loader::transposed;
  static constexpr bool by_boxes = Traits::loader == Loader::boxes || transposes;
  static constexpr bool rotates = Shape<Traits>::rotate;  // Q and K, where they lie
  static_assert(!rotates || Traits::loader == Loader::boxes || by_rows);
  static constexpr int loading = 4;  // a warpgroup: registers are given by warpgroups
  static constexpr int computing = Traits::warps_q;
  static constexpr int groups = computing / 4;  // warpgroups
  static constexpr int group_rows = 64;         // of each, the height of its products
  static constexpr int threads = 32 * (loading + computing);
  static_assert(Traits::ctas == 1 || (Traits::ctas == 2 && by_boxes));
  static constexpr int row_warps = 2;    // that load K, or V, by rows
  static constexpr int transposing = 2;  // that transpose V, where they do
  static constexpr int tile_arrivals = by_rows ? 32 * row_warps : converts ? loading : 1;  // at a tile of K or V
  static constexpr int value_arrivals = transposes ? transposing : tile_arrivals;
  static constexpr int key_arrivals = rotates ? loading : tile_arrivals + (by_rows && has_mask_tiles<Traits> ? 1 : 0);
  static constexpr int query_arrivals = converts || rotates ? loading : 32;
  static constexpr int place_readers =  // those that load too
      computing + (Traits::loader == Loader::boxes && !rotates ? 3 : 4);
  static constexpr int loading_registers = rotates ? 88 : 56;
  // An SM has 512 for a thread of each warpgroup together; they are given and taken in eights.
  static constexpr int computing_registers = (512 / Traits::ctas_per_sm - loading_registers) / groups / 8 * 8;
  static_assert(groups == 2 || (groups <= 3 && !converts && !transposes && !rotates));
};

// What computing warps look at with each tile.
struct alignas(16) UnitTokens {
  i32 first;  // of the first tile; it may lie before the unit's first token
  i32 end;
  i32 clear_begin;  // tiles that start from here to clear_end need no mask
  i32 clear_end;
};

// A unit on its way from the loading warps to the computing ones.
struct TiledPlace {
  UnitTokens tokens;
  Place place;
  u32 tile_cell;  // where tiles are looked up: of the row block's
  u8* lane_bits;  // of the request's mixed tiles
};

// Where a unit's output goes that waits in its slot of query_ring, for who loads the next Q there to store it.
struct WaitingRows {
  i32 row;  // of out, the first one; none: computing warps store the rows themselves
  i32 head;
  static constexpr i32 none = -1;
};

// fp8 rows on their way to the ring; nothing where they come as they are multiplied.
template <class Traits, Loader loader>
struct PrefillStaged {
  using Values = typename Shape<Traits>::ValueRows;
  using ValueBoxes = Values;  // what the copy engine brings
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
  // Sums over many tiles in fp32 (kernels/prefill_sm90/compute_fp8.h), where there is room.
  static constexpr int sum_bytes = Traits::head_dim_vo <= 128 ? Traits::tile_q * Traits::head_dim_vo * 4 : 0;
  static constexpr int staged_stages = 2, staged_bytes = staged_stages * ValueBoxes::tile_bytes;
  alignas(1024) u8 staged[staged_stages][ValueBoxes::tile_bytes];
  alignas(1024) u8 sums[max_of(sum_bytes, 1)];
  SlotRing<staged_stages> staged_ring;
};

// Where rows lie that are copied one by one; nothing where none are.
template <class Traits, bool by_rows>
struct PrefillRowTables {};
template <class Traits>
struct PrefillRowTables<Traits, true> {
  static constexpr int warps = PrefillWarps<Traits>::row_warps;
  typename RowTiles<Traits, typename Shape<Traits>::KeyRows, Traits::tile_kv, warps>::Table keys[warps];
  typename RowTiles<Traits, typename Shape<Traits>::ValueRows, Traits::tile_kv, warps>::Table values[warps];
};

// What Q and K are rotated by, and barriers of those that have come but are not rotated; nothing where none are.
template <class Traits, int key_stages, int queries, bool rotates>
struct PrefillRotation {
  FP_DEVICE void init() {}
};
template <class Traits, int key_stages, int queries>
struct PrefillRotation<Traits, key_stages, queries, true> {
  using Warps = PrefillWarps<Traits>;
  TurnSteps<Traits::head_dim_qk / 2> steps;
  SlotRing<key_stages> landed_keys;  // nobody gives these slots back: key_ring and query_ring have them
  SlotRing<queries> landed_queries;

  // By one thread.
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
  using QueryRows = BlockRows<typename S::Query, Traits::head_dim_qk, Traits::tile_q>;
  using OutRows = BlockRows<typename Traits::Out, Traits::head_dim_vo, Traits::tile_q>;
  // A group's output takes the place of its rows of Q, or of their sums, on the way to whole lines of the output.
  static constexpr int query_bytes =
      PrefillShared::sum_bytes > 0 ? QueryRows::tile_bytes : max_of(QueryRows::tile_bytes, OutRows::tile_bytes);
  static constexpr int beside_bytes = PrefillShared::staged_bytes + PrefillShared::sum_bytes;
  static constexpr int ring_bytes = key_stages * Keys::tile_bytes + stages * Values::tile_bytes;
  static constexpr int most_bytes = cta_shared_bytes(Traits::ctas_per_sm);
  static constexpr int places_ahead = 4;  // units that are known, of the one that is computed on
  using RowTables = PrefillRowTables<Traits, Warps::by_rows>;
  static constexpr int other_bytes = PrefillShared::beside_bytes + (Warps::by_rows ? sizeof(RowTables) : 0) + 2048;
  static constexpr int queries = 2 * query_bytes + ring_bytes + other_bytes <= most_bytes ? 2 : 1;  // whose Q is there
  // With one Q alone the next one is wanted where the output is; fp8's output lies among sums; loaders that convert or
  // rotate Q have enough to do.
  static constexpr bool leaves_by_boxes = queries > 1 && !Warps::converts && !Warps::transposes && !Warps::rotates;

  alignas(1024) u8 query[queries][query_bytes];
  alignas(1024) u8 keys[key_stages][Keys::tile_bytes];
  alignas(1024) u8 values[stages][Values::tile_bytes];
  TiledPlace places[places_ahead];
  typename select_type<has_mask_tiles<Traits>, QueueCursor, PlaceCursor>::type cursor;  // of who walks the plan
  SlotRing<key_stages> key_ring;
  SlotRing<stages> value_ring;
  SlotRing<places_ahead> place_ring;
  SlotRing<queries> query_ring;
  // A slot's own where another CTA writes to it too: it may be a tile ahead of this one.
  static constexpr int edges = Traits::ctas == 1 ? 1 : stages;
  u64 edge[edges];  // barrier of a tile of values that the loading warp clears before it hands it over
  WaitingRows waiting_rows[leaves_by_boxes ? queries : 1];
  float query_factors[Warps::converts ? queries : 1][Traits::tile_q / 16];  // of the scores of sixteen rows
  typename select_type<has_mask_tiles<Traits>, VisitedTile[stages], NextTile>::type visited;  // of a slot of key_ring
  RowTables row_tables;
  PrefillRotation<Traits, key_stages, queries, Warps::rotates> rotation;

  // Whether the loading warp stores this CTA's rows of a unit: whole units of the output alone. `cta_row`: of the unit,
  // the CTA's first. Computing warps and the loading warp ask alike.
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

// Given with the stages that the kernel takes. Loading warps that convert K and V also convert Q, and no keys while
// they do; a third stage covers that gap. It is taken if it fits next to two Q tiles, equally where V is transposed.
// Other loaders have Given::stages.
template <class Given>
struct PrefillStages {
  static constexpr bool may_take_fewer = Given::loader == Loader::converted || Given::loader == Loader::transposed;
  static constexpr int least = may_take_fewer ? min_of(Given::stages, 2) : Given::stages;
  using Traits = WithStages<Given, fitting_stages<FitsNextToTwoQueries, Given, Given::stages, 1, least>()>;
};

}  // namespace flashpage
