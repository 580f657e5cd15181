// How units reach the warps of latent_wide_sm90, latent_e4m3_sm90 and latent_columns_sm90.
#pragma once
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/softmax/transform.h"
#include "flashpage/tile/trace.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Waits for all threads that `barrier` counts. `phase`: how often they have met before, or its parity. All lanes of a
// warp arrive, because racecheck follows an arrival for its thread alone; it does not follow named barriers of several
// sizes.
FP_DEVICE void meet_at(const u64& barrier, u32 phase) {
  const u32 address = ptx::shared_address(&barrier);
  ptx::mbarrier_arrive(address);
  ptx::mbarrier_wait(address, phase & 1);
}

// The roles of the warps of latent_wide_sm90 and latent_e4m3_sm90: a loading warpgroup, one for scores, and two for
// values.
struct WideRoles {
  static constexpr int loading = 4, group = 4;  // warps
  static constexpr int first_scoring = loading, first_of_values = first_scoring + group;
  static constexpr int computing = 3 * group, threads = 32 * (loading + computing);
  static constexpr int plan_warp = 3;
  static constexpr int first_registers = 65536 / threads;  // of a thread, when the launch begins
};

// A unit that the plan's warp passes to all others. Each lane of the others has read it before it releases the place.
struct WidePlace {
  Place place;
  i32 first_token;  // of the first block; may be before the unit's first token
  i32 blocks;
  i32 first_length;  // first_length_of
  float scale;       // of the unit's scores
  // Counts of this CTA's earlier units and blocks, from which phases of barriers follow; computing warps have no
  // registers for them.
  u32 units_before;
  u32 blocks_before[2];  // those with an even number in their unit, and those with an odd one

  // Blocks before this one.
  FP_DEVICE u32 use(int block) const { return blocks_before[0] + blocks_before[1] + block; }
  // Blocks before this one whose number in their unit is even, or odd, as this one's.
  FP_DEVICE u32 use_of_parity(int block) const { return blocks_before[block & 1] + (block >> 1); }
};

// The origin of the lane's box among 32 boxes from `first` on.
FP_DEVICE BoxOrigin box_of_lane(const AttentionParams& params, const WidePlace& place, int first, int box_shift) {
  const i32 token = place.first_token + ((first + static_cast<int>(threadIdx.x % 32)) << box_shift);
  u32 page, row;
  params.page.divmod(token, page, row);
  const bool exists = token < place.place.unit.kv_end;
  return {exists ? __ldg(params.kv_indices + place.place.item.kv_offset + page) : 0, static_cast<i32>(row)};
}

// Calls body(place) for each unit, in a computing warp. The unit's number is read again after that, so that no register
// holds it meanwhile.
FP_DEVICE void for_each_unit(auto& shared, auto&& body) {
  for (u32 use = 0;;) {
    shared.place_ring.wait_full(use);
    const WidePlace& place = shared.places[shared.place_ring.slot(use)];
    if (place.place.done) return;
    body(place);
    use = place.units_before;
    shared.place_ring.release(use++);
  }
}

// The units of a CTA, or of a pair, as the loading warps see them. Shared has the places, their ring and the cursor.
template <class Traits, class Shared>
struct WideUnits {
  Shared& shared;
  const AttentionParams& params;
  int lane = threadIdx.x % 32;

  FP_DEVICE WideUnits(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  // Calls the loader for each block of each unit. `stamps`: whether the trace has this warp's first load.
  FP_DEVICE void load_blocks(auto&& loader, bool stamps) const {
    u32 use = 0;
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const WidePlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) return;
      loader.open(place);
      for (int block = 0; block < place.blocks; ++block) loader.load(block, use++);
      shared.place_ring.release(unit_use);
      if (stamps && lane == 0) stamp_first<Traits>(params, Stamp::first_load);
    }
  }

  // Goes through the plan. `load_query(place, use)` loads a unit's Q.
  FP_DEVICE void plan(auto&& load_query) const {
    begin();
    for (u32 use = 0;; ++use) {
      shared.place_ring.wait_full(use);
      const Place& place = shared.places[shared.place_ring.slot(use)].place;
      if (place.done) return;
      load_query(place, use);
      publish_next(use);
    }
  }
  // As above, by a warp that also has work for each block: `of_block(use)`. The next unit is published after two
  // blocks, because that waits until all warps have left the unit before this one; its Q is brought to the L2 then.
  FP_DEVICE void plan(auto&& load_query, auto&& of_block) const {
    begin();
    u32 block_use = 0;
    for (u32 use = 0;; ++use) {
      shared.place_ring.wait_full(use);
      const WidePlace& place = shared.places[shared.place_ring.slot(use)];
      if (place.place.done) return;
      load_query(place.place, use);
      const int blocks = place.blocks, early = min_of(blocks, 2);
      for (int block = 0; block < early; ++block) of_block(block_use++);
      publish_next(use);
      load_query.prefetch(shared.places[shared.place_ring.slot(use + 1)].place);
      for (int block = early; block < blocks; ++block) of_block(block_use++);
    }
  }
  // The parts of `plan`: publishes the first unit, and the one after `use`.
  FP_DEVICE void begin() const {
    if (lane == 0) {
      shared.cursor.start(params.plan, blockIdx.x / Traits::ctas);
      publish(0);
      stamp<Traits>(params, Stamp::plan_known);
    }
    __syncwarp();
  }
  FP_DEVICE void publish_next(u32 use) const {
    __syncwarp();
    if (lane == 0) publish(use + 1);
    __syncwarp();
  }

 private:
  // Called by one lane. Places are written in shared memory, because a place takes many registers.
  FP_DEVICE void publish(u32 use) const {
    shared.place_ring.wait_empty(use);
    WidePlace& to = shared.places[shared.place_ring.slot(use)];
    to.units_before = use;
    if (use == 0) {
      shared.cursor.first(params, Shared::unit_rows, to.place);
      to.blocks_before[0] = to.blocks_before[1] = 0;
    } else {
      const WidePlace& last = shared.places[shared.place_ring.slot(use - 1)];
      shared.cursor.next(params, Shared::unit_rows, 1, last.place, to.place);
      to.blocks_before[0] = last.blocks_before[0] + (last.blocks + 1) / 2;
      to.blocks_before[1] = last.blocks_before[1] + last.blocks / 2;
    }
    const Unit& unit = to.place.unit;
    if constexpr (Traits::kv_source == KvSource::two_lists)
      to.first_length = to.place.done ? 0 : first_length_of<Traits::kv_source>(params, to.place.item);
    to.scale = latent_score_scale<Traits>(params, to.place.item, unit);
    to.first_token = Traits::loader == Loader::boxes ? unit.kv_begin & -params.box_tokens : unit.kv_begin;
    to.blocks = unit.kv_end > unit.kv_begin ? ceil_div(unit.kv_end - to.first_token, Shared::tokens) : 0;
    ptx::mbarrier_arrive(shared.place_ring.full_barrier(use));
  }
};

}  // namespace flashpage
