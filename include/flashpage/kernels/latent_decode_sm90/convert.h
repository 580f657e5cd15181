// The converting warps of latent_decode_sm90: they load rows in fp8 to registers, and write them to slots in the type
// of the products.
//
// Each warp has a quarter of a slot's rows. When a piece of 16 bytes is written to its slot, the same registers receive
// the piece of the next slot. The time is that of the conversions.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/tile/load/latent_numbers.h"

namespace flashpage {

template <class Traits>
struct LatentConvert {
  using Shared = LatentShared<Traits>;
  using Slot = typename Shared::Slot;
  using Cache = typename Traits::Cache;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  using Rest = typename Format::Rest;
  using Scale = typename Format::Scale;
  using Present = typename Shared::Present;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int rows = Shared::noted;  // of the warp, in a slot
  // Pieces of 16 bytes: of a row, and of a lane in all of the warp's rows.
  static constexpr int row_pieces = Format::quantised / 16, pieces = rows * row_pieces / 32;
  static constexpr int rest_row_pieces = Format::rest * static_cast<int>(sizeof(Rest)) / 16;
  static constexpr int rest_pieces = rows * rest_row_pieces / 32;
  static constexpr int scale_bytes = Format::num_scales * static_cast<int>(sizeof(Scale)), row_scales = scale_bytes / 8;
  static_assert(rows == 16 && rows * row_pieces % 32 == 0 && rows * rest_row_pieces % 32 == 0);
  static_assert(scale_bytes <= Shared::scale_bytes && scale_bytes % 8 == 0 && Format::quantised % 64 == 0);

  // Where the rows of a slot are; lanes `rows` apart have the same row.
  struct Source {
    u64 quantised, rest, scales;
    u32 present;  // a bit for each row
    bool is_slot = false;
  };
  // The next slot, of which the page numbers are in flight.
  struct Position {
    i32 found, token;
    bool is_slot, done;
  };
  // A lane's pieces of a slot.
  struct Held {
    u32 quantised[pieces][4];
    u32 rest[max_of(rest_pieces, 1)][4];
    u32 scales[2];
  };

  Shared& shared;
  const AttentionParams& params;
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32 - Shared::Warps::first_converter;
  u32 unit_use = 0;  // units that were opened
  i64 offset = 0;    // of the unit
  i32 token = 0, kv_end = 0, slots_left = 0;

  FP_DEVICE LatentConvert(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    Held held;
    Source here;
    Position ahead = advance();
    for (u32 use = 0;;) {
      const Source next = find(ahead);
      if (here.is_slot) {
        write_scales(held, here);
        shared.ring.wait_empty(use);
        exchange<true>(held, here, next, use);
        publish(here, use++);
      } else if (next.is_slot) {
        exchange<false>(held, here, next, 0);
      }
      if (ahead.done) return;
      here = next;
      // Only now, because the next unit may be published after this slot is computed.
      ahead = advance();
    }
  }

 private:
  // Goes to the next slot, or opens a unit without slots.
  FP_DEVICE Position advance() {
    if (slots_left == 0) {
      shared.converted_ring.wait_full(unit_use);
      const ConvertedUnit unit = shared.converted[shared.converted_ring.slot(unit_use)];
      __syncwarp();
      if (lane == 0) shared.converted_ring.release(unit_use);
      ++unit_use;
      if (unit.done) return {-1, 0, false, true};
      offset = unit.offset, kv_end = unit.kv_end, slots_left = unit.slots;
      token = unit.first_token + warp * rows + lane % rows;
      if (slots_left == 0) return {-1, 0, false, false};
    }
    const i32 of_lane = token;
    token += Shared::tokens;
    --slots_left;
    return {of_lane < kv_end ? Rows(params, offset).look_up(of_lane) : -1, of_lane, true, false};
  }

  FP_DEVICE Source find(const Position& at) const {
    if (!at.is_slot) return {};
    const bool exists = at.found >= 0;
    const CacheSlot slot = Rows(params, offset).slot(max_of(at.found, 0), exists ? at.token : 0);
    const LatentParts parts = Format::find(params, slot);
    const u32 present = __ballot_sync(0xffffffff, exists) & ((1u << rows) - 1);
    return {reinterpret_cast<u64>(parts.quantised), reinterpret_cast<u64>(parts.rest),
            reinterpret_cast<u64>(parts.scales), present, true};
  }

  // Loads a piece of a row; a row that does not exist is zero.
  template <int words>
  FP_DEVICE static void load(u32 (&to)[words], u64 row_address, u32 present, int row, int byte) {
    const u64 from = __shfl_sync(0xffffffff, row_address, row) + byte;
#pragma unroll
    for (u32& word : to) word = 0;
    if (present >> row & 1) ptx::load_once(to, reinterpret_cast<const void*>(from));
  }

  // Writes the pieces of a slot that have arrived, and requests those of the next one.
  template <bool writes>
  FP_DEVICE void exchange(Held& held, const Source& here, const Source& next, u32 use) const {
    const u32 tile = ptx::shared_address(shared.slots[shared.ring.slot(use)]) + warp * rows * Slot::stride;
    const u32 present = next.is_slot ? next.present : 0;
    if (row_scales > 0) {
      const int row = lane / max_of(row_scales, 1) % rows, byte = lane % max_of(row_scales, 1) * 8;
      load(held.scales, next.scales, Format::has_scales(params) ? present : 0, row, byte);
    }
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const int piece = i * 32 + lane, row = piece / row_pieces, in_row = piece % row_pieces;
      if constexpr (writes) write_quantised(held.quantised[i], tile, row, in_row);
      load(held.quantised[i], next.quantised, present, row, in_row * 16);
    }
#pragma unroll
    for (int i = 0; i < rest_pieces; ++i) {
      const int piece = i * 32 + lane, row = piece / rest_row_pieces, in_row = piece % rest_row_pieces;
      if constexpr (writes) write_rest(held.rest[i], tile, row, in_row);
      load(held.rest[i], next.rest, present, row, in_row * 16);
    }
  }

  FP_DEVICE void write_scales(const Held& held, const Source& here) const {
    __syncwarp();
    const int row = lane / row_scales;
    if (row < rows)
      *reinterpret_cast<uint2*>(shared.scales[warp * rows + row] + lane % row_scales * 8) =
          make_uint2(held.scales[0], held.scales[1]);
    __syncwarp();
  }

  // Lanes of neighbouring panels write their two chunks in different orders, so that eight lanes write to all banks.
  FP_DEVICE void write_quantised(const u32 (&words)[4], u32 tile, int row, int in_row) const {
    const Scale* scales = reinterpret_cast<const Scale*>(shared.scales[warp * rows + row]);
    const float scale = Format::has_scales(params) ? latent_scale(scales[in_row * 16 / Format::scale_columns])
                                                   : Format::common_scale(params);
    const bool turned = in_row / 4 % 2 != 0;
    store_widened<Cache>(words, turned, scale, store_to(tile, row, in_row * 2 + turned));
  }
  FP_DEVICE void write_rest(const u32 (&words)[4], u32 tile, int row, int in_row) const {
    constexpr int first = Format::quantised / 8;
    if constexpr (is_fp8<Rest>) {
      store_widened<Cache>(words, false, Format::rest_scale(params), store_to(tile, row, first + in_row * 2));
    } else {
      u32 pairs[4] = {words[0], words[1], words[2], words[3]};
      if constexpr (!is_same<Rest, Cache>) scale_pairs<Cache, Rest>(pairs, Format::rest_scale(params));
      store_to(tile, row, first + in_row)(0, pairs);
    }
  }
  // Stores to a chunk of a row, or to the other one of its pair.
  FP_DEVICE static auto store_to(u32 tile, int row, int chunk) {
    const u32 to = tile + Slot::chunk_offset(row, chunk);
    return [=](u32 second, const u32(&pairs)[4]) {
      ptx::store_shared(to ^ second * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
    };
  }

  FP_DEVICE void publish(const Source& here, u32 use) const {
    ptx::fence_before_products();
    __syncwarp();
    if (lane != 0) return;
    if constexpr (Shared::is_selected) shared.present[shared.ring.slot(use)][warp] = Present{here.present};
    ptx::mbarrier_arrive(shared.ring.full_barrier(use));
  }
};

}  // namespace flashpage
