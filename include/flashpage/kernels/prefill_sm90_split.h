// The loading warps of prefill_sm90 where K comes by rows and V in boxes of a token, all four alike: pages of any size,
// for pairs of CTAs. The last warp also walks the plan and loads Q.
//
// The tensor cores take V as the copy engine lays it down: no fence behind it. Rows and boxes keep different units
// busy, which half a tile does not fill.
#pragma once
#include "flashpage/kernels/prefill_sm90_load.h"
#include "flashpage/ptx/bulk_copy.h"

namespace flashpage {

template <class Traits>
struct PrefillSplit : PrefillLoad<Traits> {
  using Base = PrefillLoad<Traits>;
  using Shared = typename Base::Shared;
  using Warps = typename Base::Warps;
  using Tables = typename Shared::RowTables;
  using Keys = typename Tables::Keys;
  using Values = typename Tables::Values;
  using KeyRows = typename Shared::Keys;
  using Base::lane;
  using Base::shared;
  using Base::warp;
  static_assert(!has_mask_tiles<Traits>);

  using Base::Base;

  FP_DEVICE void run() const {
    const bool leads = warp == Warps::loading - 1;
    const Keys keys(this->params, this->params.k, shared.row_tables.keys);
    const Values values(this->params, this->maps.v, shared.row_tables.values[warp]);
    if (leads) this->begin_plan();
    u32 turn = 0;  // of a tile of K
    for (u32 unit_turn = 0;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      const Place& place = shared.places[shared.place_ring.slot(unit_turn)].place;
      if (place.done) {
        if (leads) this->send_last_rows(unit_turn);
        return;
      }
      if (leads) this->lead(place, unit_turn);
      typename Keys::Source of_keys = keys.open(place);
      typename Values::Source of_values{place.unit.kv_head, {}};
      keys.look_ahead(of_keys, 0);
      values.look_ahead(of_values, of_keys, warp, 0);
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_turn);
      // Places of K and of V a tile before become free together. V of a unit's last tile waits for no other unit's K:
      // its output may be what Q waits for.
#pragma unroll 1
      for (int tile = 0; tile <= of_keys.tiles; ++tile) {
        const bool has_keys = tile < of_keys.tiles, has_values = tile > 0;
        if (has_keys) begin_keys(keys, of_keys, tile, turn);
        const u32 value_turn = turn - 1;
        if (has_values) {
          values.find(of_values);
          shared.value_ring.wait_empty(value_turn);
          if (warp == 0 && ptx::elect_one()) Values::expect(shared.value_ring.full_barrier(value_turn));
          __syncwarp();
          load_values<0, middle>(values, of_values, value_turn);
        }
        if constexpr (Warps::shares_keys) {
          if (has_keys) share_keys(of_keys, turn);
          if (has_values) load_values<middle, Values::warp_tokens>(values, of_values, value_turn);
        }
        if (has_values) values.look_ahead(of_values, of_keys, warp, tile);
        if (has_keys) ++turn;
      }
    }
  }

 private:
  // Tokens of V whose boxes are issued before K's rows are handed over, which are on their way meanwhile.
  static constexpr int middle = Warps::shares_keys ? Values::warp_tokens / 4 * 2 : Values::warp_tokens;

  FP_DEVICE void begin_keys(const Keys& keys, typename Keys::Source& source, int tile, u32 turn) const {
    keys.find(source);
    shared.key_ring.wait_empty(turn);
    keys.load(source, tile, ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]));
    if constexpr (!Warps::shares_keys) ptx::mbarrier_arrive_after_copies(shared.key_ring.full_barrier(turn));
    keys.look_ahead(source, tile + 1);
  }
  // The warp's rows, once they are there, to the other CTA, which sends as many. Its warps gave the place back too.
  FP_DEVICE void share_keys(const typename Keys::Source& source, u32 turn) const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_before_bulk_copies();  // and before products
    __syncwarp();
    if (!ptx::elect_one()) return;
    const u32 bytes = Keys::num_rows(source) * 128, full = shared.key_ring.full_barrier(turn);
    const u32 peer = ptx::cluster_rank() ^ 1, full_of_peer = ptx::peer_address(full, peer);
    const u32 from = ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]) + source.first_row * 128;
    ptx::mbarrier_arrive_expect(full, KeyRows::blocks * bytes);
#pragma unroll
    for (int block = 0; block < KeyRows::blocks; ++block) {
      const u32 rows = from + block * KeyRows::block_bytes;
      ptx::bulk_copy_to_peer(ptx::peer_address(rows, peer), rows, bytes, full_of_peer);
    }
  }
  template <int first, int end>
  FP_DEVICE void load_values(const Values& values, const typename Values::Source& source, u32 turn) const {
    if (ptx::elect_one())
      values.template load<first, end>(source, warp, ptx::shared_address(shared.values[shared.value_ring.slot(turn)]),
                                       shared.value_ring.full_barrier(turn));
    __syncwarp();
  }
};

}  // namespace flashpage
