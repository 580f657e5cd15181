// The steps that the loading warps of prefill_sm90 share: passing the plan's units from the warp that goes through the
// plan to all others, and signalling tiles to the computing warps.
#pragma once
#include "flashpage/kernels/prefill_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/load/box_tiles.h"
#include "flashpage/tile/load/converted_tiles.h"
#include "flashpage/tile/load/row_tiles.h"

namespace flashpage {

template <class Traits>
struct LoadingWarp {
  using Shared = PrefillShared<Traits>;
  using Warps = PrefillWarps<Traits>;
  template <class Rows>
  using TilesOf = typename select_type<Warps::by_rows, RowTiles<Traits, Rows, Traits::tile_kv, Warps::row_warps>,
                                       BoxTiles<Traits, Rows, Traits::tile_kv>>::type;
  using KeyTiles = TilesOf<typename Shared::Keys>;
  using ValueTiles = TilesOf<typename Shared::ValueBoxes>;
  using BothTiles = ConvertedTiles<Traits, Traits::tile_kv>;
  using Turns = TilesInTurn<Traits>;
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
    }
    __syncwarp();
  }
  // Called by one lane. Places are written in shared memory, because a place takes many registers.
  FP_DEVICE void publish(u32 turn) const {
    shared.place_ring.wait_empty(turn);
    TiledPlace& to = shared.places[shared.place_ring.slot(turn)];
    if (turn == 0) {
      shared.cursor.first(params, unit_rows(), to.place);
    } else {
      shared.cursor.next(params, unit_rows(), 1, shared.places[shared.place_ring.slot(turn - 1)].place, to.place);
    }
    const Unit& unit = to.place.unit;
    i32 first_token = 0;
    if constexpr (has_mask_tiles<Traits>) {
      to.tile_cell = shared.cursor.tile_cell;
      if constexpr (has_lane_bits<Traits>) to.lane_bits = LaneBits::begin_of(params.lane_bits, to.place.item, tokens);
    } else {
      first_token = extent_of(unit).first_token;
    }
    to.tokens = {first_token, unit.kv_end, unit.all_begin, unit.all_end - tokens};
    ptx::mbarrier_arrive(shared.place_ring.full_barrier(turn));
  }

  // Calls begin(place, unit_use) for every unit and load(source, visits, unit_use) for every tile of it. Returns the
  // number of units.
  template <class Tiles, class Begin, class Load>
  FP_DEVICE u32 for_each_tile(const Tiles& tiles, Begin&& begin, Load&& load) const {
    for (u32 unit_turn = 0;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_turn)];
      if (tiled.place.done) return unit_turn;
      begin(tiled.place, unit_turn);
      typename Tiles::Source source = tiles.open(tiled.place);
      Turns turns(mask_tiles, tiled.tile_cell, tiled.place.unit, tokens, source.tiles);
      tiles.look_ahead(source, turns.now(), turns.next());
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_turn);
      for (; turns.more(); turns.step()) load(source, turns, unit_turn);
    }
  }
  FP_DEVICE void for_each_tile(const auto& tiles, auto&& load) const {
    for_each_tile(tiles, [](const Place&, u32) {}, load);
  }

  // Describes a tile of K to the computing warps; called before the tile is signalled.
  FP_DEVICE void tell(u32 turn, const Turns& turns) const {
    if constexpr (has_mask_tiles<Traits>) {
      if (lane == 0) {
        shared.visited[shared.key_ring.slot(turn)] = turns.visited();
        if (Warps::by_rows) ptx::mbarrier_arrive(shared.key_ring.full_barrier(turn));
      }
      __syncwarp();
    }
  }
  FP_DEVICE void release_place(u32 unit_turn) const {
    __syncwarp();
    if (lane == 0) shared.place_ring.release(ptx::opaque(unit_turn));
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

  FP_DEVICE TileExtent extent_of(const Unit& unit) const {
    if constexpr (Warps::converts) {
      return BothTiles::extent(params, unit);
    } else if constexpr (Warps::by_rows) {
      return KeyTiles::extent(unit);
    } else {
      return KeyTiles(params, maps.k).extent(unit);
    }
  }
};

}  // namespace flashpage
