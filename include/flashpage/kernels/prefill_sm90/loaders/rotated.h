// Loads and rotates Q and K (RoPE): in addition to its loads, each of the four warps rotates a quarter of every tile of
// K, and of a unit's Q, in place.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/query.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/rope/rotated_rows.h"

namespace flashpage {

// While a tile of K is multiplied, the next one is rotated and the one after that is loaded: K is loaded two tiles
// ahead of the rotation, across unit boundaries; V is loaded with the tile that is rotated.
template <class Traits>
struct RotatedLoading : QueryLoader<Traits> {
  using Base = QueryLoader<Traits>;
  using typename Base::KeyTiles;
  using typename Base::Shared;
  using typename Base::ValueTiles;
  using typename Base::Warps;
  using RotatedKeys = RotatedRows<typename Traits::Cache, typename Shared::Keys, Traits::head_dim_qk>;
  using RotatedQueries = RotatedRows<typename Traits::Query, typename Shared::QueryRows, Traits::head_dim_qk>;
  using Base::maps;
  using Base::params;
  using Base::shared;
  static constexpr int tokens = Shared::tokens;
  static constexpr bool by_rows = Warps::by_rows;
  static constexpr int key_warps = by_rows ? Warps::row_warps : 1;  // as many warps after them load V
  static constexpr int query_warp = 2, plan_warp = 3;
  static constexpr int lookups = by_rows ? ceil_div(tokens / key_warps, 32) : 1;  // of a lane, for one tile
  // Q of the next unit is loaded some tiles into a unit, when the output of the unit before has left the slot.
  static constexpr bool is_query_loaded_ahead = Shared::queries > 1;
  static constexpr i32 query_tile = 2;
  static_assert(tokens % (8 * Warps::loading) == 0);

  // The position of a warp that loads K or V: its next tile, and the pages that it has looked up for it.
  struct LoadCursor {
    u32 unit_use;
    i32 tile;  // -1: no unit is left
    u32 page[lookups], row[lookups];
    // V: a count that rises when a tile with hidden rows is loaded, and again when those rows are cleared.
    u32 edges;
  };

  using Base::Base;

  FP_DEVICE void run() const {
    LoadCursor cursor = {};
    begin(cursor);
    u32 use = 0, unit_use = 0;
    for (;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      if (place_of(unit_use).done) break;
      for (i32 tile = 0; tile < extent_of(unit_use).tiles; ++tile, ++use) {
        rotate_keys(use, extent_of(unit_use).first_token + tile * tokens);
        clear_hidden(cursor, ptx::opaque(unit_use), tile, ptx::opaque(use));
        if (tile == 0) begin_unit(ptx::opaque(unit_use));
        if (loads_keys()) keys(cursor, ptx::opaque(use) + 2);
        if (loads_values()) values(cursor, ptx::opaque(use));
        if (is_query_loaded_ahead && tile == min_of(query_tile, extent_of(unit_use).tiles - 1))
          query(ptx::opaque(unit_use) + 1);
      }
    }
    clear_hidden(cursor, unit_use, 0, use);
    if (unit_use > 0) Base::release_place(unit_use - 1);
  }

 private:
  FP_DEVICE static int lane() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static int warp() { return ptx::opaque(threadIdx.x) / 32; }
  FP_DEVICE const Place& place_of(u32 unit_use) const {
    return shared.places[shared.place_ring.slot(ptx::opaque(unit_use))].place;
  }
  FP_DEVICE TileExtent extent_of(u32 unit_use) const { return Base::extent_of(place_of(unit_use)); }
  FP_DEVICE static bool loads_keys() { return warp() < key_warps; }
  FP_DEVICE static bool loads_values() { return warp() / key_warps == 1; }

  FP_DEVICE void begin(LoadCursor& cursor) const {
    if (warp() == plan_warp) {
      Base::begin_plan();
      publish_after(0);
    }
    if (loads_values()) open(value_tiles(), cursor, 0);
    if (loads_keys()) {
      open(key_tiles(), cursor, 0);
      for (u32 use = 0; use < 2; ++use) keys(cursor, use);
    }
    if (is_query_loaded_ahead) query(0);
  }
  FP_DEVICE void begin_unit(u32 unit_use) const {
    if (!is_query_loaded_ahead) query(unit_use);
    rotate_query(ptx::opaque(unit_use));
    if (warp() == plan_warp) publish_after(ptx::opaque(unit_use) + 1);
    if (unit_use > 0) Base::release_place(ptx::opaque(unit_use) - 1);  // hidden rows of its last tile are cleared
  }
  // Publishes the place after one that is already published.
  FP_DEVICE void publish_after(u32 unit_use) const {
    if (lane() == 0 && !place_of(unit_use).done) Base::publish(unit_use + 1);
    __syncwarp();
  }

  FP_DEVICE void rotate_keys(u32 use, i32 position) const {
    constexpr int rows = tokens / Warps::loading;
    shared.rotation.landed_keys.wait_full(use);
    const u32 tile = ptx::shared_address(shared.keys[shared.key_ring.slot(use)]);
    RotatedKeys::template rotate_keys<rows>(shared.rotation.steps, tile, warp() * rows, position + warp() * rows);
    Base::hand_over(shared.key_ring.full_barrier(ptx::opaque(use)));
  }
  FP_DEVICE void rotate_query(u32 unit_use) const {
    constexpr int rows = Traits::tile_q / Warps::loading;
    shared.rotation.landed_queries.wait_full(unit_use);
    const u32 tile = ptx::shared_address(shared.query[shared.query_ring.slot(unit_use)]);
    RotatedQueries::template rotate_queries<rows>(shared.rotation.steps, tile, warp() * rows, params,
                                                  place_of(unit_use));
    Base::hand_over(shared.query_ring.full_barrier(unit_use));
  }
  FP_DEVICE void query(u32 unit_use) const {
    if (warp() != query_warp) return;
    shared.place_ring.wait_full(unit_use);
    if (!place_of(unit_use).done) Base::load_query(place_of(unit_use), unit_use);
    __syncwarp();
  }

  FP_DEVICE KeyTiles key_tiles() const {
    if constexpr (by_rows) {
      return KeyTiles(params, params.k, shared.row_tables.keys);
    } else {
      return KeyTiles(params, maps.k);
    }
  }
  FP_DEVICE ValueTiles value_tiles() const {
    if constexpr (by_rows) {
      return ValueTiles(params, params.v, shared.row_tables.values);
    } else {
      return ValueTiles(params, maps.v);
    }
  }

  FP_DEVICE void keys(LoadCursor& cursor, u32 use) const {
    if (cursor.tile < 0) return;
    const KeyTiles tiles = key_tiles();
    typename KeyTiles::Source source = resume(tiles, cursor);
    load_tile(tiles, source, cursor.tile, shared.keys, shared.key_ring, use,
              shared.rotation.landed_keys.full_barrier(use));
    advance(tiles, source, cursor);
  }
  FP_DEVICE void values(LoadCursor& cursor, u32 use) const {
    const ValueTiles tiles = value_tiles();
    typename ValueTiles::Source source = resume(tiles, cursor);
    u32 barrier = shared.value_ring.full_barrier(use);
    if constexpr (!by_rows) {
      if (tiles.has_hidden(source, cursor.tile)) {
        ++cursor.edges;
        barrier = ptx::shared_address(&shared.edge);
      }
    }
    load_tile(tiles, source, cursor.tile, shared.values, shared.value_ring, use, barrier);
    advance(tiles, source, cursor);
  }
  // Clears hidden rows of the tile of V before tile `tile` of a unit. It is called after the rotation of that tile,
  // when the copies have had time to arrive.
  FP_DEVICE void clear_hidden(LoadCursor& cursor, u32 unit_use, i32 tile, u32 use) const {
    if constexpr (!by_rows) {
      if (cursor.edges % 2 == 0) return;
      const ValueTiles tiles = value_tiles();
      const typename ValueTiles::Source source = tiles.open(place_of(tile > 0 ? unit_use : unit_use - 1));
      ptx::mbarrier_wait(ptx::shared_address(&shared.edge), cursor.edges++ / 2 & 1);
      tiles.clear_hidden(source, (tile > 0 ? tile : source.tiles) - 1, shared.values[shared.value_ring.slot(use - 1)]);
      if (lane() == 0) ptx::mbarrier_arrive(shared.value_ring.full_barrier(use - 1));
    }
  }

  template <class Tiles, class Slots, class Ring>
  FP_DEVICE void load_tile(const Tiles& tiles, typename Tiles::Source& source, i32 tile, Slots& slots, const Ring& ring,
                           u32 use, u32 barrier) const {
    const u32 to = ptx::shared_address(slots[ring.slot(use)]);
    if constexpr (by_rows) {
      tiles.find(source);
      ring.wait_empty(use);
      tiles.look_ahead(source, tile + 1);
      tiles.load(source, tile, to);
      ptx::mbarrier_arrive_after_copies(barrier);
    } else {
      ring.wait_empty(use);
      tiles.load(source, tile, tile + 1, to, barrier);
    }
  }
  // Moves to a unit's first tile, or records that no unit is left.
  template <class Tiles>
  FP_DEVICE void open(const Tiles& tiles, LoadCursor& cursor, u32 unit_use) const {
    cursor.unit_use = unit_use;
    shared.place_ring.wait_full(unit_use);
    cursor.tile = place_of(unit_use).done ? -1 : 0;
    if (cursor.tile < 0) return;
    typename Tiles::Source source = tiles.open(place_of(unit_use));
    tiles.look_ahead(source, 0, 0);
    keep(source.found, cursor);
  }
  template <class Tiles>
  FP_DEVICE typename Tiles::Source resume(const Tiles& tiles, const LoadCursor& cursor) const {
    typename Tiles::Source source = tiles.open(place_of(cursor.unit_use));
    if constexpr (by_rows) {
#pragma unroll
      for (int i = 0; i < lookups; ++i) source.found[i] = {cursor.page[i], cursor.row[i]};
    } else {
      source.found = {static_cast<i32>(cursor.page[0]), static_cast<i32>(cursor.row[0])};
      source.found_next = {};
    }
    return source;
  }
  // Moves on after the copies of the cursor's tile are issued.
  template <class Tiles>
  FP_DEVICE void advance(const Tiles& tiles, const typename Tiles::Source& source, LoadCursor& cursor) const {
    if (++cursor.tile >= source.tiles) {
      open(tiles, cursor, cursor.unit_use + 1);
    } else if constexpr (by_rows) {
      keep(source.found, cursor);
    } else {
      keep(source.found_next, cursor);
    }
  }
  template <class Found>
  FP_DEVICE static void keep(const Found& found, LoadCursor& cursor) {
    if constexpr (by_rows) {
#pragma unroll
      for (int i = 0; i < lookups; ++i) {
        cursor.page[i] = found[i].page;
        cursor.row[i] = found[i].row;
      }
    } else {
      cursor.page[0] = static_cast<u32>(found.page);
      cursor.row[0] = static_cast<u32>(found.row);
    }
  }
};

}  // namespace flashpage
