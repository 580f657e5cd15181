// How kernels/helpers/mask_tiles.h evaluates a variant's mask function: once for every row of a row tile and every
// token that causal and window leave, and for each query head if the function depends on the head.
#pragma once
#include "flashpage/params/variant.h"
#include "flashpage/tile/mask/mask_tiles.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

template <class Traits>
struct FunctionTiles {
  using Variant = typename Traits::Variant;
  static constexpr int tokens = Traits::tile_kv;
  static constexpr int tiles = 2;                     // of a warp: they share the values that depend on the row alone
  static constexpr int slots = ceil_div(tokens, 32);  // tokens of a tile that a lane evaluates
  static constexpr int rows_at_once = 8;  // after these a warp checks whether both answers are known already

  const MaskTilesParams& params;
  const VariantArgs& args;
  WorkItem item;  // of the whole request

  FP_DEVICE FunctionTiles(const MaskTilesParams& params, const VariantArgs& args, const WorkItem& item)
      : params(params), args(args), item(item) {
    this->item.kv_begin = 0;
    this->item.kv_end = item.kv_len;
  }

  // The tiles of one cell that belong to warp `warp`.
  template <int warps>
  FP_DEVICE TileWord classify(i32 kv_head, i32 row_tile, i32 word, int warp) const {
    static_assert(warps * tiles == cell_tiles);
    const i32 first = (word * cell_tiles + warp * tiles) * tokens;
    const i32 end_token = min_of(item.kv_len, first + tiles * tokens);
    const i32 packed_rows = item.q_len * static_cast<i32>(params.group.divisor);
    i32 begin = row_tile * params.tile_q, end = min_of(packed_rows, begin + params.tile_q);
    if constexpr (!Variant::mask_has_head) {
      begin = params.group.div(begin);
      end = params.group.div(end - 1) + 1;
    }
    const TokenRange top = range_of(begin), bottom = range_of(end - 1);
    if (first >= min_of(bottom.end, item.kv_len) || end_token <= top.begin) return {};
    if (Variant::mask_is_causal && first > query_position(item, place_of(0, end - 1).row))
      return {0, exist(first) << warp * tiles};
    const bool clips = first < bottom.begin || end_token > top.end;
    const TileWord found =
        clips ? evaluate<true>(kv_head, begin, end, first) : evaluate<false>(kv_head, begin, end, first);
    return {found.visible << warp * tiles, found.hidden << warp * tiles};
  }

 private:
  // Rows are packed rows if the function depends on the head.
  FP_DEVICE PackedRow place_of(i32 kv_head, i32 row) const {
    if constexpr (Variant::mask_has_head) return unpack_row(params, kv_head, row);
    return {row, 0};
  }
  FP_DEVICE TokenRange range_of(i32 row) const {
    return visible_range(params, item, query_position(item, place_of(0, row).row));
  }

  // A bit for each tile of the pair that exists.
  FP_DEVICE u32 exist(i32 first) const { return first + tokens < item.kv_len ? 3 : 1; }

  // clips: some row does not see some token. Tiles are numbered in the warp's pair.
  template <bool clips>
  FP_DEVICE TileWord evaluate(i32 kv_head, i32 row, i32 end, i32 first) const {
    constexpr u32 all = (1u << tiles) - 1;
    i32 token[tiles][slots];
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
      for (int s = 0; s < slots; ++s) {
        const i32 last = min_of(first + (t + 1) * tokens, item.kv_len) - 1;
        token[t][s] = min_of(first + t * tokens + s * 32 + static_cast<i32>(threadIdx.x % 32),
                             last);  // the last one twice does no harm
      }
    u32 mine = 0, found;  // bits of visible tiles, then of hidden ones: the lane's, all lanes'
    do {
      bool visible[tiles] = {}, hidden[tiles] = {};
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        const PackedRow place = place_of(kv_head, min_of(row + r, end - 1));  // the last one again makes no difference
        const i32 position = query_position(item, place.row);
        const TokenRange range = visible_range(params, item, position);
#pragma unroll
        for (int t = 0; t < tiles; ++t)
#pragma unroll
          for (int s = 0; s < slots; ++s) {
            const bool sees = Variant::mask(args, item.request, place.head, position, token[t][s]);
            const bool counts = !clips || (token[t][s] >= range.begin && token[t][s] < range.end);
            visible[t] |= sees & counts;
            hidden[t] |= !sees & counts;
          }
      }
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        if (visible[t]) mine |= 1u << t;
        if (hidden[t]) mine |= 1u << (tiles + t);
      }
      found = __reduce_or_sync(0xffffffff, mine);
      row += rows_at_once;
    } while (row < end && found != (all << tiles | all));
    return {found & exist(first), found >> tiles & exist(first)};
  }
};

}  // namespace flashpage
