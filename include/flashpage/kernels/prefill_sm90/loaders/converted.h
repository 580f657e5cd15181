// Loads fp8 K and V and converts them to fp16: all four warps convert Q, K and V.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/common.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/load/converted_query.h"
#include "flashpage/tile/load/converted_tiles.h"

namespace flashpage {

template <class Traits>
struct ConvertedLoading : LoadingWarp<Traits> {
  using Base = LoadingWarp<Traits>;
  using Base::lane;
  using Base::maps;
  using Base::params;
  using Base::shared;
  using Base::warp;
  using typename Base::BothTiles;
  using typename Base::Shared;
  using typename Base::Warps;

  using Base::Base;

  // All four warps convert Q, K and V in registers; the last one also goes through the plan. The copies of a tile are
  // issued while the tile before is converted, those of a unit's first tile while Q is.
  FP_DEVICE void run() const {
    const BothTiles both(params, maps, shared.staged, shared.staged_barriers);
    if (warp == Warps::loading - 1) this->begin_plan();
    u32 use = 0;
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const Place& place = shared.places[shared.place_ring.slot(unit_use)].place;
      if (place.done) return;
      const bool is_empty = BothTiles::is_empty(place);
      if (!is_empty) issue_first(both, place);
      begin_unit(place, unit_use);
      if (is_empty) {
        this->release_place(unit_use);
        both.skip();
        hand_over_nothing(use++);
        continue;
      }
      typename BothTiles::Source source;
      both.open(source, place, 1);
      this->release_place(unit_use);
      while (true) {
        keys(both, use);
        if (source.left > 0) both.issue_keys(source);
        values(both, source, use++);
        if (source.left == 0) break;
        both.issue_values(source);
      }
    }
  }

 private:
  FP_DEVICE void issue_first(const BothTiles& both, const Place& place) const {
    typename BothTiles::Source source;
    both.open(source, place, 0);
    both.issue_keys(source);
    both.issue_values(source);
  }
  FP_DEVICE void begin_unit(const Place& place, u32 unit_use) const {
    if (warp == Warps::loading - 1 && lane == 0) this->publish(ptx::opaque(unit_use) + 1);
    __syncwarp();
    query(place, ptx::opaque(unit_use));
    __syncwarp();
  }
  FP_DEVICE void keys(const BothTiles& both, u32 use) const {
    shared.key_ring.wait_empty(use);
    both.wait_keys(use);
    both.convert_keys(ptx::shared_address(shared.keys[shared.key_ring.slot(use)]));
    this->hand_over(shared.key_ring.full_barrier(use));
  }
  FP_DEVICE void values(const BothTiles& both, typename BothTiles::Source& source, u32 use) const {
    shared.value_ring.wait_empty(use);
    both.wait_values(use);
    both.convert_values(source, ptx::shared_address(shared.values[shared.value_ring.slot(use)]));
    this->hand_over(shared.value_ring.full_barrier(use));
  }
  FP_DEVICE void hand_over_nothing(u32 use) const {
    shared.key_ring.wait_empty(use);
    this->hand_over(shared.key_ring.full_barrier(use));
    shared.value_ring.wait_empty(use);
    BothTiles::clear_values(ptx::shared_address(shared.values[shared.value_ring.slot(use)]));
    this->hand_over(shared.value_ring.full_barrier(use));
  }
  FP_DEVICE void query(const Place& place, u32 use) const {
    shared.query_ring.wait_empty(use);
    const u32 slot = shared.query_ring.slot(ptx::opaque(use));
    ConvertedQuery<Traits, typename Shared::QueryRows>(params, place)
        .run(ptx::shared_address(shared.query[slot]), shared.query_factors[slot]);
    this->hand_over(shared.query_ring.full_barrier(ptx::opaque(use)));
  }
};

}  // namespace flashpage
