// K or V of a unit by cp.async, tile by tile, as four warps: pages of any size, where boxes would be too small.
#pragma once
#include "flashpage/memory/kv_rows.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/tile/unit.h"
#include "flashpage/tile/visible_tiles.h"

namespace flashpage {

// The interface of BoxTiles. Each warp takes every fourth eight of a tile's rows, and a lane looks one of its rows up.
template <class Traits, int tokens>
struct RowTiles {
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int warps = 4;
  static constexpr int warp_rows = ceil_div(tokens, 8 * warps) * 8;  // at most; the last warps may have less
  static_assert(Traits::loader != Loader::rows || warp_rows <= 32);

  // One unit's K and V.
  struct Source {
    i64 offset;  // paged: of the first page number; ragged: of the first row
    i32 kv_head, first_token, kv_begin, kv_end;
    i32 tiles;
    i32 found, found_next;  // pages of the lane's row of two tiles
  };
  struct Extent {
    i32 first_token;
    i32 tiles;  // at least one: a unit that sees nothing has a tile of hidden tokens
  };

  const AttentionParams& params;

  FP_DEVICE static Extent extent(const Unit& unit) {
    if constexpr (has_mask_tiles<Traits>) return {};  // numbered within the request, and found elsewhere
    return {unit.kv_begin, max_of(1, ceil_div(unit.kv_end - unit.kv_begin, tokens))};
  }

  FP_DEVICE Source open(const Place& place) const {
    const Extent covered = extent(place.unit);
    const Unit& unit = place.unit;
    return {place.item.kv_offset, unit.kv_head, covered.first_token, unit.kv_begin, unit.kv_end, covered.tiles, 0, 0};
  }
  // The first look-ups begin: of the first two tiles in turn.
  FP_DEVICE void look_ahead(Source& source, int tile, int next) const {
    source.found = look_up(source, tile);
    source.found_next = look_up(source, next);
  }
  FP_DEVICE void advance(Source& source, int ahead) const {
    source.found = source.found_next;
    source.found_next = look_up(source, ahead);
  }

  // What the unit does not see becomes zero. `To`: BlockRows of a tile.
  template <class To>
  FP_DEVICE void load(const Source& source, const KvView& view, int tile, u32 to) const {
    constexpr int chunks = To::used_bytes / 16, pieces = warp_rows * chunks;
    const i32 first = source.first_token + tile * tokens, count = source.kv_end - first;
    const i32 hidden = has_mask_tiles<Traits> ? source.kv_begin - first : 0;  // rows before what the unit sees
    const i32 token = max_of(0, min_of(first + row_in_tile(lane()), source.kv_end - 1));
    const u64 mine = reinterpret_cast<u64>(
        Rows(params, source.offset).template row<Cache>(view, source.found, token, source.kv_head));
#pragma unroll 2
    for (int i = 0; i < pieces; i += 32) {
      const int piece = min_of(i + lane(), pieces - 1), row = piece / chunks, chunk = piece % chunks;
      const u8* from = reinterpret_cast<const u8*>(__shfl_sync(0xffffffff, mine, row)) + chunk * 16;
      const int at = row_in_tile(row);
      if (tokens % (8 * warps) == 0 || at < tokens)
        ptx::cp_async<16>(to + To::chunk_offset(at, chunk), from, at >= hidden && at < count);
    }
  }

 private:
  FP_DEVICE static int lane() { return threadIdx.x % 32; }
  // Of the warp's rows, one after the other.
  FP_DEVICE static int row_in_tile(int row) { return row / 8 * (8 * warps) + threadIdx.x / 32 % warps * 8 + row % 8; }

  FP_DEVICE i32 look_up(const Source& source, int tile) const {
    const i32 token = source.first_token + tile * tokens + row_in_tile(lane());
    return lane() < warp_rows && token < source.kv_end ? Rows(params, source.offset).look_up(token) : 0;
  }
};

}  // namespace flashpage
