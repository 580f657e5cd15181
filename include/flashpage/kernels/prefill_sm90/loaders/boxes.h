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
  using typename Base::ValueTiles;
  using typename Base::Visits;

  using Base::Base;

  FP_DEVICE void run() const {
    if (warp == 0) keys();
    if (warp == 1) values();
    if (warp == 2) query();
    if (warp == 3) plan();
  }

  FP_DEVICE void keys() const {
    const KeyTiles tiles(params, maps.k);
    u32 use = 0;
    this->for_each_tile(tiles, [&](typename KeyTiles::Source& source, Visits& visits, u32 unit_use) {
      prefetch_bits(unit_use, visits);
      shared.key_ring.wait_empty(use);
      this->describe_tile(use, visits);
      tiles.load(source, visits.now(), visits.ahead(), ptx::shared_address(shared.keys[shared.key_ring.slot(use)]),
                 shared.key_ring.full_barrier(use));
      ++use;
    });
  }

  FP_DEVICE void values() const {
    const ValueTiles tiles(params, maps.v);
    u32 use = 0, phases = 0;  // phases: of the edge barriers, a bit for each
    this->for_each_tile(tiles, [&](typename ValueTiles::Source& source, Visits& visits, u32) {
      shared.value_ring.wait_empty(use);
      const bool has_hidden = tiles.has_hidden(source, visits.now());
      const u32 slot = shared.value_ring.slot(use);
      tiles.load(source, visits.now(), visits.ahead(), ptx::shared_address(shared.values[slot]),
                 has_hidden ? edge_of(slot) : shared.value_ring.full_barrier(use));
      // A probability of zero would not hide NaN.
      if (has_hidden) phases = clear_hidden(tiles, source, visits.now(), ptx::opaque(use), phases);
      ++use;
    });
  }

  FP_DEVICE void query() const {
    for (u32 use = 0;; ++use) {
      shared.place_ring.wait_full(use);
      const Place& place = shared.places[shared.place_ring.slot(use)].place;
      if (place.done) return this->store_last_rows(use);
      this->load_query(place, use);
      __syncwarp();
      if (lane == 0) shared.place_ring.release(use);
    }
  }
  FP_DEVICE void plan() const {
    this->begin_plan();
    if (lane != 0) return;
    for (u32 use = 0; !shared.places[shared.place_ring.slot(use)].place.done; ++use) this->publish(use + 1);
  }

 private:
  FP_DEVICE u32 edge_of(u32 slot) const { return ptx::shared_address(&shared.edge[slot % Shared::edges]); }

  // Waits for a tile of values, clears its tokens that the unit does not see, and hands it over. Returns the next
  // phases.
  FP_DEVICE u32 clear_hidden(const ValueTiles& tiles, const typename ValueTiles::Source& source, int tile, u32 use,
                             u32 phases) const {
    const u32 slot = shared.value_ring.slot(use), edge_slot = slot % Shared::edges;
    ptx::mbarrier_wait(edge_of(slot), phases >> edge_slot & 1);
    tiles.clear_hidden(source, tile, shared.values[slot]);
    if (lane == 0) ptx::mbarrier_arrive(shared.value_ring.full_barrier(use));
    return phases ^ 1 << edge_slot;
  }

  // Prefetches the mask's bits of a mixed tile, before the tile's slot is free. The place is still valid, because the
  // unit's computing warps wait for this tile.
  FP_DEVICE void prefetch_bits(u32 unit_use, const Visits& visits) const {
    if constexpr (has_lane_bits<Traits>) {
      if (!visits.is_mixed()) return;
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_use)];
      const LaneBits bits(tiled.lane_bits, tiled.place.item.kv_len, tokens);
      flashpage::prefetch_bits(params, bits, tiled.place.unit, this->first_row(), visits.now(), lane);
    }
  }
};

}  // namespace flashpage
