// Loads K and V of one unit to slots by cp.async, row by row: where boxes would be too small, because pages have few
// tokens, or slow, because rows do not fill lines of the L2.
#pragma once
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/layout/slot_halves.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/copy.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/slot_scales.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Loads every `loading_warps`-th slot of a unit, by one warp. A lane looks up the pages of its tokens. For a unit's
// first slots they go to registers when the unit is opened. For later slots they are copied to shared memory that
// belongs to the same slot one round earlier, so that they have landed when the slot is free again. A warp would wait
// for a lookup to registers: under load it takes longer than a slot.
template <class Traits, class Slots>
struct DecodeRows {
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  using Halves = SlotHalves<Traits, Slots::tokens>;
  static constexpr int arrivals = 32;
  static constexpr int groups = max_of(1, Slots::tokens / 32);  // of at most 32 tokens
  static constexpr int group_tokens = Slots::tokens / groups;

  static constexpr int first_slots = ceil_div(Traits::stages, Slots::loading_warps);  // slots of one warp in one round

  // K and V of one unit.
  struct Source {
    i64 offset;  // paged: index of the first page number; ragged: first row
    i32 kv_head, first_token, kv_end;
    i32 slots = 0;
    i32 first_found[first_slots][groups];  // pages of the next slots, in order
  };

  // Whether a row ends within a sector of the L2.
  static constexpr bool has_broken_sectors =
      (Halves::first_columns * sizeof(Cache)) % 32 != 0 || (Halves::second_columns * sizeof(Cache)) % 32 != 0;

  Slots& shared;
  const AttentionParams& params;
  const u64 policy;

  FP_DEVICE DecodeRows(Slots& shared, const AttentionParams& params, const KvMaps&)
      : shared(shared), params(params), policy(cache_policy(params.k)) {}

  FP_DEVICE Source open(const Place& place, int own) const {
    const Unit& unit = place.unit;
    Source source;
    source.offset = place.item.kv_offset;
    source.kv_head = unit.kv_head;
    source.first_token = unit.kv_begin;
    source.kv_end = unit.kv_end;
    if (unit.kv_end > unit.kv_begin) source.slots = ceil_div(unit.kv_end - unit.kv_begin, Slots::tokens);
    const Rows rows(params, source.offset);
#pragma unroll
    for (int slot = 0; slot < first_slots; ++slot)
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        i32 token = token_of(source, own + slot * Slots::loading_warps, group);
        source.first_found[slot][group] = token < source.kv_end ? rows.look_up(token) : 0;
      }
    return source;
  }

  FP_DEVICE void load(Source& source, int slot, u32 use) const {
    shared.ring.wait_empty(use);
    const int at = shared.ring.slot(use);
    u8* tile = shared.slots[at];
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      i32* ahead = shared.pages_ahead[at] + group * group_tokens + threadIdx.x % group_tokens;
      i32 found = slot < Traits::stages ? source.first_found[0][group] : *ahead;
      copy<Halves::first_columns>(source, params.k, tile, found, slot, group);
      if constexpr (Halves::second_columns > 0)
        copy<Halves::second_columns>(source, params.v, tile + Halves::First::tile_bytes, found, slot, group);
      if constexpr (StoredFormats<Traits>::has_scales) load_scales(source, at, found, slot, group);
      look_ahead(source, ahead, slot + Traits::stages, group);
    }
    ptx::mbarrier_arrive_after_copies(shared.ring.full_barrier(use));
#pragma unroll
    for (int i = 0; i + 1 < first_slots; ++i)
#pragma unroll
      for (int group = 0; group < groups; ++group) source.first_found[i][group] = source.first_found[i + 1][group];
  }

 private:
  // Where the next KV head's row follows, its CTA reads the rest of the sector at about the same time.
  static FP_DEVICE u64 cache_policy(const KvView& view) {
    if constexpr (has_broken_sectors)
      if (view.head_stride < view.token_stride) return ptx::evict_last();
    return ptx::evict_first();
  }

  FP_DEVICE void load_scales(const Source& source, int at, i32 found, int slot, int group) const {
    const int in_group = threadIdx.x % 32;
    if (in_group >= group_tokens) return;
    const i32 token = token_of(source, slot, group);
    const bool exists = token < source.kv_end;
    shared.scales.load(params, Rows(params, source.offset), at, group * group_tokens + in_group, exists, found,
                       exists ? token : max_of(source.kv_end - 1, 0), source.kv_head);
  }
  FP_DEVICE void look_ahead(const Source& source, i32* to, int slot, int group) const {
    if constexpr (Traits::kv_source != KvSource::ragged) {
      const Rows rows(params, source.offset);
      i32 token = token_of(source, slot, group);
      if (token < source.kv_end && threadIdx.x % 32 < group_tokens)
        ptx::cp_async<4>(ptx::shared_address(to), rows.place(token), true);
    }
  }
  FP_DEVICE i32 token_of(const Source& source, int slot, int group) const {
    return source.first_token + slot * Slots::tokens + group * group_tokens +
           static_cast<int>(threadIdx.x) % group_tokens;
  }

  // Copies the rows of at most 32 tokens; rows that do not exist become zero.
  template <int columns>
  FP_DEVICE void copy(const Source& source, const KvView& view, u8* tile, i32 found, int slot, int group) const {
    using Target = LineRows<Traits::layout, Cache, columns, Slots::tokens>;
    constexpr int bytes = copy_bytes<Cache, columns>;
    i32 count = source.kv_end - source.first_token - slot * Slots::tokens - group * group_tokens;
    i32 token = min_of(token_of(source, slot, group), max_of(source.kv_end - 1, 0));
    Rows rows(params, source.offset);
    // Opaque, because otherwise the head's offsets would stay in registers for all slots.
    constexpr int since = Traits::head_dim_qk > 192 && Traits::head_dim_qk != Traits::head_dim_vo ? 90 : 100;
    const i32 kv_head = static_cast<i32>(ptx::opaque_from<since>(source.kv_head));
    u64 mine = reinterpret_cast<u64>(rows.template row<Cache>(view, found, token, kv_head));
    u32 to = ptx::shared_address(tile) + group * group_tokens * Target::stride;
    if (count >= group_tokens) {
      copy_rows<Target, bytes, true>(to, mine, count);
    } else {
      copy_rows<Target, bytes, false>(to, mine, count);
    }
  }

  // `mine`: the row of this lane's token. `all`: all rows exist.
  template <class Target, int bytes, bool all>
  FP_DEVICE void copy_rows(u32 to, u64 mine, i32 count) const {
    constexpr int chunks = Target::used_bytes / bytes;
    const int lane = threadIdx.x % 32;
    if constexpr (bytes == 16 && chunks <= 32 && 32 % chunks == 0) {
      // Each lane copies the same chunk of several rows: values that depend on the lane are computed once, and a row
      // costs six instructions.
      constexpr int rows_a_pass = 32 / chunks;
      const int lane_row = lane / chunks, lane_chunk = lane % chunks;
      const u32 lane_to = to + Target::chunk_offset(lane_row, lane_chunk);
      const u32 lane_byte = lane_chunk * 16;
      constexpr int passes = ceil_div(group_tokens, rows_a_pass);
      constexpr int batch =
          all ? min_of(passes, sizeof(Cache) == 1 || first_slots > 2 ? 2 : 4) : 1;  // limited by registers
#pragma unroll 1
      for (int begin = 0; begin < group_tokens; begin += batch * rows_a_pass) {
        // Reads all sources before it issues the copies: ptxas makes a cp.async wait for earlier accesses to shared
        // memory, which include shuffles.
        u64 from[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)
          from[i] = __shfl_sync(0xffffffff, mine, begin + i * rows_a_pass + lane_row) + lane_byte;
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          int first = begin + i * rows_a_pass;
          u32 here = (lane_to ^ (first & 7) * 16) + first * Target::stride;
          const void* source = reinterpret_cast<const void*>(from[i]);
          const bool exists = all || first + lane_row < count;
          if constexpr (tiles_have_formats<Traits>) {
            copy_on_eight(here, source, exists, policy);
          } else {
            ptx::cp_async<16>(here, source, exists, policy);
          }
        }
      }
    } else {
      constexpr int pieces = group_tokens * chunks, passes = ceil_div(pieces, 32);
      // The places of a pass that is no part of a loop stay in registers from slot to slot, of which three passes take
      // too many: a short loop, or what four leave of a longer one.
      constexpr int together = passes < 8 && group_tokens < 32 ? 2 : passes % 4 == 3 ? 3 : 4;
#pragma unroll(together)
      for (int first = 0; first < pieces; first += 32) {
        int piece = min_of(first + lane, pieces - 1), row = piece / chunks, byte = piece % chunks * bytes;
        const u8* from = reinterpret_cast<const u8*>(__shfl_sync(0xffffffff, mine, row)) + byte;
        if constexpr (bytes == 16 && tiles_have_formats<Traits>) {
          copy_on_eight(to + Target::byte_offset(row, byte), from, row < count, policy);
        } else {
          ptx::cp_async<bytes>(to + Target::byte_offset(row, byte), from, row < count, policy);
        }
      }
    }
  }
};

}  // namespace flashpage
