// What kernels/mask_tiles.h learns from a variant's mask function: four tokens a lane, each asked once for every row of
// a block that causal and window let see it; for every head of a KV head too where the function looks at the head.
#pragma once
#include "flashpage/tile/mask_tiles.h"
#include "flashpage/tile/unit.h"
#include "flashpage/variant.h"

namespace flashpage {

template <class Variant>
struct AskedTiles {
  static constexpr int slots = 4, span = 32 * slots;  // tokens of a lane, and of a warp, at a time
  static constexpr int parts = 4;                     // of a block's rows: enough to do for all warps

  const MaskTilesParams& params;
  const VariantArgs& args;
  WorkItem item;  // of the whole request

  FP_DEVICE AskedTiles(const MaskTilesParams& params, const VariantArgs& args, const WorkItem& item)
      : params(params), args(args), item(item) {
    this->item.kv_begin = 0;
    this->item.kv_end = item.kv_len;
  }

  // What warp `warp` of `warps` is told of the tiles of one cell: the others are told the rest.
  FP_DEVICE TileWord look(i32 kv_head, i32 row_block, i32 word, int warp, int warps) const {
    const i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
    i32 begin = row_block * params.tile_q, end = min_of(packed_rows, begin + params.tile_q);
    if constexpr (!Variant::mask_has_head) {
      begin = params.group.div(begin);
      end = params.group.div(end - 1) + 1;
    }
    const i32 part_rows = ceil_div(end - begin, parts);
    const i32 cell_tokens = cell_tiles * static_cast<i32>(params.tile_kv.divisor), first_token = word * cell_tokens;
    const i32 end_token = min_of(item.kv_len, first_token + cell_tokens);
    Found found{};
    for (i32 share = warp;; share += warps) {
      const i32 token = first_token + share / parts * span, row = begin + share % parts * part_rows;
      if (token >= end_token) break;
      const i32 end_row = min_of(end, row + part_rows);
      if (row >= end_row) continue;
      const TokenRange top = range_of(row), bottom = range_of(end_row - 1);
      if (token >= bottom.end || token + span <= top.begin) continue;
      if (token >= bottom.begin && token + span <= top.end) {
        ask<false>(kv_head, row, end_row, token, first_token, found);
      } else {
        ask<true>(kv_head, row, end_row, token, first_token, found);
      }
    }
    return {__reduce_or_sync(0xffffffff, found.visible), __reduce_or_sync(0xffffffff, found.hidden)};
  }

 private:
  using Found = TileWord;  // of one lane

  // Rows are packed rows where the function looks at the head.
  FP_DEVICE PackedRow place_of(i32 kv_head, i32 row) const {
    if constexpr (Variant::mask_has_head) return unpack_row(params, kv_head, row);
    return {row, 0};
  }
  FP_DEVICE TokenRange range_of(i32 row) const {
    return visible_range(params, item, query_position(item, place_of(0, row).row));
  }

  // clips: some row does not see some token, which may not exist.
  template <bool clips>
  FP_DEVICE void ask(i32 kv_head, i32 row, i32 end_row, i32 first, i32 first_token, Found& found) const {
    const i32 mine = first + static_cast<i32>(threadIdx.x % 32);
    i32 token[slots], asked[slots], visible[slots];
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      token[s] = clips ? min_of(mine + s * 32, item.kv_len - 1) : mine + s * 32;
      asked[s] = clips ? 0 : end_row - row;
      visible[s] = 0;
    }
#pragma unroll 2
    for (; row < end_row; ++row) {
      const PackedRow place = place_of(kv_head, row);
      const i32 position = query_position(item, place.row);
      const TokenRange range = range_of(row);
#pragma unroll
      for (int s = 0; s < slots; ++s) {
        const bool sees = Variant::mask(args, item.request, place.head, position, token[s]);
        const bool counts = !clips || (mine + s * 32 >= range.begin && mine + s * 32 < range.end);
        if (clips) asked[s] += counts;
        visible[s] += sees && counts;
      }
    }
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const u32 tile = 1u << (params.tile_kv.div(mine + s * 32 - first_token) & 31);
      if (visible[s] > 0) found.visible |= tile;
      if (visible[s] < asked[s]) found.hidden |= tile;
    }
  }
};

}  // namespace flashpage
