// The warps of latent_columns_sm90 that convert values, and those that convert the tail: they copy a part of the
// columns to memory of their own, and write it to slots in the type of the products.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/tile/load/latent_numbers.h"

namespace flashpage {

// The scales of a part's columns of a row, in one register.
template <class Scale>
struct PartScales;
template <>
struct PartScales<float> {
  static constexpr int count = 1;
  float one = 0.f;  // of all columns

  FP_DEVICE static PartScales load(const u8* from, int first) {
    return {__ldg(reinterpret_cast<const float*>(from) + first)};
  }
  FP_DEVICE float of_panel(int) const { return one; }
  FP_DEVICE PartScales of_lane(int lane) const { return {__shfl_sync(0xffffffff, one, lane)}; }
};
template <>
struct PartScales<PowerOfTwo> {
  static constexpr int count = 2;
  u32 exponents = 0;  // of the first panel of 64 columns, and of the second one

  FP_DEVICE static PartScales load(const u8* from, int first) {
    return {__ldg(reinterpret_cast<const u16*>(from + first))};
  }
  FP_DEVICE float of_panel(int panel) const {
    return latent_scale(PowerOfTwo{static_cast<u8>(exponents >> panel * 8 & 0xff)});
  }
  FP_DEVICE PartScales of_lane(int lane) const { return {__shfl_sync(0xffffffff, exponents, lane)}; }
};

// Two warps have a part, each the rows of half of a block's tokens; a lane has the same pieces of each block. It copies
// them by cp.async and reads no others, so that it waits for the oldest copy alone: when a piece is converted, its
// place receives that of the next block. Tokens are looked up a block before that.
//
// DeepSeek V4's last 64 value columns have 16 bits: lanes of the last panel of the second CTA's last part have
// two pieces of them in place of one.
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
  static constexpr int rows_a_pass = 32 / row_pieces, panel_pieces = 64 * static_cast<int>(sizeof(Stored)) / 16;
  static constexpr int stride = is_tail ? Tile::tail_stride : 128;  // bytes from row to row in shared memory
  static_assert(together * rows_a_pass % 8 == 0, "steps that keep the swizzle");
  static_assert(rows == 32, "each lane has the token of one row");
  static_assert(pieces <= Shared::pieces_ahead, "all pieces of a block may be in flight");
  using Scales = PartScales<typename Format::Scale>;
  // Whether the last panel of value columns has 16 bits, which have no scale.
  static constexpr bool has_rest_panel = Shared::has_rest_panel;
  static_assert(has_rest_panel ? Format::quantised + 64 == Traits::head_dim_vo && Format::rest == 64
                               : Format::quantised == Traits::head_dim_vo);
  static_assert(is_tail ? is_same<Scales, PartScales<float>> : columns <= Scales::count * Format::scale_columns,
                "what PartScales holds");

  static constexpr bool has_two_caches = Traits::kv_source == KvSource::two_lists;
  static constexpr u32 nowhere = 0xffffffff, in_second = 1u << 31;

  // A token's row, as a lane reads it.
  struct Row {
    // 16 bytes from the part's first row in the cache, and `in_second` if that is the second one; nowhere: there is no
    // token.
    u32 at;
    Scales scales;
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
        if constexpr (has_rest_panel) {
          if (in_rest_panel(in_row)) {
            write_rest_pieces(step.words[k], i + k, to, k);
            continue;
          }
        }
        write_piece(step.words[k], to, k, scale_of(step.scales[k], in_row), is_turned(in_row));
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
    found = Rows(params, place->place.item).look_up(token);
  }
  FP_DEVICE Row row_of(i32 number, int block) const {
    const i32 token = token_of(block);
    if (number < 0 || token >= place->place.unit.kv_end) return {nowhere, {}};
    if (!is_used<Traits::kv_source>(params, token, place->first_length)) return {nowhere, {}};
    const LatentParts parts = parts_of(number, block);
    Scales scales{};
    if constexpr (is_same<Scales, PartScales<float>>)
      scales.one = is_tail ? Format::rest_scale(params) : Format::common_scale(params);
    if (!is_tail && Format::has_scales(params))
      scales = Scales::load(parts.scales, first_column() / Format::scale_columns);
    return {place_of(begin_of(parts), token), scales};
  }
  FP_DEVICE LatentParts parts_of(i32 number, int block) const {
    return Rows(params, place->place.item).template parts<Format>(params, number, token_of(block));
  }
  // Row::at of a token whose part is there.
  FP_DEVICE u32 place_of(const u8* there, i32 token) const {
    if constexpr (has_two_caches) {
      const u8* const first = begin_of(Format::find(params.second, CacheSlot{0, 0}));
      if (is_in_second(params, token)) return static_cast<u32>((there - first) / 16) | in_second;
    }
    return static_cast<u32>((there - first_begin()) / 16);
  }
  FP_DEVICE const u8* first_begin() const { return begin_of(Format::find(params, CacheSlot{0, 0})); }
  // A piece of the row at this place. `from`: of the first row of the first cache.
  FP_DEVICE const u8* piece_at(const u8* from, u32 at) const {
    if constexpr (!has_two_caches) return from + static_cast<u64>(at) * 16;
    const i64 between = static_cast<const u8*>(params.second.k.data) - static_cast<const u8*>(params.k.data);
    return from + (at & in_second ? between : 0) + static_cast<u64>(at & ~in_second) * 16;
  }
  FP_DEVICE static const u8* begin_of(const LatentParts& parts) { return is_tail ? parts.rest : parts.quantised; }
  FP_DEVICE int first_column() const { return Tile::template first_column<is_tail>(part); }

  FP_DEVICE static int sharer() { return static_cast<int>(ptx::opaque(threadIdx.x / 32 % Shared::sharers)); }
  FP_DEVICE static int lane() { return static_cast<int>(ptx::opaque(threadIdx.x % 32)); }
  FP_DEVICE u8* own_place(int i) const {
    return shared.arriving[static_cast<int>(part)][sharer()][i][threadIdx.x % 32];
  }
  // The place of the second piece, for lanes whose columns have 16 bits.
  FP_DEVICE u8* second_place(int i) const { return shared.arriving_rest[sharer()][i][threadIdx.x % 32]; }
  // Whether the lane's columns are those of the last panel, if this one has 16 bits.
  FP_DEVICE bool in_rest_panel(int in_row) const {
    return has_rest_panel && part == ColumnsPart::second && ptx::cluster_rank() == 1 && in_row >= panel_pieces;
  }
  // The lane's first piece of the part's columns in the cache's first row.
  FP_DEVICE const u8* first_piece() const {
    const int in_row = lane() % row_pieces;
    const int offset = in_row * 16 + (in_rest_panel(in_row) ? (in_row - panel_pieces) * 16 : 0);
    return first_begin() + first_column() * sizeof(Stored) + offset;
  }
  FP_DEVICE static float scale_of(const Scales& scales, int in_row) { return scales.of_panel(in_row / panel_pieces); }
  // Pieces that are converted together, and their rows' scales.
  struct Step {
    u32 words[together][4];
    Scales scales[together];
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
      step.scales[k] = arriving.scales.of_lane((i + k) * rows_a_pass + lane_row);
    }
    return step;
  }
  // Requests pieces of a block, in a group of their own. Rows that do not exist become zero.
  FP_DEVICE void request(const u8* from, const Row& row, int i, int lane_row) const {
#pragma unroll
    for (int k = i; k < i + together; ++k) {
      const u32 at = __shfl_sync(0xffffffff, row.at, k * rows_a_pass + lane_row);
      const bool exists = at != nowhere;
      const u8* const piece = piece_at(from, exists ? at : 0);
      ptx::cp_async<16>(ptx::shared_address(own_place(k)), piece, exists);
      if (in_rest_panel(lane() % row_pieces))
        ptx::cp_async<16>(ptx::shared_address(second_place(k)), piece + 16, exists);
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
      write_as<Stored>(words, to, i, 0);
    }
  }
  // Both pieces of a lane whose columns have 16 bits. The lane's panel is an odd one (is_turned), so its second eight
  // columns come first.
  FP_DEVICE void write_rest_pieces(const u32 (&words)[4], int piece, u32 to, int i) const {
    const uint4 next = *reinterpret_cast<const uint4*>(second_place(piece));
    const u32 second[4] = {next.x, next.y, next.z, next.w};
    write_as<typename Format::Rest>(second, to, i, 0);
    write_as<typename Format::Rest>(words, to, i, 1);
  }
  // Eight elements of 16 bits.
  template <class From>
  FP_DEVICE static void write_as(const u32 (&words)[4], u32 to, int i, u32 second) {
    u32 pairs[4] = {words[0], words[1], words[2], words[3]};
    if constexpr (!is_same<From, Cache>) scale_pairs<Cache, From>(pairs, 1.f);
    store_chunk(to, i, second, pairs);
  }
};

}  // namespace flashpage
