// Loads 16-bit or fp8 K and V with the copy engine as they are multiplied; K, V, Q and the plan have a warp each.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/query.h"
#include "flashpage/tile/mask/prefetched_bits.h"

namespace flashpage {

template <class Traits>
struct BoxLoading : QueryLoader<Traits> {
  using Base = QueryLoader<Traits>;
  using Base::lane;
  using Base::maps;
  using Base::mask_tiles;
  using Base::params;
  using Base::shared;
  using Base::tokens;
  using Base::warp;
  using typename Base::KeyTiles;
  using typename Base::Shared;
  using typename Base::Turns;
  using typename Base::ValueTiles;

  using Base::Base;

  FP_DEVICE void run() const {
    if (warp == 0) keys();
    if (warp == 1) values();
    if (warp == 2) query();
    if (warp == 3) plan();
  }

  FP_DEVICE void keys() const {
    const KeyTiles tiles(params, maps.k);
    u32 turn = 0;
    this->for_each_tile(tiles, [&](typename KeyTiles::Source& source, Turns& turns, u32 unit_turn) {
      ask_for_bits(unit_turn, turns);
      shared.key_ring.wait_empty(turn);
      this->tell(turn, turns);
      tiles.load(source, turns.ahead(), ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]),
                 shared.key_ring.full_barrier(turn));
      ++turn;
    });
  }

  FP_DEVICE void values() const {
    const ValueTiles tiles(params, maps.v);
    u32 turn = 0, phases = 0;  // phases: of the edge barriers, a bit for each
    this->for_each_tile(tiles, [&](typename ValueTiles::Source& source, Turns& turns, u32) {
      shared.value_ring.wait_empty(turn);
      const u32 slot = shared.value_ring.slot(turn), edge_slot = slot % Shared::edges;
      u8* to = shared.values[slot];
      const u32 full = shared.value_ring.full_barrier(turn++), edge = ptx::shared_address(&shared.edge[edge_slot]);
      const bool has_hidden = tiles.has_hidden(source, turns.now());
      tiles.load(source, turns.ahead(), ptx::shared_address(to), has_hidden ? edge : full);
      if (!has_hidden) return;
      ptx::mbarrier_wait(edge, phases >> edge_slot & 1);  // a probability of zero would not hide NaN
      phases ^= 1 << edge_slot;
      tiles.clear_hidden(source, turns.now(), to);
      if (lane == 0) ptx::mbarrier_arrive(full);
    });
  }

  FP_DEVICE void query() const {
    for (u32 turn = 0;; ++turn) {
      shared.place_ring.wait_full(turn);
      const Place& place = shared.places[shared.place_ring.slot(turn)].place;
      if (place.done) return this->store_last_rows(turn);
      this->load_query(place, turn);
      __syncwarp();
      if (lane == 0) shared.place_ring.release(turn);
    }
  }
  FP_DEVICE void plan() const {
    this->begin_plan();
    if (lane != 0) return;
    for (u32 turn = 0; !shared.places[shared.place_ring.slot(turn)].place.done; ++turn) this->publish(turn + 1);
  }

 private:
  // Prefetches the mask's bits of a mixed tile, before the tile's slot is free. The place is still valid, because the
  // unit's computing warps wait for this tile.
  FP_DEVICE void ask_for_bits(u32 unit_turn, const Turns& turns) const {
    if constexpr (has_lane_bits<Traits>) {
      if (!turns.is_mixed()) return;
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_turn)];
      const LaneBits bits(tiled.lane_bits, tiled.place.item.kv_len, tokens);
      flashpage::ask_for_bits(params, bits, tiled.place.unit, this->first_row(), turns.now(), lane);
    }
  }
};

}  // namespace flashpage
