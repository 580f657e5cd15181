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
    u32 turn = 0;
    for (u32 unit_turn = 0;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      const Place& place = shared.places[shared.place_ring.slot(unit_turn)].place;
      if (place.done) return;
      const bool is_empty = BothTiles::is_empty(place);
      if (!is_empty) ask_first(both, place);
      begin_unit(place, unit_turn);
      if (is_empty) {
        this->release_place(unit_turn);
        both.skip();
        hand_over_nothing(turn++);
        continue;
      }
      typename BothTiles::Source source;
      both.open(source, place, 1);
      this->release_place(unit_turn);
      while (true) {
        keys(both, turn);
        if (source.left > 0) both.ask_keys(source);
        values(both, source, turn++);
        if (source.left == 0) break;
        both.ask_values(source);
      }
    }
  }

 private:
  FP_DEVICE void ask_first(const BothTiles& both, const Place& place) const {
    typename BothTiles::Source source;
    both.open(source, place, 0);
    both.ask_keys(source);
    both.ask_values(source);
  }
  FP_DEVICE void begin_unit(const Place& place, u32 unit_turn) const {
    if (warp == Warps::loading - 1 && lane == 0) this->publish(ptx::opaque(unit_turn) + 1);
    __syncwarp();
    query(place, ptx::opaque(unit_turn));
    __syncwarp();
  }
  FP_DEVICE void keys(const BothTiles& both, u32 turn) const {
    shared.key_ring.wait_empty(turn);
    both.await_keys(turn);
    both.convert_keys(ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]));
    this->hand_over(shared.key_ring.full_barrier(turn));
  }
  FP_DEVICE void values(const BothTiles& both, typename BothTiles::Source& source, u32 turn) const {
    shared.value_ring.wait_empty(turn);
    both.await_values(turn);
    both.convert_values(source, ptx::shared_address(shared.values[shared.value_ring.slot(turn)]));
    this->hand_over(shared.value_ring.full_barrier(turn));
  }
  FP_DEVICE void hand_over_nothing(u32 turn) const {
    shared.key_ring.wait_empty(turn);
    this->hand_over(shared.key_ring.full_barrier(turn));
    shared.value_ring.wait_empty(turn);
    BothTiles::clear_values(ptx::shared_address(shared.values[shared.value_ring.slot(turn)]));
    this->hand_over(shared.value_ring.full_barrier(turn));
  }
  FP_DEVICE void query(const Place& place, u32 turn) const {
    shared.query_ring.wait_empty(turn);
    const u32 slot = shared.query_ring.slot(ptx::opaque(turn));
    ConvertedQuery<Traits, typename Shared::QueryRows>(params, place)
        .run(ptx::shared_address(shared.query[slot]), shared.query_factors[slot]);
    this->hand_over(shared.query_ring.full_barrier(ptx::opaque(turn)));
  }
};

}  // namespace flashpage
