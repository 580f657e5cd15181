// Loads K or V of a unit with the copy engine, tile by tile, by one warp: each box has at most a page, one KV head and
// 128 bytes of its rows.
#pragma once
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/layout/swizzled_rows.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// `Rows`: SwizzledRows of a tile.
template <class Traits, class Rows, int tokens>
struct PrefillBoxes {
  static constexpr bool paged = Traits::kv_source == KvSource::paged;
  // Whether loading warps have few registers: they also rotate rows, or three warpgroups take most of them for wide
  // accumulators.
  static constexpr bool lacks_registers = Traits::position_encoding == PositionEncoding::rope ||
                                          (Traits::tile_q / Traits::ctas > 128 && Traits::head_dim_vo > 96);

  static constexpr bool finds_rows_again = paged && lacks_registers;  // rather than keep those that look_up found

  // K or V of one unit.
  struct Source {
    i64 offset;  // paged: index of the first page number; ragged: first row
    i32 kv_head, first_token, kv_begin, kv_end;
    i32 tiles;
    BoxOrigin found, found_next;  // the lane's boxes of the next two tiles
  };

  const AttentionParams& params;
  const TensorMap& map;
  const int box_shift;  // log2 of the tokens of a box

  FP_DEVICE PrefillBoxes(const AttentionParams& params, const TensorMap& map)
      : params(params), map(map), box_shift(31 - __clz(box_tokens(params))) {}

  FP_DEVICE TileExtent extent(const Place& place) const {
    if constexpr (has_mask_tiles<Traits>) return {};  // numbered in the request; the mask's tiles give them
    const Unit& unit = place.unit;
    i32 first_token = paged ? unit.kv_begin >> box_shift << box_shift : unit.kv_begin;
    if constexpr (!paged && Traits::loader == Loader::columns)
      first_token -= static_cast<i32>(place.item.kv_offset + first_token) & 15;  // tile/load/column_boxes.h
    return {first_token, max_of(1, ceil_div(unit.kv_end - first_token, tokens))};
  }

  FP_DEVICE Source open(const Place& place) const {
    const Unit& unit = place.unit;
    Source source;
    source.offset = place.item.kv_offset;
    source.kv_head = unit.kv_head;
    source.kv_begin = unit.kv_begin;
    source.kv_end = unit.kv_end;
    const TileExtent covered = extent(place);
    source.first_token = covered.first_token;
    source.tiles = covered.tiles;
    return source;
  }
  // Starts the lookups of the first two tiles.
  FP_DEVICE void look_ahead(Source& source, int tile, int next) const {
    source.found = look_up(source, tile);
    source.found_next = look_up(source, next);
  }

  // Issues the copies of tile `now` and looks up the pages of tile `ahead`, two tiles later. `barrier` expects one
  // arrival plus the bytes.
  FP_DEVICE void load(Source& source, int now, int ahead, u32 to, u32 barrier) const {
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect(barrier, Rows::tile_bytes);
    __syncwarp();
    int boxes = tokens >> box_shift;
    if constexpr (has_mask_tiles<Traits> || lacks_registers) boxes = ptx::opaque(boxes);  // few registers are free
    const Share mine = share(boxes);
    // Opaque as well: if unrolled, the loop would take more registers.
    const auto step = [&](int i) {
      return lacks_registers ? static_cast<int>(ptx::opaque(i + mine.box_step())) : i + mine.box_step();
    };
#pragma unroll 1
    for (int i = mine.first_box(); i < boxes; i = step(i)) {
      const i32 page = paged ? __shfl_sync(0xffffffff, source.found.page, i) : 0;
      const i32 row = finds_rows_again ? row_of(source.first_token + now * tokens + (i << box_shift))
                                       : __shfl_sync(0xffffffff, source.found.row, i);
      const u32 box = to + (i * 128 << box_shift);
      if (ptx::elect_one()) {
#pragma unroll
        for (int panel = 0; panel < Rows::panels; ++panel)
          if (mine.has_panel(panel)) copy(box + panel * Rows::panel_bytes, barrier, panel, row, source.kv_head, page);
      }
    }
    source.found = source.found_next;
    source.found_next = look_up(source, ahead);
  }

  // Whether the tile's boxes bring tokens that the unit does not see. Boxes that are not copied are filled with zeros
  // already.
  FP_DEVICE bool has_hidden(const Source& source, int tile) const {
    const i32 token = source.first_token + tile * tokens, in_box = (1 << box_shift) - 1;
    return token < source.kv_begin || (token + tokens > source.kv_end && (source.kv_end - token & in_box) != 0);
  }
  // Sets rows that the unit does not see to zero. If warps alternate in groups of 32 rows, each clears its own rows.
  FP_DEVICE void clear_hidden(const Source& source, int tile, u8* to, int warp = 0, int warps = 1) const {
    const i32 token = source.first_token + tile * tokens, in_box = (1 << box_shift) - 1;
    const i32 end = max_of(0, source.kv_end - token);
    clear(to, 0, source.kv_begin - token, warp, warps);
    clear(to, end, min_of(tokens, (end + in_box) & ~in_box), warp, warps);
    ptx::fence_before_bulk_copies();
    __syncwarp();
  }

 private:
  // The boxes that a CTA copies of a tile. CTAs of a pair copy every second box for both, or every second panel of
  // columns if the number of boxes is odd.
  struct Share {
    int rank = 0;
    bool by_panels = false;

    FP_DEVICE int first_box() const { return by_panels ? 0 : rank; }
    FP_DEVICE int box_step() const { return Traits::ctas == 1 || by_panels ? 1 : 2; }
    FP_DEVICE bool has_panel(int panel) const { return Traits::ctas == 1 || !by_panels || panel % 2 == rank; }
  };
  FP_DEVICE static Share share(int boxes) {
    if constexpr (Traits::ctas == 1) return {};
    return {static_cast<int>(ptx::cluster_rank()), Rows::panels % 2 == 0 && boxes % 2 == 1};
  }
  FP_DEVICE void copy(u32 to, u32 barrier, int panel, i32 row, i32 kv_head, i32 page) const {
    const int column = panel * Rows::panel_columns;
    if constexpr (Traits::ctas == 1) {
      ptx::tensor_copy(to, map, barrier, column, row, kv_head, page);
    } else {
      ptx::tensor_copy_to_pair(to, map, barrier, column, row, kv_head, page);
    }
  }

  FP_DEVICE i32 row_of(i32 token) const {
    u32 page, row;
    params.page.divmod(token, page, row);
    return static_cast<i32>(row);
  }

  // Opaque if registers are few: values derived from the lane are then computed where they are used.
  FP_DEVICE static int lane() { return (lacks_registers ? ptx::opaque(threadIdx.x) : threadIdx.x) % 32; }
  FP_DEVICE static i32 box_tokens(const AttentionParams& params) {
    if constexpr (lacks_registers) {
      return static_cast<i32>(ptx::opaque(params.box_tokens));
    } else {
      return params.box_tokens;
    }
  }

  FP_DEVICE static void clear(u8* to, int begin, int end, int warp, int warps) {
    // Opaque for warps that also transpose wide rows: an unrolled loop would take registers that they lack.
    const int step = warps > 1 && Rows::panels > 1 ? static_cast<int>(ptx::opaque(32)) : 32;
    for (int i = lane(); i < (end - begin) * 8; i += step) {
      if ((begin + i / 8) / 32 % warps != warp) continue;
#pragma unroll
      for (int panel = 0; panel < Rows::panels; ++panel)
        *reinterpret_cast<uint4*>(to + panel * Rows::panel_bytes + begin * 128 + i * 16) = make_uint4(0, 0, 0, 0);
    }
  }

  FP_DEVICE BoxOrigin look_up(const Source& source, int tile) const {
    const int box = lane();
    const i32 token = source.first_token + tile * tokens + (box << box_shift);
    bool exists = token < source.kv_end && box < tokens >> box_shift;
    if constexpr (has_mask_tiles<Traits>) exists = exists && token + (1 << box_shift) > source.kv_begin;
    constexpr i32 nowhere = 0x7fffffff;  // outside the tensor: the box is filled with zeros
    if constexpr (!paged) return {0, exists ? static_cast<i32>(source.offset) + token : nowhere};
    u32 page, row;
    params.page.divmod(token, page, row);
    return {exists ? __ldg(params.kv_indices + source.offset + page) : nowhere, static_cast<i32>(row)};
  }
};

}  // namespace flashpage
