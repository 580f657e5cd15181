// The steps that the loading warps of prefill_sm90 share: passing the plan's units from the warp that goes through the
// plan to all others, and signalling tiles to the computing warps.
#pragma once
#include "flashpage/kernels/prefill_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/load/column_boxes.h"
#include "flashpage/tile/load/converted_tiles.h"
#include "flashpage/tile/load/prefill_boxes.h"
#include "flashpage/tile/load/prefill_rows.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct LoadingWarp {
  using Shared = PrefillShared<Traits>;
  using Warps = PrefillWarps<Traits>;
  template <class Rows>
  using TilesOf = typename select_type<Warps::by_rows, PrefillRows<Traits, Rows, Traits::tile_kv, Warps::row_warps>,
                                       PrefillBoxes<Traits, Rows, Traits::tile_kv>>::type;
  using KeyTiles = TilesOf<typename Shared::Keys>;
  using ValueTiles = typename select_type<Warps::by_columns, ColumnBoxes<Traits, typename Shared::ValueBoxes>,
                                          TilesOf<typename Shared::ValueBoxes>>::type;
  using BothTiles = ConvertedTiles<Traits, Traits::tile_kv>;
  using Visits = TileVisits<Traits>;
  static constexpr int tokens = Shared::tokens;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  const MaskTilesParams& mask_tiles;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE LoadingWarp(Shared& shared, const AttentionParams& params, const KvMaps& maps,
                        const MaskTilesParams& mask_tiles)
      : shared(shared), params(params), maps(maps), mask_tiles(mask_tiles) {}

  FP_DEVICE void begin_plan() const {
    if (lane == 0) {
      if constexpr (has_mask_tiles<Traits>) {
        shared.cursor.start(mask_tiles);
      } else {
        shared.cursor.start(params.plan, blockIdx.x / Traits::ctas);
      }
      publish(0);
      stamp<Traits>(params, Stamp::plan_known);
    }
    __syncwarp();
  }
  // Called by one lane. Places are written in shared memory, because a place takes many registers.
  FP_DEVICE void publish(u32 use) const {
    shared.place_ring.wait_empty(use);
    TiledPlace& to = shared.places[shared.place_ring.slot(use)];
    if (use == 0) {
      shared.cursor.first(params, unit_rows(), to.place);
    } else {
      shared.cursor.next(params, unit_rows(), 1, shared.places[shared.place_ring.slot(use - 1)].place, to.place);
    }
    const Unit& unit = to.place.unit;
    i32 first_token = 0;
    if constexpr (has_mask_tiles<Traits>) {
      to.tile_cell = shared.cursor.tile_cell;
      if constexpr (has_lane_bits<Traits>) to.lane_bits = LaneBits::begin_of(params.lane_bits, to.place.item, tokens);
    } else {
      first_token = extent_of(to.place).first_token;
    }
    to.tokens = {first_token, unit.kv_end, unit.all_begin, unit.all_end - tokens};
    ptx::mbarrier_arrive(shared.place_ring.full_barrier(use));
  }

  // Calls begin(place, unit_use) for every unit and load(source, visits, unit_use) for every tile of it. Returns the
  // number of units.
  template <class Tiles, class Begin, class Load>
  FP_DEVICE u32 for_each_tile(const Tiles& tiles, Begin&& begin, Load&& load) const {
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_use)];
      if (tiled.place.done) return unit_use;
      begin(tiled.place, unit_use);
      typename Tiles::Source source = tiles.open(tiled.place);
      Visits visits(mask_tiles, tiled.tile_cell, tiled.place.unit, tokens, source.tiles);
      tiles.look_ahead(source, visits.now(), visits.next());
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_use);
      for (; visits.more(); visits.step()) {
        load(source, visits, unit_use);
        if (lane == 0) stamp_first<Traits>(params, Stamp::first_load);
      }
    }
  }
  FP_DEVICE void for_each_tile(const auto& tiles, auto&& load) const {
    for_each_tile(tiles, [](const Place&, u32) {}, load);
  }

  // Describes a tile of K to the computing warps; called before the tile is signalled.
  FP_DEVICE void describe_tile(u32 use, const Visits& visits) const {
    if constexpr (has_mask_tiles<Traits>) {
      if (lane == 0) {
        shared.visited[shared.key_ring.slot(use)] = visits.visited();
        if (Warps::by_rows) ptx::mbarrier_arrive(shared.key_ring.full_barrier(use));
      }
      __syncwarp();
    }
  }
  FP_DEVICE void release_place(u32 unit_use) const {
    __syncwarp();
    if (lane == 0) shared.place_ring.release(ptx::opaque(unit_use));
  }
  // Signals data that the warp has written.
  FP_DEVICE void hand_over(u32 barrier) const {
    ptx::fence_before_products();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // The first row of the unit that belongs to this CTA.
  FP_DEVICE int first_row() const {
    if constexpr (Traits::ctas == 1) return 0;
    return static_cast<int>(ptx::cluster_rank()) * params.cta_rows;
  }
  FP_DEVICE i32 unit_rows() const { return params.cta_rows * Traits::ctas; }

  FP_DEVICE TileExtent extent_of(const Place& place) const {
    if constexpr (Warps::converts) {
      return BothTiles::extent(params, place.unit);
    } else if constexpr (Warps::by_rows) {
      return KeyTiles::extent(place.unit);
    } else {
      return KeyTiles(params, maps.k).extent(place);
    }
  }
};

}  // namespace flashpage
