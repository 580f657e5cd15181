// Loads K and V row by row (cp.async), from pages of any size.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/query.h"

namespace flashpage {

template <class Traits>
struct RowLoading : QueryLoader<Traits> {
  using Base = QueryLoader<Traits>;
  using Base::params;
  using Base::shared;
  using Base::warp;
  using typename Base::KeyTiles;
  using typename Base::ValueTiles;
  using typename Base::Visits;
  using typename Base::Warps;

  using Base::Base;

  FP_DEVICE void run() const {
    if (warp < Warps::row_warps) {
      keys();
    } else {
      values();
    }
  }

  FP_DEVICE void keys() const {
    const KeyTiles tiles(params, params.k, shared.row_tables.keys);
    u32 use = 0;
    this->for_each_tile(tiles, [&](typename KeyTiles::Source& source, const Visits& visits, u32) {
      tiles.find(source);
      shared.key_ring.wait_empty(use);
      if (warp == 0) this->describe_tile(use, visits);
      load_tile(tiles, source, visits, shared.keys, shared.key_ring, use++);
    });
  }
  // The last warp also goes through the plan, one unit ahead, and loads Q.
  FP_DEVICE void values() const {
    const bool is_last = warp == Warps::loading - 1;
    const ValueTiles tiles(params, params.v, shared.row_tables.values);
    u32 use = 0;
    if (is_last) this->begin_plan();
    const u32 units = this->for_each_tile(
        tiles,
        [&](const Place& place, u32 unit_use) {
          if (is_last) this->query_and_plan(place, unit_use);
        },
        [&](typename ValueTiles::Source& source, const Visits& visits, u32) {
          tiles.find(source);
          shared.value_ring.wait_empty(use);
          load_tile(tiles, source, visits, shared.values, shared.value_ring, use++);
        });
    if (is_last) this->store_last_rows(units);
  }

 private:
  template <class Tiles, class Slots, class Ring>
  FP_DEVICE void load_tile(const Tiles& tiles, typename Tiles::Source& source, const Visits& visits, Slots& slots,
                           const Ring& ring, u32 use) const {
    tiles.look_ahead(source, visits.next());
    tiles.load(source, visits.now(), ptx::shared_address(slots[ring.slot(use)]));
    ptx::mbarrier_arrive_after_copies(ring.full_barrier(use));
  }
};

}  // namespace flashpage
