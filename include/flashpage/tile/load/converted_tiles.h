// Loads fp8 K and V of a unit, tile by tile, by four warps: rows are copied to shared memory as they are stored,
// converted to the products' type in registers, and written as the copy engine would write them.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Each warp loads and converts its own rows, so that no warp waits for another. Copies of one tile are in flight while
// the tile before is converted: boxes by the copy engine if the host has encoded maps, otherwise rows.
template <class Traits, int tokens>
struct ConvertedTiles {
  using S = Shape<Traits>;
  using Stored = typename Traits::StoredCache;
  using Keys = typename S::KeyRows;
  using Values = typename S::ValueRows;
  static constexpr bool paged = Traits::kv_source == KvSource::paged;
  static constexpr int warps = 4;
  static constexpr int warp_rows = round_up(ceil_div(tokens, warps), 8);  // the last warps may have fewer
  static_assert(Traits::loader != Loader::converted || warp_rows <= 32);
  using StagedKeys = SwizzledRows<Stored, Traits::head_dim_qk, warp_rows>;
  using StagedValues = SwizzledRows<Stored, Traits::head_dim_vo, warp_rows>;

  // A warp's rows as they are stored, and their barriers.
  struct Staged {
    alignas(1024) u8 keys[StagedKeys::tile_bytes];
    alignas(1024) u8 values[StagedValues::tile_bytes];
  };
  struct Barriers {
    u64 keys, values;
  };

  // K and V of one unit.
  struct Source {
    i64 offset;  // paged: index of the first page number; ragged: first row
    i32 kv_head, kv_begin, kv_end;
    i32 left;        // tiles whose copies are not issued yet
    i32 token;       // first token of the tile that is converted next
    i32 next_token;  // first token of the tile whose copies are issued next
    i32 found;       // page of the lane's box (or row) of the tile that is issued next
  };

  const AttentionParams& params;
  const KvMaps& maps;
  Staged* const staged;  // the warps' rows; indexed by warp, like the barriers
  Barriers* const barriers;

  FP_DEVICE ConvertedTiles(const AttentionParams& params, const KvMaps& maps, Staged* staged, Barriers* barriers)
      : params(params), maps(maps), staged(staged), barriers(barriers) {}

  // Called by one thread.
  FP_DEVICE static void init(Barriers& barriers) {
    ptx::mbarrier_init(ptx::shared_address(&barriers.keys), 32);
    ptx::mbarrier_init(ptx::shared_address(&barriers.values), 32);
  }

  FP_DEVICE static TileExtent extent(const AttentionParams& params, const Unit& unit) {
    const i32 first_token = paged ? unit.kv_begin & -box_tokens(params) : unit.kv_begin;
    return {first_token, max_of(1, ceil_div(unit.kv_end - first_token, tokens))};
  }

  // Begins with a unit whose first `issued` tiles are in flight already, and starts the first lookups.
  FP_DEVICE void open(Source& source, const Place& place, int issued) const {
    const TileExtent covered = extent(params, place.unit);
    source.offset = place.item.kv_offset;
    source.kv_head = place.unit.kv_head;
    source.token = covered.first_token;
    source.next_token = covered.first_token + issued * tokens;
    source.kv_begin = place.unit.kv_begin;
    source.kv_end = place.unit.kv_end;
    source.left = covered.tiles - issued;
    source.found = look_up(source);
  }

  FP_DEVICE static bool is_empty(const Place& place) { return place.unit.kv_begin >= place.unit.kv_end; }
  // Writes zeros for a unit that sees nothing, because a probability of zero would not hide NaN.
  FP_DEVICE static void clear_values(u32 to) {
    for (int at = ptx::opaque(threadIdx.x) * 16; at < Values::tile_bytes; at += warps * 32 * 16)
      ptx::store_shared(to + at, 0, 0, 0, 0);
  }

  // Issues the copies of a tile's keys, then those of its values.
  FP_DEVICE void issue_keys(const Source& source) const {
    issue<StagedKeys, Traits::head_dim_qk>(source, params.k, maps.k, ptx::shared_address(staged[warp()].keys),
                                           ptx::shared_address(&barriers[warp()].keys));
  }
  FP_DEVICE void issue_values(Source& source) const {
    issue<StagedValues, Traits::head_dim_vo>(source, params.v, maps.v, ptx::shared_address(staged[warp()].values),
                                             ptx::shared_address(&barriers[warp()].values));
    source.next_token += tokens;
    --source.left;
    source.found = look_up(source);
  }
  FP_DEVICE void wait_keys(u32 use) const { ptx::mbarrier_wait(ptx::shared_address(&barriers[warp()].keys), use & 1); }
  FP_DEVICE void wait_values(u32 use) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers[warp()].values), use & 1);
  }
  // Completes the phase of a tile for which no copy is issued.
  FP_DEVICE void skip() const {
    ptx::mbarrier_arrive(ptx::shared_address(&barriers[warp()].keys));
    ptx::mbarrier_arrive(ptx::shared_address(&barriers[warp()].values));
  }
  FP_DEVICE void convert_keys(u32 to) const {
    convert<StagedKeys, Keys, Traits::head_dim_qk>(ptx::shared_address(staged[warp()].keys), to);
  }
  // Converts the values; tokens that the unit does not see become zero.
  FP_DEVICE void convert_values(Source& source, u32 to) const {
    convert<StagedValues, Values, Traits::head_dim_vo>(ptx::shared_address(staged[warp()].values), to);
    if (source.token < source.kv_begin || source.token + tokens > source.kv_end) clear_hidden(source, to);
    source.token += tokens;
  }

 private:
  FP_DEVICE static int lane() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static int warp() { return ptx::opaque(threadIdx.x) / 32; }
  FP_DEVICE static i32 box_tokens(const AttentionParams& params) { return max_of(1, params.box_tokens); }
  FP_DEVICE static int rows() {
    return warps * warp_rows == tokens ? warp_rows : max_of(0, min_of(warp_rows, tokens - warp() * warp_rows));
  }

  // The first token of the lane's box, or of its row, in the tile that is issued next.
  FP_DEVICE i32 my_token(const Source& source) const {
    return source.next_token + warp() * warp_rows + lane() * box_tokens(params);
  }
  FP_DEVICE i32 look_up(const Source& source) const {
    const i32 token = min_of(my_token(source), source.kv_end - 1);
    return look_up_page<Traits::kv_source>(params, source.offset, token);
  }

  template <class To, int columns>
  FP_DEVICE void issue(const Source& source, const KvView& view, const TensorMap& map, u32 to, u32 barrier) const {
    __syncwarp();  // all lanes have read what was there
    if (params.box_tokens > 0) {
      issue_boxes<To>(source, map, to, barrier);
    } else {
      issue_rows<To, columns>(source, view, to, barrier);
    }
  }
  template <class To>
  FP_DEVICE void issue_boxes(const Source& source, const TensorMap& map, u32 to, u32 barrier) const {
    const int box = ptx::opaque(params.box_tokens), boxes = (rows() + box - 1) >> (31 - __clz(box));
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect(barrier, boxes * box * To::stride * To::panels);
    } else {
      ptx::mbarrier_arrive(barrier);
    }
    __syncwarp();
    constexpr i32 nowhere = 0x7fffffff;  // outside the tensor: the box is filled with zeros
    const i32 token = my_token(source);
    i32 page = 0, row = token;
    if constexpr (paged) {
      page = source.found;
      row = token - params.page.div(token) * params.page.divisor;
    } else {
      row = static_cast<i32>(source.offset) + token;
    }
    if (token >= source.kv_end) row = nowhere;
#pragma unroll 1
    for (int i = 0; i < boxes; ++i) {
      const i32 box_page = paged ? __shfl_sync(0xffffffff, page, i) : 0, box_row = __shfl_sync(0xffffffff, row, i);
      if (ptx::elect_one()) {
#pragma unroll
        for (int panel = 0; panel < To::panels; ++panel)
          ptx::tensor_copy(to + i * box * To::stride + panel * To::panel_bytes, map, barrier, panel * To::panel_columns,
                           box_row, source.kv_head, box_page);
      }
    }
  }
  // Copies rows. Rows that the unit does not see become copies of the last one that it sees.
  template <class To, int columns>
  FP_DEVICE void issue_rows(const Source& source, const KvView& view, u32 to, u32 barrier) const {
    constexpr int piece_bytes = columns % 16 ? 8 : 16, row_pieces = columns / piece_bytes;
    constexpr int pieces = warp_rows * row_pieces;
    const i32 token = min_of(my_token(source), source.kv_end - 1);
    i64 offset = static_cast<i32>(ptx::opaque(source.kv_head)) * view.head_stride;
    if constexpr (paged) {
      const i32 in_page = token - params.page.div(token) * params.page.divisor;
      offset += source.found * view.page_stride + in_page * view.token_stride;
    } else {
      offset += (source.offset + token) * view.token_stride;
    }
    const u64 mine = reinterpret_cast<u64>(view.data) + offset;
    const int lane = ConvertedTiles::lane();
#pragma unroll 4
    for (int i = 0; i < pieces; i += 32) {
      const int piece = min_of(i + lane, pieces - 1), row = piece / row_pieces, in_row = piece % row_pieces;
      const u64 from = __shfl_sync(0xffffffff, mine, row) + in_row * piece_bytes;
      ptx::cp_async<piece_bytes>(to + To::byte_offset(row, in_row * piece_bytes), reinterpret_cast<const u8*>(from),
                                 true);
    }
    ptx::mbarrier_arrive_after_copies(barrier);
  }

  // A lane converts eight bytes of a row, in panels of 64 columns. Eight lanes have a row of a panel, and a warp the
  // rows 0, 4, 1, 5 or 2, 6, 3, 7 of eight, because rows four apart are swizzled to different banks.
  template <class From, class To, int columns>
  FP_DEVICE void convert(u32 from, u32 to) const {
    constexpr int panels = To::panels, eights = warp_rows / 8, steps = 2 * panels * eights;
    constexpr int batch = 8;  // steps whose bytes are in registers
    const int lane = ConvertedTiles::lane(), column = lane % 8, row = (lane >> 3 & 1) * 4 + (lane >> 4);
    const u32 source = from + row * 128 + ((column / 2 ^ row) & 7) * 16 + column % 2 * 8;
    const u32 target = to + (warp() * warp_rows + row) * 128 + ((column ^ row) & 7) * 16;
    // Order of the steps: the panels of four rows, then those of the other four, then the next eight rows.
    const auto is_there = [&](int step) {
      const int panel = step % panels, eight = step / (2 * panels);
      const bool has_columns = panel * 64 + 64 <= columns || panel * 64 + column * 8 < columns;
      return has_columns && (warps * warp_rows == tokens || eight * 8 < rows());
    };
#pragma unroll
    for (int first = 0; first < steps; first += batch) {
      u32 words[batch][2];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int step = first + i, panel = step % panels, half = step / panels % 2, eight = step / (2 * panels);
        if (step >= steps) continue;
        const u32 at = (source ^ (panel % 2 * 64 + half * 32)) + panel / 2 * From::panel_bytes + half * 256;
        ptx::load_shared(words[i], at + eight * 1024);
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int step = first + i, panel = step % panels, half = step / panels % 2, eight = step / (2 * panels);
        if (step >= steps || !is_there(step)) continue;
        u32 pairs[4];
        ptx::widen4<typename S::Cache, Stored>(words[i][0], pairs[0], pairs[1]);
        ptx::widen4<typename S::Cache, Stored>(words[i][1], pairs[2], pairs[3]);
        const u32 at = (target ^ half * 32) + panel * To::panel_bytes + half * 256 + eight * 1024;
        ptx::store_shared(at, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  FP_DEVICE void clear_hidden(const Source& source, u32 to) const {
    const i32 begin = source.kv_begin - source.token, end = source.kv_end - source.token;
    __syncwarp();
    for (int i = lane(); i < rows() * 8; i += 32) {
      const int row = warp() * warp_rows + i / 8;
      if (row >= begin && row < end) continue;
#pragma unroll
      for (int panel = 0; panel < Values::panels; ++panel)
        ptx::store_shared(to + panel * Values::panel_bytes + row * 128 + i % 8 * 16, 0, 0, 0, 0);
    }
  }
};

}  // namespace flashpage
