// The converting warps of latent_decode_sm90: they copy rows in fp8 to memory of their own, and write them to slots in
// the type of the products.
//
// Each warp has an equal part of a slot's rows, each lane the same pieces of every slot's rows: scales, fp8 numbers,
// the rest. A lane copies its own pieces by cp.async and reads no others, so that it waits for the oldest copy alone
// and warps need not wait for each other. When a piece is converted, its place receives a later one.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/shared.h"
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
  // A lane's groups of pieces in a slot, each of which is copied and converted together: scales, numbers, the rest.
  static constexpr int together = pieces % 2 == 0 && rest_pieces % 2 == 0 ? 2 : 1;
  static constexpr int first_quantised = row_scales > 0 ? 1 : 0, first_rest = first_quantised + pieces / together;
  static constexpr int groups = first_rest + rest_pieces / together;
  static constexpr int in_flight = min_of(groups, Shared::pieces_ahead / together);
  static constexpr u32 piece_stride = sizeof(Shared::arriving[0][0]), group_stride = together * piece_stride;
  static_assert(rows * max_of(row_scales, 1) <= 32, "a pass of the warp covers the scales of its rows");
  static_assert(rows * row_pieces % 32 == 0 && rows * rest_row_pieces % 32 == 0, "lanes have equally many pieces");
  static_assert(scale_bytes <= Shared::scale_bytes && scale_bytes % 8 == 0,
                "a row has at most 16 bytes of scales, in pieces of 8");
  static_assert(Format::quantised % 64 == 0, "columns in fp8 are whole panels");

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
  Shared& shared;
  const AttentionParams& params;
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32 - Shared::Warps::first_converter;
  u32 unit_use = 0;  // units that were opened
  i64 offset = 0;    // of the unit
  i32 token = 0, kv_end = 0, slots_left = 0, first_length = 0;
  // Where the lane's groups arrive, one after the other, and the next of these places. Both differ from lane to lane:
  // a copy to the sum of a lane's register and one that all lanes share is encoded wrongly (docs/tried.md, NVRTC).
  const u32 places = ptx::shared_address(shared.arriving[warp][0][lane]);
  u32 place = places;
  u32 words[together][4];  // of that group, read while the one before is converted
  const u64 policy = ptx::evict_first();

  FP_DEVICE LatentConvert(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    Source here;
    Position ahead = advance();
    for (u32 use = 0;;) {
      const Source next = find(ahead);
      // The page numbers after it arrive meanwhile, unless they are of the next unit, which may be published only after
      // this slot is computed.
      const bool is_open = slots_left > 0;
      Position after;
      if (is_open) after = advance();
      if (here.is_slot) {
        shared.ring.wait_empty(use);
        convert(here, next, use);
        publish(here, use++);
      } else if (next.is_slot) {
        request_first(next);
      }
      if (ahead.done) return;
      here = next;
      ahead = is_open ? after : advance();
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
      offset = unit.offset, kv_end = unit.kv_end, slots_left = unit.slots, first_length = unit.first_length;
      token = unit.first_token + warp * rows + lane % rows;
      if (slots_left == 0) return {-1, 0, false, false};
    }
    const i32 of_lane = token;
    token += Shared::tokens;
    --slots_left;
    return {of_lane < kv_end ? Rows(params, offset).look_up(of_lane) : -1, of_lane, true, false};
  }

  // Not a branch: the page number must have arrived on every path before the next one is looked up.
  FP_DEVICE Source find(const Position& at) const {
    const bool exists = at.found >= 0 && is_used<Traits::kv_source>(params, at.token, first_length);
    const LatentParts parts =
        Rows(params, offset).template parts<Format>(params, max_of(at.found, 0), exists ? at.token : 0);
    const u32 present = __ballot_sync(0xffffffff, exists) & ((1u << rows) - 1);
    return {reinterpret_cast<u64>(parts.quantised), reinterpret_cast<u64>(parts.rest),
            reinterpret_cast<u64>(parts.scales), present, at.is_slot};
  }

  // Goes to the place of the group after a slot's `group`.
  FP_DEVICE void next_place(int group) {
    if constexpr (groups % in_flight == 0) {  // known to the compiler, as all slots have the same places
      place = places + (group + 1) % in_flight * group_stride;
    } else {
      place = place == places + (in_flight - 1) * group_stride ? places : place + group_stride;
    }
  }

  // Calls use(i, row, piece of the row) for the pieces of a group of numbers or of the rest.
  template <int row_pieces>
  FP_DEVICE void for_pieces(int group, auto&& use) const {
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int piece = (group * together + i) * 32 + lane;
      use(i, piece / max_of(row_pieces, 1), piece % max_of(row_pieces, 1));
    }
  }

  // Requests a group of a slot, which arrives at `to`. Rows that do not exist become zero.
  FP_DEVICE void request(const Source& of, int group, u32 to) const {
    if (of.is_slot) {
      if (group < first_quantised) {
        const bool is_stored = Format::has_scales(params);
        copy<8>(of, of.scales, lane / max_of(row_scales, 1) % rows, lane % max_of(row_scales, 1), to, 0, is_stored);
      } else if (group < first_rest) {
        for_pieces<row_pieces>(group - first_quantised,
                               [&](int i, int row, int in_row) { copy<16>(of, of.quantised, row, in_row, to, i); });
      } else {
        for_pieces<rest_row_pieces>(group - first_rest,
                                    [&](int i, int row, int in_row) { copy<16>(of, of.rest, row, in_row, to, i); });
      }
    }
    ptx::cp_async_commit();
  }
  template <int bytes>
  FP_DEVICE void copy(const Source& of, u64 rows_at, int row, int in_row, u32 to, int i, bool is_stored = true) const {
    const u64 from = __shfl_sync(0xffffffff, rows_at, row) + in_row * bytes;
    const bool exists = is_stored && (of.present >> row & 1);
    ptx::cp_async<bytes>(to + i * piece_stride, reinterpret_cast<const void*>(from), exists, policy);
  }

  FP_DEVICE void request_first(const Source& of) {
#pragma unroll
    for (int group = 0; group < in_flight; ++group) {
      request(of, group, place);
      next_place(group);
    }
    ptx::cp_async_wait<in_flight - 1>();
    read_words();
  }
  FP_DEVICE void read_words() {
#pragma unroll
    for (int i = 0; i < together; ++i) ptx::load_shared(words[i], place + i * piece_stride);
  }

  // Writes the groups of a slot as they arrive, and requests later ones of it and those of the next slot.
  FP_DEVICE void convert(const Source& here, const Source& next, u32 use) {
    const u32 tile = ptx::shared_address(shared.slots[shared.ring.slot(use)]) + warp * rows * Slot::stride;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      u32 arrived[together][4];
#pragma unroll
      for (int i = 0; i < together; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) arrived[i][k] = words[i][k];
      const u32 free_place = place;
      next_place(group);
      ptx::cp_async_wait<in_flight - 2>();
      read_words();
      if (group < first_quantised) {
        write_scales(make_uint2(arrived[0][0], arrived[0][1]));
      } else if (group < first_rest) {
        for_pieces<row_pieces>(group - first_quantised,
                               [&](int i, int row, int in_row) { write_quantised(arrived[i], tile, row, in_row); });
      } else {
        for_pieces<rest_row_pieces>(group - first_rest,
                                    [&](int i, int row, int in_row) { write_rest(arrived[i], tile, row, in_row); });
      }
      const int later = group + in_flight;
      request(later < groups ? here : next, later % groups, free_place);
    }
  }

  // All lanes read the scales of the slot before.
  FP_DEVICE void write_scales(uint2 own) const {
    const int row = lane / max_of(row_scales, 1);
    __syncwarp();
    if (row < rows)
      *reinterpret_cast<uint2*>(shared.scales[warp * rows + row] + lane % max_of(row_scales, 1) * 8) = own;
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
