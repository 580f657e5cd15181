// Loads e4m3 K and V with the copy engine and transposes V.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/boxes.h"

namespace flashpage {

template <class Traits>
struct TransposedLoading : BoxLoading<Traits> {
  using Base = BoxLoading<Traits>;
  using Base::lane;
  using Base::maps;
  using Base::params;
  using Base::shared;
  using Base::warp;
  using typename Base::Shared;
  using typename Base::ValueTiles;
  using typename Base::Visits;
  using typename Base::Warps;

  using Base::Base;

  FP_DEVICE void run() const {
    if (warp == 0) this->keys();
    if (warp == 1) values();
    if (warp >= 2) transpose();
  }

  // Loads V to the buffers from which it is transposed. The same warp goes through the plan, one unit ahead, and loads
  // Q.
  FP_DEVICE void values() const {
    const ValueTiles tiles(params, maps.v);
    u32 use = 0;
    this->begin_plan();
    this->for_each_tile(
        tiles, [&](const Place& place, u32 unit_use) { this->query_and_plan(place, unit_use); },
        [&](typename ValueTiles::Source& source, Visits& visits, u32) {
          shared.staged_ring.wait_empty(use);
          tiles.load(source, visits.now(), visits.ahead(),
                     ptx::shared_address(shared.staged[shared.staged_ring.slot(use)]),
                     shared.staged_ring.full_barrier(use));
          ++use;
        });
  }
  FP_DEVICE void transpose() const {
    using Transposed = typename Shared::Transposed;
    const ValueTiles tiles(params, maps.v);
    u32 use = 0;
    this->for_each_tile(tiles, [&](typename ValueTiles::Source& source, Visits& visits, u32) {
      u8* from = shared.staged[shared.staged_ring.slot(use)];
      shared.staged_ring.wait_full(use);
      if (tiles.has_hidden(source, visits.now()))  // a probability of zero would not hide NaN
        tiles.clear_hidden(source, visits.now(), from, warp % Warps::transposing, Warps::transposing);
      shared.value_ring.wait_empty(use);
      Transposed::transpose(ptx::shared_address(from), ptx::shared_address(shared.values[shared.value_ring.slot(use)]),
                            warp % Warps::transposing, own_lane());
      this->hand_over(shared.value_ring.full_barrier(use));
      release_tile<Traits>(shared.staged_ring, use++, lane);
    });
  }

 private:
  // Opaque next to many columns, of which a lane holds more: values that derive from it are then computed where they
  // are used.
  FP_DEVICE int own_lane() const { return Traits::head_dim_vo > 192 ? static_cast<int>(ptx::opaque(lane)) : lane; }
};

}  // namespace flashpage
