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
  using RotatedKeys = TurnedRows<typename Traits::Cache, typename Shared::Keys, Traits::head_dim_qk>;
  using RotatedQueries = TurnedRows<typename Traits::Query, typename Shared::QueryRows, Traits::head_dim_qk>;
  using Base::maps;
  using Base::params;
  using Base::shared;
  static constexpr int tokens = Shared::tokens;
  static constexpr bool by_rows = Warps::by_rows;
  static constexpr int key_warps = by_rows ? Warps::row_warps : 1;  // as many warps after them load V
  static constexpr int query_warp = 2, plan_warp = 3;
  static constexpr int look_ups = by_rows ? ceil_div(tokens / key_warps, 32) : 1;  // of a lane, for one tile
  // Q of the next unit is loaded some tiles into a unit, when the output of the unit before has left the slot.
  static constexpr bool is_query_loaded_ahead = Shared::queries > 1;
  static constexpr i32 query_tile = 2;
  static_assert(tokens % (8 * Warps::loading) == 0);

  // The position of a warp that loads K or V: its next tile, and the pages that it has looked up for it.
  struct Feed {
    u32 unit_turn;
    i32 tile;  // -1: no unit is left
    u32 page[look_ups], row[look_ups];
    // V: a count that rises when a tile with hidden rows is loaded, and again when those rows are cleared.
    u32 edges;
  };

  using Base::Base;

  FP_DEVICE void run() const {
    Feed feed = {};
    begin(feed);
    u32 turn = 0, unit_turn = 0;
    for (;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      if (place_of(unit_turn).done) break;
      for (i32 tile = 0; tile < extent_of(unit_turn).tiles; ++tile, ++turn) {
        rotate_keys(turn, extent_of(unit_turn).first_token + tile * tokens);
        clear_hidden(feed, ptx::opaque(unit_turn), tile, ptx::opaque(turn));
        if (tile == 0) begin_unit(ptx::opaque(unit_turn));
        if (loads_keys()) keys(feed, ptx::opaque(turn) + 2);
        if (loads_values()) values(feed, ptx::opaque(turn));
        if (is_query_loaded_ahead && tile == min_of(query_tile, extent_of(unit_turn).tiles - 1))
          query(ptx::opaque(unit_turn) + 1);
      }
    }
    clear_hidden(feed, unit_turn, 0, turn);
    if (unit_turn > 0) Base::release_place(unit_turn - 1);
  }

 private:
  FP_DEVICE static int lane() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static int warp() { return ptx::opaque(threadIdx.x) / 32; }
  FP_DEVICE const Place& place_of(u32 unit_turn) const {
    return shared.places[shared.place_ring.slot(ptx::opaque(unit_turn))].place;
  }
  FP_DEVICE TileExtent extent_of(u32 unit_turn) const { return Base::extent_of(place_of(unit_turn).unit); }
  FP_DEVICE static bool loads_keys() { return warp() < key_warps; }
  FP_DEVICE static bool loads_values() { return warp() / key_warps == 1; }

  FP_DEVICE void begin(Feed& feed) const {
    if (warp() == plan_warp) {
      Base::begin_plan();
      publish_after(0);
    }
    if (loads_values()) open(value_tiles(), feed, 0);
    if (loads_keys()) {
      open(key_tiles(), feed, 0);
      for (u32 turn = 0; turn < 2; ++turn) keys(feed, turn);
    }
    if (is_query_loaded_ahead) query(0);
  }
  FP_DEVICE void begin_unit(u32 unit_turn) const {
    if (!is_query_loaded_ahead) query(unit_turn);
    rotate_query(ptx::opaque(unit_turn));
    if (warp() == plan_warp) publish_after(ptx::opaque(unit_turn) + 1);
    if (unit_turn > 0) Base::release_place(ptx::opaque(unit_turn) - 1);  // hidden rows of its last tile are cleared
  }
  // Publishes the place after one that is already published.
  FP_DEVICE void publish_after(u32 unit_turn) const {
    if (lane() == 0 && !place_of(unit_turn).done) Base::publish(unit_turn + 1);
    __syncwarp();
  }

  FP_DEVICE void rotate_keys(u32 turn, i32 position) const {
    constexpr int rows = tokens / Warps::loading;
    shared.rotation.landed_keys.wait_full(turn);
    const u32 tile = ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]);
    RotatedKeys::template turn_keys<rows>(shared.rotation.steps, tile, warp() * rows, position + warp() * rows);
    Base::hand_over(shared.key_ring.full_barrier(ptx::opaque(turn)));
  }
  FP_DEVICE void rotate_query(u32 unit_turn) const {
    constexpr int rows = Traits::tile_q / Warps::loading;
    shared.rotation.landed_queries.wait_full(unit_turn);
    const u32 tile = ptx::shared_address(shared.query[shared.query_ring.slot(unit_turn)]);
    RotatedQueries::template turn_queries<rows>(shared.rotation.steps, tile, warp() * rows, params,
                                                place_of(unit_turn));
    Base::hand_over(shared.query_ring.full_barrier(unit_turn));
  }
  FP_DEVICE void query(u32 unit_turn) const {
    if (warp() != query_warp) return;
    shared.place_ring.wait_full(unit_turn);
    if (!place_of(unit_turn).done) Base::load_query(place_of(unit_turn), unit_turn);
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

  FP_DEVICE void keys(Feed& feed, u32 turn) const {
    if (feed.tile < 0) return;
    const KeyTiles tiles = key_tiles();
    typename KeyTiles::Source source = resume(tiles, feed);
    load_tile(tiles, source, feed.tile, shared.keys, shared.key_ring, turn,
              shared.rotation.landed_keys.full_barrier(turn));
    go_on(tiles, source, feed);
  }
  FP_DEVICE void values(Feed& feed, u32 turn) const {
    const ValueTiles tiles = value_tiles();
    typename ValueTiles::Source source = resume(tiles, feed);
    u32 barrier = shared.value_ring.full_barrier(turn);
    if constexpr (!by_rows) {
      if (tiles.has_hidden(source, feed.tile)) {
        ++feed.edges;
        barrier = ptx::shared_address(&shared.edge);
      }
    }
    load_tile(tiles, source, feed.tile, shared.values, shared.value_ring, turn, barrier);
    go_on(tiles, source, feed);
  }
  // Clears hidden rows of the tile of V before tile `tile` of a unit. It is called after the rotation of that tile,
  // when the copies have had time to arrive.
  FP_DEVICE void clear_hidden(Feed& feed, u32 unit_turn, i32 tile, u32 turn) const {
    if constexpr (!by_rows) {
      if (feed.edges % 2 == 0) return;
      const ValueTiles tiles = value_tiles();
      const typename ValueTiles::Source source = tiles.open(place_of(tile > 0 ? unit_turn : unit_turn - 1));
      ptx::mbarrier_wait(ptx::shared_address(&shared.edge), feed.edges++ / 2 & 1);
      tiles.clear_hidden(source, (tile > 0 ? tile : source.tiles) - 1, shared.values[shared.value_ring.slot(turn - 1)]);
      if (lane() == 0) ptx::mbarrier_arrive(shared.value_ring.full_barrier(turn - 1));
    }
  }

  template <class Tiles, class Slots, class Ring>
  FP_DEVICE void load_tile(const Tiles& tiles, typename Tiles::Source& source, i32 tile, Slots& slots, const Ring& ring,
                           u32 turn, u32 barrier) const {
    const u32 to = ptx::shared_address(slots[ring.slot(turn)]);
    if constexpr (by_rows) {
      tiles.find(source);
      ring.wait_empty(turn);
      tiles.look_ahead(source, tile + 1);
      tiles.load(source, tile, to);
      ptx::mbarrier_arrive_after_copies(barrier);
    } else {
      ring.wait_empty(turn);
      tiles.load(source, tile + 1, to, barrier);
    }
  }
  // Moves to a unit's first tile, or records that no unit is left.
  template <class Tiles>
  FP_DEVICE void open(const Tiles& tiles, Feed& feed, u32 unit_turn) const {
    feed.unit_turn = unit_turn;
    shared.place_ring.wait_full(unit_turn);
    feed.tile = place_of(unit_turn).done ? -1 : 0;
    if (feed.tile < 0) return;
    typename Tiles::Source source = tiles.open(place_of(unit_turn));
    tiles.look_ahead(source, 0, 0);
    keep(source.found, feed);
  }
  template <class Tiles>
  FP_DEVICE typename Tiles::Source resume(const Tiles& tiles, const Feed& feed) const {
    typename Tiles::Source source = tiles.open(place_of(feed.unit_turn));
    if constexpr (by_rows) {
#pragma unroll
      for (int i = 0; i < look_ups; ++i) source.found[i] = {feed.page[i], feed.row[i]};
    } else {
      source.found = {static_cast<i32>(feed.page[0]), static_cast<i32>(feed.row[0])};
      source.found_next = {};
    }
    return source;
  }
  // Moves on after the copies of the feed's tile are issued.
  template <class Tiles>
  FP_DEVICE void go_on(const Tiles& tiles, const typename Tiles::Source& source, Feed& feed) const {
    if (++feed.tile >= source.tiles) {
      open(tiles, feed, feed.unit_turn + 1);
    } else if constexpr (by_rows) {
      keep(source.found, feed);
    } else {
      keep(source.found_next, feed);
    }
  }
  template <class Found>
  FP_DEVICE static void keep(const Found& found, Feed& feed) {
    if constexpr (by_rows) {
#pragma unroll
      for (int i = 0; i < look_ups; ++i) {
        feed.page[i] = found[i].page;
        feed.row[i] = found[i].row;
      }
    } else {
      feed.page[0] = static_cast<u32>(found.page);
      feed.row[0] = static_cast<u32>(found.row);
    }
  }
};

}  // namespace flashpage
