// The rings of prefill_sm90 as a computing warp uses them.
#pragma once
#include "flashpage/kernels/prefill_sm90/shared.h"
#include "flashpage/ptx/fence.h"

namespace flashpage {

// The warp multiplies the scores of one tile together with the values of the tile before: K is at `use`, V at `use -
// 1`. Q and the place of the unit are at `unit_use`; a unit that has ended (end_unit) is at `unit_use - 1` until its
// output is written. Each release follows the last product that reads the slot.
template <class Traits>
struct Pipeline {
  using Shared = PrefillShared<Traits>;
  using Warps = PrefillWarps<Traits>;

  Shared& shared;
  const AttentionParams& params;
  int lane;
  u32 use = 0;
  u32 unit_use = 0;
  CurrentTile<Traits> tile{};                             // the tile of the scores, if loading warps describe tiles
  bool keys_are_there = false, values_are_there = false;  // found by look_ahead

  FP_DEVICE Pipeline(Shared& shared, const AttentionParams& params, int lane)
      : shared(shared), params(params), lane(lane) {}

  FP_DEVICE const TiledPlace& unit() const { return shared.places[shared.place_ring.slot(unit_use)]; }
  FP_DEVICE bool is_over() const { return unit().place.done; }
  FP_DEVICE u8* query(u32 unit_use) const { return shared.query[shared.query_ring.slot(unit_use)]; }
  FP_DEVICE u32 keys() const { return ptx::shared_address(shared.keys[shared.key_ring.slot(use)]); }
  FP_DEVICE u32 values() const { return ptx::shared_address(shared.values[shared.value_ring.slot(use - 1)]); }

  // The factor of the scores of sixteen rows, if Q was converted.
  FP_DEVICE float query_factor(int rows) const { return shared.query_factors[shared.query_ring.slot(unit_use)][rows]; }

  // Waits for the unit, its Q and its first keys, or for the notice that no unit is left.
  FP_DEVICE void wait_unit() {
    shared.place_ring.wait_full(unit_use);
    if (is_over()) return;
    shared.query_ring.wait_full(unit_use);
    shared.key_ring.wait_full(use);
    take_tile();
    if (!Warps::rotates && (Warps::by_rows || (!Warps::converts && params.query_box_rows == 0)))
      ptx::fence_before_products();
  }
  FP_DEVICE void begin_unit() { keys_are_there = values_are_there = false; }
  // Moves to the next tile of the unit and waits for its keys.
  FP_DEVICE void next_keys() {
    if (!keys_are_there) shared.key_ring.wait_full(use + 1);
    ++use;
    take_tile();
  }
  FP_DEVICE void wait_values(u32 use) const {
    if (!values_are_there) shared.value_ring.wait_full(use);
    if constexpr (Warps::by_rows)
      ptx::fence_before_products();  // these rows, and the keys before them, came by cp.async
  }
  // Tests which of the next waits can be skipped; called while products run.
  FP_DEVICE void look_ahead() {
    values_are_there = shared.value_ring.is_full(use);
    keys_are_there = shared.key_ring.is_full(use + 1);
  }
  // Moves to the next unit's first tile. The last tile's values are still to be multiplied.
  FP_DEVICE void end_unit() {
    ++unit_use;
    ++use;
  }

  FP_DEVICE void release_keys() const { release_tile<Traits>(shared.key_ring, use, lane); }
  FP_DEVICE void release_values() const {
    if constexpr (Warps::transposes) {  // only by this CTA's warps
      release(shared.value_ring, use - 1);
    } else {
      release_tile<Traits>(shared.value_ring, use - 1, lane);
    }
  }
  // Releases Q of the unit that has ended.
  FP_DEVICE void release_query() const { release(shared.query_ring, unit_use - 1); }
  FP_DEVICE void release_place() const {
    __syncwarp();
    release(shared.place_ring, unit_use - 1);
  }

 private:
  FP_DEVICE void take_tile() {
    if constexpr (has_mask_tiles<Traits>) tile = from_first_lane(shared.visited[shared.key_ring.slot(use)]);
  }
  FP_DEVICE void release(const auto& ring, u32 use) const {
    if (lane == 0) ring.release(use);
  }
};

}  // namespace flashpage
