// The warps of latent_columns_sm90 that convert values, and those that convert the tail: they copy a part of the
// columns to memory of their own, and write it to slots in the type of the products.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/tile/load/latent_numbers.h"

namespace flashpage {

// Two warps have a part, each the rows of half of a block's tokens; a lane has the same pieces of each block. It copies
// them by cp.async and reads no others, so that it waits for the oldest copy alone: when a piece is converted, its
// place receives that of the next block. Tokens are looked up a block before that.
template <class Traits, bool is_tail>
struct ColumnsConvert {
  using Shared = ColumnsShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  using Present = typename Shared::Present;
  using Format = typename Shared::Format;
  static constexpr int rows = Shared::tokens / Shared::sharers;  // of the warp, in a block
  using Stored = typename select_type<is_tail, typename Format::Rest, E4m3>::type;
  static constexpr int columns = is_tail ? Tile::tail_columns : Tile::part_panels * Tile::panel_columns;
  // Pieces of 16 bytes: of a row, and of a lane in all of the warp's rows.
  static constexpr int row_pieces = columns * static_cast<int>(sizeof(Stored)) / 16, pieces = rows * row_pieces / 32;
  static constexpr int together = 2;  // pieces that are copied and converted together: a step
  // Whether a step is read before the one before it is converted, because a read takes as long. It takes registers:
  // those of the tail's warps are few, and with 128 rows computing warps need them more.
  static constexpr bool reads_ahead = !is_tail && Shared::takes_turns;
  static constexpr int rows_a_pass = 32 / row_pieces;
  static constexpr int stride = is_tail ? Tile::tail_stride : 128;  // bytes from row to row in shared memory
  static_assert(together * rows_a_pass % 8 == 0, "steps that keep the swizzle");
  static_assert(rows == 32, "each lane has the token of one row");
  static_assert(pieces <= Shared::pieces_ahead, "all pieces of a block may be in flight");
  static_assert(Format::quantised == Traits::head_dim_vo, "all value columns are e4m3");
  static_assert(is_same<typename Format::Scale, float> && (is_tail || columns <= Format::scale_columns),
                "a part's columns have one scale");

  static constexpr u32 nowhere = 0xffffffff;

  // A token's row, as a lane reads it.
  struct Row {
    u32 at;       // 16 bytes from the part's first row in the cache; nowhere: there is no token
    float scale;  // of the part's columns
  };

  Shared& shared;
  const AttentionParams& params;
  const ColumnsPart part;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  Row arriving;            // of the lane's token in the block whose pieces are in flight
  // Page or list entry of the lane's token in the block after `arriving`; past the unit's end that of its last token;
  // negative: the list names no token.
  i32 found;

  FP_DEVICE ColumnsConvert(Shared& shared, const AttentionParams& params, ColumnsPart part)
      : shared(shared), params(params), part(part) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    if (place->blocks == 0) return;
    look_up(0);
    arriving = row_of(found, 0);
    look_up(1);
    const int lane_row = lane() / row_pieces;
    const u8* const from = first_piece();
#pragma unroll
    for (int i = 0; i < pieces; i += together) request(from, arriving, i, lane_row);
  }

  FP_DEVICE void load(int block, u32 use) {
    const bool has_next = block + 1 < place->blocks;
    const Row next = row_of(found, block + 1);
    look_up(block + 2);
    // Recomputed in each block, as are the addresses that follow from it: kept, they would spill.
    const int lane_row = lane() / row_pieces, in_row = lane() % row_pieces;
    const u8* const from = first_piece();
    shared.wait_empty(use);
    u32 to = shared.block(use) + first_chunk(sharer() * rows + lane_row, in_row);
    Step step;
    if (reads_ahead) step = arrived(0, lane_row);
#pragma unroll 1
    for (int i = 0; i < pieces; i += together) {
      Step later;
      if (!reads_ahead) {
        step = arrived(i, lane_row);
      } else if (i + together < pieces) {
        later = arrived(i + together, lane_row);
      }
#pragma unroll
      for (int k = 0; k < together; ++k) {
        write_piece(step.words[k], to, k, step.scales[k], is_turned(in_row));
      }
      to += together * rows_a_pass * stride;
      if (has_next) {
        request(from, next, i, lane_row);
      } else {
        ptx::cp_async_commit();
      }
      if (reads_ahead) step = later;
    }
    ptx::fence_before_products();
    const Present present = Present::of_lanes(rows, arriving.at == nowhere ? -1 : 0);
    arriving = next;
    if (Shared::is_selected && part == ColumnsPart::first && threadIdx.x % 32 == 0)
      shared.present[Shared::slot(use)][sharer()] = present;
    ptx::mbarrier_arrive(shared.full_barrier(use, part));
  }

 private:
  FP_DEVICE i32 token_of(int block) const {
    return place->first_token + block * Shared::tokens + sharer() * rows + static_cast<int>(threadIdx.x % 32);
  }
  FP_DEVICE void look_up(int block) {
    // Without a branch, after which the compiler would wait for the number.
    const i32 token = min_of(token_of(block), place->place.unit.kv_end - 1);
    found = Rows(params, place->place.item.kv_offset).look_up(token);
  }
  FP_DEVICE Row row_of(i32 number, int block) const {
    if (number < 0 || token_of(block) >= place->place.unit.kv_end) return {nowhere, 0.f};
    const LatentParts parts = parts_of(number, block);
    float scale = is_tail ? Format::rest_scale(params) : Format::common_scale(params);
    if (!is_tail && Format::has_scales(params))
      scale = __ldg(reinterpret_cast<const float*>(parts.scales) + first_column() / Format::scale_columns);
    return {static_cast<u32>((begin_of(parts) - first_begin()) / 16), scale};
  }
  FP_DEVICE LatentParts parts_of(i32 number, int block) const {
    return Rows(params, place->place.item.kv_offset).template parts<Format>(params, number, token_of(block));
  }
  FP_DEVICE const u8* first_begin() const { return begin_of(Format::find(params, CacheSlot{0, 0})); }
  FP_DEVICE static const u8* begin_of(const LatentParts& parts) { return is_tail ? parts.rest : parts.quantised; }
  FP_DEVICE int first_column() const { return Tile::template first_column<is_tail>(part); }

  FP_DEVICE static int sharer() { return static_cast<int>(ptx::opaque(threadIdx.x / 32 % Shared::sharers)); }
  FP_DEVICE static int lane() { return static_cast<int>(ptx::opaque(threadIdx.x % 32)); }
  FP_DEVICE u8* own_place(int i) const {
    return shared.arriving[static_cast<int>(part)][sharer()][i][threadIdx.x % 32];
  }
  // The lane's first piece of the part's columns in the cache's first row.
  FP_DEVICE const u8* first_piece() const {
    return first_begin() + first_column() * sizeof(Stored) + lane() % row_pieces * 16;
  }
  // Pieces that are converted together, and their rows' scales.
  struct Step {
    u32 words[together][4];
    float scales[together];
  };
  // Waits for the pieces from `i` on, and reads them.
  FP_DEVICE Step arrived(int i, int lane_row) const {
    constexpr int later_steps = pieces / together - (reads_ahead ? 2 : 1);  // that may be in flight
    ptx::cp_async_wait<later_steps>();
    Step step;
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const uint4 words = *reinterpret_cast<const uint4*>(own_place(i + k));
      step.words[k][0] = words.x, step.words[k][1] = words.y, step.words[k][2] = words.z, step.words[k][3] = words.w;
      step.scales[k] = __shfl_sync(0xffffffff, arriving.scale, (i + k) * rows_a_pass + lane_row);
    }
    return step;
  }
  // Requests pieces of a block, in a group of their own. Rows that do not exist become zero.
  FP_DEVICE void request(const u8* from, const Row& row, int i, int lane_row) const {
#pragma unroll
    for (int k = i; k < i + together; ++k) {
      const u32 at = __shfl_sync(0xffffffff, row.at, k * rows_a_pass + lane_row);
      const bool exists = at != nowhere;
      ptx::cp_async<16>(ptx::shared_address(own_place(k)), from + static_cast<u64>(exists ? at : 0) * 16, exists);
    }
    ptx::cp_async_commit();
  }

  // Lanes of neighbouring panels write their two chunks in different orders, so that eight lanes write to all banks.
  FP_DEVICE static bool is_turned(int in_row) { return is_fp8<Stored> && in_row / 4 % 2 != 0; }
  // The offset of the chunk that a lane writes first, of its first piece.
  FP_DEVICE u32 first_chunk(int lane_row, int in_row) const {
    const int first = part == ColumnsPart::second ? columns / 8 : 0;
    const int chunk = is_fp8<Stored> ? in_row * 2 + is_turned(in_row) : in_row;
    return is_tail ? Tile::tail_offset(lane_row, chunk) : Tile::chunk_offset(lane_row, first + chunk);
  }
  // `to`: as first_chunk. Rows of a step differ in constants, and the second chunk in one bit.
  FP_DEVICE static void store_chunk(u32 to, int i, u32 second, const u32 (&pairs)[4]) {
    const u32 swizzle = is_tail ? 0 : (i * rows_a_pass & 7) * 16;
    ptx::store_shared((to ^ swizzle ^ second * 16) + i * rows_a_pass * stride, pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  FP_DEVICE static void write_piece(const u32 (&words)[4], u32 to, int i, float scale, bool turned) {
    if constexpr (is_fp8<Stored>) {
      store_widened<Cache>(words, turned, scale,
                           [=](u32 second, const u32(&pairs)[4]) { store_chunk(to, i, second, pairs); });
    } else {
      u32 pairs[4] = {words[0], words[1], words[2], words[3]};
      if constexpr (!is_same<Stored, Cache>) scale_pairs<Cache, Stored>(pairs, 1.f);
      store_chunk(to, i, 0, pairs);
    }
  }
};

}  // namespace flashpage
