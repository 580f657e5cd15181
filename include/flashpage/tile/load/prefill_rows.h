// Loads K or V of a unit by cp.async, tile by tile, by some warps: for pages of any size, where boxes would be too
// small.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Has the interface of PrefillBoxes. Each warp loads a consecutive share of a tile's rows. A lane looks up the
// addresses of one or two rows and passes them to the others through shared memory: one load reads two addresses, where
// shuffles would take four instructions. `To`: SwizzledRows of a tile.
template <class Traits, class To, int tokens, int warps>
struct PrefillRows {
  using Cache = typename Traits::Cache;
  static constexpr int warp_rows = tokens / warps;
  static constexpr int groups = ceil_div(warp_rows, 32);  // groups of 32 rows that the lanes look up at once

  static_assert(warp_rows % 8 == 0 && Traits::kv_source == KvSource::paged);  // ragged K and V are loaded by boxes

  // Neighbouring lanes copy 16 bytes each of a row's first 128, then of the next 128, with one address for all of them.
  // A lane copies from two neighbouring rows, then from the two rows `rows_a_pair` later.
  static constexpr int chunks = To::used_bytes / 16;
  static constexpr int row_lanes = min_of(8, power_of_two_from(chunks));
  static constexpr int rows_a_pair = 2 * 32 / row_lanes;
  static constexpr int pairs = ceil_div(warp_rows, rows_a_pair);
  static constexpr int most_at_once = has_mask_tiles<Traits> ? 2 : 4;  // pairs whose sources are in registers
  static constexpr int batch = ceil_div(pairs, ceil_div(pairs, most_at_once));

  // The addresses of a warp's rows of a tile.
  struct alignas(16) Table {
    u64 rows[pairs * rows_a_pair];
  };

  // Where a row is: its page, which is looked up, and its row in the page.
  struct Found {
    u32 page, row;
  };
  // K or V of one unit.
  struct Source {
    const i32* pages;  // of the request
    const u8* head;    // the KV head's first row in page 0
    i32 first_token, kv_begin, kv_end;
    i32 tiles;
    int lane, first_row;  // first row of the warp
    u32 table;
    Found found[groups];  // the lane's rows of the next tile
  };

  const AttentionParams& params;
  const KvView& view;
  const Table (&tables)[warps];

  FP_DEVICE PrefillRows(const AttentionParams& params, const KvView& view, const Table (&tables)[warps])
      : params(params), view(view), tables(tables) {}

  FP_DEVICE static TileExtent extent(const Unit& unit) {
    if constexpr (has_mask_tiles<Traits>) return {};  // numbered in the request; the mask's tiles give them
    return {unit.kv_begin, max_of(1, ceil_div(unit.kv_end - unit.kv_begin, tokens))};
  }

  FP_DEVICE Source open(const Place& place) const {
    const TileExtent covered = extent(place.unit);
    const Unit& unit = place.unit;
    const Cache* head = static_cast<const Cache*>(view.data) + unit.kv_head * view.head_stride;
    // Opaque, so that values derived from the thread are computed again: code between units needs the registers.
    const int thread = ptx::opaque(threadIdx.x), warp = thread / 32 % warps;
    return {params.kv_indices + place.item.kv_offset,
            reinterpret_cast<const u8*>(head),
            covered.first_token,
            unit.kv_begin,
            unit.kv_end,
            covered.tiles,
            thread % 32,
            warp * warp_rows,
            ptx::shared_address(tables) + warp * static_cast<u32>(sizeof(Table)),
            {}};
  }
  // Starts the lookups of the first tile.
  FP_DEVICE void look_ahead(Source& source, int tile, int) const { look_ahead(source, tile); }
  // Starts the lookups of a tile, into the registers of the tile before: a move would wait for them.
  FP_DEVICE void look_ahead(Source& source, int tile) const {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const i32 token = source.first_token + tile * tokens + source.first_row + group * 32 + source.lane;
      Found& found = source.found[group];
      u32 page;
      params.page.divmod(token, page, found.row);
      if (is_mine(source, group) && token < source.kv_end) found.page = __ldg(source.pages + page);
    }
  }
  // Ends the lookups and passes the addresses to the warp.
  FP_DEVICE void find(const Source& source) const {
    __syncwarp();  // all lanes have read the table
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const Found& found = source.found[group];
      const u64 row = reinterpret_cast<u64>(source.head) +
                      (found.page * view.page_stride + found.row * view.token_stride) * sizeof(Cache);
      if (is_mine(source, group))
        ptx::store_shared(source.table + (group * 32 + source.lane) * 8, static_cast<u32>(row),
                          static_cast<u32>(row >> 32));
    }
    __syncwarp();
  }

  // Issues the copies of the next tile, whose rows have been found. Rows that the unit does not see become zero.
  FP_DEVICE void load(const Source& source, int tile, u32 to) const {
    const i32 first = source.first_token + tile * tokens + source.first_row, count = source.kv_end - first;
    const i32 hidden = has_mask_tiles<Traits> ? source.kv_begin - first : 0;  // rows before those that the unit sees
    if (hidden <= 0 && count >= warp_rows) {
      copy<true>(source, to + source.first_row * 128, 0, warp_rows);
    } else {
      copy<false>(source, to + source.first_row * 128, hidden, count);
    }
  }

 private:
  FP_DEVICE static bool is_mine(const Source& source, int group) {
    return group * 32 + 32 <= warp_rows || group * 32 + source.lane < warp_rows;
  }

  // `all`: no row is hidden.
  template <bool all>
  FP_DEVICE void copy(const Source& source, u32 to, i32 hidden, i32 count) const {
    const int chunk = source.lane % row_lanes, lane_row = source.lane / row_lanes * 2;
    const u32 lane_to = to + To::chunk_offset(lane_row, chunk), lane_from = source.table + lane_row * 8;
#pragma unroll(all ? pairs : 1)
    for (int begin = 0; begin < pairs; begin += batch) {
      // Reads all sources before it issues the copies: ptxas makes a cp.async wait for earlier accesses to shared
      // memory.
      u32 from[batch][4];
#pragma unroll
      for (int i = 0; i < batch; ++i)
        if (pairs % batch == 0 || begin + i < pairs)
          ptx::load_shared(from[i], lane_from + (begin + i) * rows_a_pair * 8);
#pragma unroll
      for (int i = 0; i < batch * 2; ++i) {
        const int before = (begin + i / 2) * rows_a_pair + i % 2, row = before + lane_row;
        if (pairs % batch != 0 && begin + i / 2 >= pairs) break;
        if (pairs * rows_a_pair > warp_rows && row >= warp_rows) continue;
        const u32* words = from[i / 2] + i % 2 * 2;
        const u64 begin_of_row = static_cast<u64>(words[1]) << 32 | words[0];
        copy_row((lane_to ^ (before & 7) * 16) + before * 128, reinterpret_cast<const u8*>(begin_of_row) + chunk * 16,
                 chunk, all || ((!has_mask_tiles<Traits> || row >= hidden) && row < count));
      }
    }
  }
  // Copies the lane's pieces of one row.
  FP_DEVICE void copy_row(u32 to, const u8* from, int chunk, bool exists) const {
#pragma unroll
    for (int first = 0; first < chunks; first += row_lanes)
      if (first + row_lanes <= chunks || first + chunk < chunks)
        ptx::cp_async<16>(to + To::chunk_offset(0, first), from + first * 16, exists);
  }
};

}  // namespace flashpage
