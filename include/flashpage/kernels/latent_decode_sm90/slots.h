// How a loading warp of latent_decode_sm90 fills its share of a slot: by boxes of the copy engine, or row by row.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

// The tokens of a unit's slots.
struct LatentExtent {
  i32 first_token;  // of the first slot; may be before the unit's first token
  i32 slots = 0;

  FP_DEVICE LatentExtent(const Unit& unit, int box_shift, int tokens) {
    first_token = unit.kv_begin >> box_shift << box_shift;
    if (unit.kv_end > unit.kv_begin) slots = ceil_div(unit.kv_end - first_token, tokens);
  }
};

// Slots are few and large, so all loading warps share each of them: a slot is complete as early as possible.
template <class Traits>
struct LatentBoxes {
  using Shared = LatentShared<Traits>;
  using Halves = SlotHalves<Traits, Shared::tokens>;
  static constexpr int warps = LatentWarps<Traits>::slot_loaders, share = Shared::tokens / warps;
  static constexpr int arrivals = warps;  // at a slot's barrier, in addition to the bytes
  static_assert(share == 32);             // tokens

  struct Source {
    i64 offset;  // index of the first page number
    i32 kv_head, kv_end;
    i32 first_token;  // of the warp's share of the first slot
    // Origins of one of the warp's next 32 boxes in each lane, and of the 32 after them: the lookup is the only load on
    // which the copies depend.
    BoxOrigin found, found_next;
  };

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  const int box_shift;  // log2 of the tokens of a box
  const u64 policy = ptx::evict_first();

  FP_DEVICE LatentBoxes(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps), box_shift(31 - __clz(params.box_tokens)) {}

  FP_DEVICE Source open(const Place& place, const LatentExtent& extent, int warp) const {
    Source source;
    source.offset = place.item.kv_offset;
    source.kv_head = place.unit.kv_head;
    source.kv_end = place.unit.kv_end;
    source.first_token = extent.first_token + warp * share;
    source.found = look_up(source, 0);
    source.found_next = look_up(source, 32);
    return source;
  }

  FP_DEVICE void load(Source& source, int slot, u32 use, int warp) const {
    const int boxes = share >> box_shift;
    if (boxes == 4) return load_boxes<4>(source, slot, use, warp);
    boxes == 2 ? load_boxes<2>(source, slot, use, warp) : load_boxes<1>(source, slot, use, warp);
  }

 private:
  // Computes all origins first; then one elected lane issues the copies without a branch, as in DecodeBoxes.
  template <int boxes>
  FP_DEVICE void load_boxes(Source& source, int slot, u32 use, int warp) const {
    constexpr int panels = Halves::First::panels + Halves::Second::panels;
    const int first = slot * boxes;
    if (first % 32 == 0 && first > 0) {
      source.found = source.found_next;
      source.found_next = look_up(source, first + 32);
    }
    BoxOrigin at[boxes];
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
      at[i].page = __shfl_sync(0xffffffff, source.found.page, first + i);
      at[i].row = __shfl_sync(0xffffffff, source.found.row, first + i);
    }
    const i32 left = source.kv_end - source.first_token - slot * Shared::tokens;
    const int present = max_of(0, min_of(boxes, (left + (1 << box_shift) - 1) >> box_shift));
    const u32 barrier = shared.ring.full_barrier(use);
    const u32 tile = ptx::shared_address(shared.slots[shared.ring.slot(use)]) + warp * share * 128;
    shared.ring.wait_empty(use);
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect(barrier, present * panels * 128 << box_shift);
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
      if (i >= present) continue;
      const u32 box = tile + (i * 128 << box_shift);
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        const int of_second = panel - Halves::First::panels;
        const bool is_first = of_second < 0;
        ptx::tensor_copy(box + panel * Halves::First::panel_bytes, is_first ? maps.k : maps.v, barrier,
                         (is_first ? panel : of_second) * Halves::First::panel_columns, at[i].row, source.kv_head,
                         at[i].page, policy);
      }
    }
  }

  // The origin of the lane's box among the warp's 32 boxes from `first` on.
  FP_DEVICE BoxOrigin look_up(const Source& source, int first) const {
    const int box = first + static_cast<int>(threadIdx.x % 32), boxes_shift = 5 - box_shift;  // log2 of a share's boxes
    const i32 in_share = (box & ((1 << boxes_shift) - 1)) << box_shift;
    const i32 token = source.first_token + (box >> boxes_shift) * Shared::tokens + in_share;
    u32 page, row;
    params.page.divmod(token, page, row);
    return {token < source.kv_end ? __ldg(params.kv_indices + source.offset + page) : 0, static_cast<i32>(row)};
  }
};

// By cp.async, for pages of any size. A lane looks up the page of its token of the warp's share. For a unit's first
// slots the pages go to registers when the unit is opened. For later slots they are copied to shared memory that
// belongs to the same slot one round earlier, so that they have landed when the slot is free again.
template <class Traits>
struct LatentRows {
  using Shared = LatentShared<Traits>;
  using Slot = typename Shared::Slot;
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int warps = LatentWarps<Traits>::slot_loaders, share = Shared::tokens / warps;
  static constexpr bool is_selected = Shared::is_selected;
  static constexpr int arrivals = (is_selected ? 32 + 1 : 32) * warps;  // of the lanes' copies, and for `present`
  static_assert(share == 32);
  // One copy of a warp is a panel of four rows. A lane has the same chunk of each panel, so that the copies of four
  // rows differ in constants only.
  static constexpr int rows_a_copy = 4, first_panels = Traits::head_dim_vo / Slot::panel_columns;
  static constexpr int tail_chunks = (Traits::head_dim_qk - Traits::head_dim_vo) / 8;

  struct Source {
    i64 offset;
    i32 kv_head, kv_end;
    i32 first_token;            // of the warp's share of the first slot
    i32 found[Traits::stages];  // pages of the next slots, in order
  };

  Shared& shared;
  const AttentionParams& params;
  const int box_shift = 0;
  const u64 policy = ptx::evict_first();

  FP_DEVICE LatentRows(Shared& shared, const AttentionParams& params, const KvMaps&) : shared(shared), params(params) {}

  FP_DEVICE Source open(const Place& place, const LatentExtent& extent, int warp) const {
    Source source;
    source.offset = place.item.kv_offset;
    source.kv_head = place.unit.kv_head;
    source.kv_end = place.unit.kv_end;
    source.first_token = extent.first_token + warp * share;
    const Rows rows(params, source.offset);
#pragma unroll
    for (int slot = 0; slot < Traits::stages; ++slot) {
      const i32 token = token_of(source, slot);
      source.found[slot] = token < source.kv_end ? rows.look_up(token) : 0;
    }
    return source;
  }

  FP_DEVICE void load(Source& source, int slot, u32 use, int warp) const {
    constexpr int batch = 4;  // copies whose sources are in registers at once
    const int lane = threadIdx.x % 32, at = shared.ring.slot(use);
    const Rows rows(params, source.offset);
    i32* ahead = shared.pages_ahead[at] + warp * share + lane;
    shared.ring.wait_empty(use);
    i32 found = slot < Traits::stages ? source.found[0] : *ahead;
    const i32 token = min_of(token_of(source, slot), max_of(source.kv_end - 1, 0));
    const i32 count = source.kv_end - source.first_token - slot * Shared::tokens;
    const auto present = Shared::Present::of_lanes(count, found);
    if constexpr (is_selected) found = max_of(found, 0);
    const u64 first = reinterpret_cast<u64>(rows.template row<Cache>(params.k, found, token, source.kv_head));
    const u64 second = reinterpret_cast<u64>(rows.template row<Cache>(params.v, found, token, source.kv_head));
    const int lane_row = lane / 8, lane_chunk = lane % 8;
    const u32 to = ptx::shared_address(shared.slots[at]) + Slot::chunk_offset(warp * share + lane_row, lane_chunk);
#pragma unroll
    for (int begin = 0; begin < share / rows_a_copy; begin += batch) {
      // Reads all sources before it issues the copies: ptxas makes a cp.async wait for earlier accesses to shared
      // memory, which include shuffles.
      u64 first_from[batch], second_from[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int row = (begin + i) * rows_a_copy + lane_row;
        first_from[i] = __shfl_sync(0xffffffff, first, row) + lane_chunk * 16;
        if (tail_chunks > 0)
          second_from[i] = __shfl_sync(0xffffffff, second, row) + lane_chunk % max_of(tail_chunks, 1) * 16;
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int row = (begin + i) * rows_a_copy;
        const u32 here = (to ^ (row & 7) * 16) + row * Slot::stride;
        const bool exists = present.has(row + lane_row);
#pragma unroll
        for (int panel = 0; panel < first_panels; ++panel)
          ptx::cp_async<16>(here + panel * Slot::panel_bytes, reinterpret_cast<const u8*>(first_from[i]) + panel * 128,
                            exists, policy);
        if (tail_chunks > 0)  // the last panel is filled up with zeros
          ptx::cp_async<16>(here + first_panels * Slot::panel_bytes, reinterpret_cast<const void*>(second_from[i]),
                            exists && lane_chunk < tail_chunks, policy);
      }
    }
    const i32 later = token_of(source, slot + Traits::stages);
    if (later < source.kv_end) ptx::cp_async<4>(ptx::shared_address(ahead), rows.place(later), true);
    if (is_selected && lane == 0) {
      shared.present[at][warp] = present;
      ptx::mbarrier_arrive(shared.ring.full_barrier(use));
    }
    ptx::mbarrier_arrive_after_copies(shared.ring.full_barrier(use));
#pragma unroll
    for (int i = 0; i + 1 < Traits::stages; ++i) source.found[i] = source.found[i + 1];
  }

 private:
  FP_DEVICE i32 token_of(const Source& source, int slot) const {
    return source.first_token + slot * Shared::tokens + static_cast<int>(threadIdx.x) % 32;
  }
};

}  // namespace flashpage
