// Loads K and V of one unit to slots with the copy engine: each box has at most a page, one KV head and 128 bytes of
// its rows.
#pragma once
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/layout/slot_halves.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/slot_scales.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Loads every `loading_warps`-th slot of a unit, by one warp. A lane holds the origin of one of the warp's next 32
// boxes, and of one of the 32 after them, because the lookup is the only load on which the copies depend.
template <class Traits, class Slots>
struct DecodeBoxes {
  using Cache = typename Traits::Cache;
  using Keys = typename SlotHalves<Traits, Slots::tokens>::First;
  using Values = typename SlotHalves<Traits, Slots::tokens>::Second;
  static constexpr bool paged = Traits::kv_source != KvSource::ragged;
  static constexpr bool has_scales = StoredFormats<Traits>::has_scales;
  static constexpr int arrivals = has_scales ? 1 + 32 : 1;  // at a slot's barrier, in addition to the bytes

  // K and V of one unit.
  struct Source {
    i64 offset;  // paged: index of the first page number; ragged: first row
    i32 kv_head, first_token, kv_begin, kv_end;
    i32 slots = 0;
    i32 own;  // the warp's first slot
    BoxOrigin found, found_next;
  };

  Slots& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  const int box_shift;  // log2 of the tokens of a box
  const u64 policy = ptx::evict_first();

  FP_DEVICE DecodeBoxes(Slots& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps), box_shift(31 - __clz(params.box_tokens)) {}

  FP_DEVICE Source open(const Place& place, int own) const {
    const Unit& unit = place.unit;
    Source source;
    source.offset = place.item.kv_offset;
    source.kv_head = unit.kv_head;
    source.first_token = paged ? unit.kv_begin >> box_shift << box_shift : unit.kv_begin;
    source.kv_begin = unit.kv_begin;
    source.kv_end = unit.kv_end;
    if (unit.kv_end > unit.kv_begin) source.slots = ceil_div(unit.kv_end - source.first_token, Slots::tokens);
    source.own = own;
    source.found = look_up(source, 0);
    source.found_next = look_up(source, 32);
    return source;
  }

  FP_DEVICE void load(Source& source, int slot, u32 use) const {
    constexpr int most = Slots::tokens / 8;
    const int boxes = Slots::tokens >> box_shift;  // a power of two, at most `most`
    if constexpr (most >= 8) {
      if (boxes == 8) return load_boxes<8>(source, slot, use);
    }
    if constexpr (most >= 4) {
      if (boxes == 4) return load_boxes<4>(source, slot, use);
    }
    boxes == 2 ? load_boxes<2>(source, slot, use) : load_boxes<1>(source, slot, use);
  }

 private:
  // Computes all origins first; then one elected lane issues the copies without a branch. This takes 30 cycles a box; a
  // loop of both takes 120.
  template <int boxes>
  FP_DEVICE void load_boxes(Source& source, int slot, u32 use) const {
    int first = (slot - source.own) / Slots::loading_warps * boxes;
    if (first % 32 == 0 && first > 0) {
      source.found = source.found_next;
      source.found_next = look_up(source, first + 32);
    }
    BoxOrigin at[boxes];
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
      at[i].page = paged ? __shfl_sync(0xffffffff, source.found.page, first + i) : 0;
      at[i].row = __shfl_sync(0xffffffff, source.found.row, first + i);
    }
    const i32 token = source.first_token + slot * Slots::tokens;
    const int present = min_of(boxes, (source.kv_end - token + (1 << box_shift) - 1) >> box_shift);
    u32 barrier = shared.ring.full_barrier(use), tile = ptx::shared_address(shared.slots[shared.ring.slot(use)]);
    shared.ring.wait_empty(use);
    if constexpr (has_scales) load_scales(source, slot, use, first);
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect(barrier, present * (Keys::panels + Values::panels) * Keys::stride << box_shift);
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
      if (i >= present) continue;
      u32 box = tile + (i * Keys::stride << box_shift);
#pragma unroll
      for (int panel = 0; panel < Keys::panels; ++panel)
        ptx::tensor_copy(box + panel * Keys::panel_bytes, maps.k, barrier, panel * Keys::panel_columns, at[i].row,
                         source.kv_head, at[i].page, policy);
#pragma unroll
      for (int panel = 0; panel < Values::panels; ++panel)
        ptx::tensor_copy(box + Keys::tile_bytes + panel * Values::panel_bytes, maps.v, barrier,
                         panel * Values::panel_columns, at[i].row, source.kv_head, at[i].page, policy);
    }
  }

  // A lane copies the scales of one of 32 tokens; `first` is the slot's first box.
  FP_DEVICE void load_scales(const Source& source, int slot, u32 use, int first) const {
    const KvRows<Traits::kv_source> rows(params, source.offset);
#pragma unroll
    for (int begin = 0; begin < Slots::tokens; begin += 32) {
      const int in_slot = begin + threadIdx.x % 32;
      const i32 token = source.first_token + slot * Slots::tokens + in_slot;
      const i32 page = paged ? __shfl_sync(0xffffffff, source.found.page, first + (in_slot >> box_shift)) : 0;
      if (Slots::tokens % 32 != 0 && in_slot >= Slots::tokens) continue;
      shared.scales.load(params, rows, shared.ring.slot(use), in_slot,
                         token >= source.kv_begin && token < source.kv_end, page, token, source.kv_head);
    }
    ptx::mbarrier_arrive_after_copies(shared.ring.full_barrier(use));
  }

  // The origin of the lane's box among the warp's 32 boxes from `first` on.
  FP_DEVICE BoxOrigin look_up(const Source& source, int first) const {
    int box = first + static_cast<int>(threadIdx.x % 32), boxes_shift = 31 - __clz(Slots::tokens) - box_shift;
    int slot = source.own + (box >> boxes_shift) * Slots::loading_warps, in_slot = box & ((1 << boxes_shift) - 1);
    i32 token = source.first_token + slot * Slots::tokens + (in_slot << box_shift);
    if constexpr (!paged) return {0, static_cast<i32>(source.offset) + token};
    u32 page, row;
    params.page.divmod(token, page, row);
    return {token < source.kv_end ? __ldg(params.kv_indices + source.offset + page) : 0, static_cast<i32>(row)};
  }
};

}  // namespace flashpage
