// The loading warps of prefill_sm90: one for K, one for V, one for Q, and one that walks the plan for all; or two for
// the rows of K and two for those of V, the last of which does the others' work too; or one for K, one for V, Q and the
// plan, and two that transpose V. Who loads Q may have to store the output that lies where Q will be. Where K and Q are
// turned: kernels/prefill_sm90/loaders/rotated.h; where fp8 becomes fp16: kernels/prefill_sm90/loaders/converted.h.
#pragma once
#include "flashpage/kernels/prefill_sm90/shared.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/load/box_tiles.h"
#include "flashpage/tile/load/converted_tiles.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/load/row_tiles.h"
#include "flashpage/tile/mask/prefetched_bits.h"

namespace flashpage {

template <class Traits>
struct PrefillLoad {
  using Shared = PrefillShared<Traits>;
  using Warps = PrefillWarps<Traits>;
  static constexpr int tokens = Shared::tokens;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  const MaskTilesParams& mask_tiles;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE PrefillLoad(Shared& shared, const AttentionParams& params, const KvMaps& maps,
                        const MaskTilesParams& mask_tiles)
      : shared(shared), params(params), maps(maps), mask_tiles(mask_tiles) {}

  FP_DEVICE void run() const {
    if constexpr (Warps::by_rows) {
      if (warp < Warps::row_warps) {
        load_key_rows();
      } else {
        load_value_rows();
      }
    } else if constexpr (Warps::transposes) {
      if (warp == 0) load_keys();
      if (warp == 1) load_staged_values();
      if (warp >= 2) transpose();
    } else {
      if (warp == 0) load_keys();
      if (warp == 1) load_values();
      if (warp == 2) load_queries();
      if (warp == 3) walk_plan();
    }
  }

 protected:
  template <class Rows>
  using TilesOf = typename select_type<Warps::by_rows, RowTiles<Traits, Rows, tokens, Warps::row_warps>,
                                       BoxTiles<Traits, Rows, tokens>>::type;
  using KeyTiles = TilesOf<typename Shared::Keys>;
  using ValueTiles = TilesOf<typename Shared::ValueBoxes>;
  using BothTiles = ConvertedTiles<Traits, tokens>;
  using Extent = typename select_type<Warps::converts, BothTiles, KeyTiles>::type::Extent;
  using Turns = TilesInTurn<Traits>;

  // Calls begin(place, unit_turn) for every unit and load(source, turns, unit_turn) for every tile in turn of it.
  // Returns the number of units.
  template <class Tiles, class Begin, class Load>
  FP_DEVICE u32 for_each_tile(const Tiles& tiles, Begin&& begin, Load&& load) const {
    for (u32 unit_turn = 0;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_turn)];
      if (tiled.place.done) return unit_turn;
      begin(tiled.place, unit_turn);
      typename Tiles::Source source = tiles.open(tiled.place);
      Turns turns(mask_tiles, tiled.tile_cell, tiled.place.unit, tokens, source.tiles);
      tiles.look_ahead(source, turns.now(), turns.next());
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_turn);
      for (; turns.more(); turns.step()) load(source, turns, unit_turn);
    }
  }
  FP_DEVICE void for_each_tile(const auto& tiles, auto&& load) const {
    for_each_tile(tiles, [](const Place&, u32) {}, load);
  }

  // What computing warps have to know of a tile of K, before it is handed over.
  FP_DEVICE void tell(u32 turn, const Turns& turns) const {
    if constexpr (has_mask_tiles<Traits>) {
      if (lane == 0) {
        shared.visited[shared.key_ring.slot(turn)] = turns.visited();
        if (Warps::by_rows) ptx::mbarrier_arrive(shared.key_ring.full_barrier(turn));
      }
      __syncwarp();
    }
  }
  // Before the tile's slot is free. The place is still there, as the unit's computing warps await this tile.
  FP_DEVICE void ask_for_bits(u32 unit_turn, const Turns& turns) const {
    if constexpr (has_lane_bits<Traits>) {
      if (!turns.is_mixed()) return;
      const TiledPlace& tiled = shared.places[shared.place_ring.slot(unit_turn)];
      const LaneBits bits(tiled.lane_bits, tiled.place.item.kv_len, tokens);
      flashpage::ask_for_bits(params, bits, tiled.place.unit, first_row(), turns.now(), lane);
    }
  }

  FP_DEVICE void load_keys() const {
    const KeyTiles keys(params, maps.k);
    u32 turn = 0;
    for_each_tile(keys, [&](typename KeyTiles::Source& source, Turns& turns, u32 unit_turn) {
      ask_for_bits(unit_turn, turns);
      shared.key_ring.wait_empty(turn);
      tell(turn, turns);
      keys.load(source, turns.ahead(), ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]),
                shared.key_ring.full_barrier(turn));
      ++turn;
    });
  }

  FP_DEVICE void load_values() const {
    const ValueTiles values(params, maps.v);
    u32 turn = 0, phases = 0;  // of the edges, a bit each
    for_each_tile(values, [&](typename ValueTiles::Source& source, Turns& turns, u32) {
      shared.value_ring.wait_empty(turn);
      const u32 slot = shared.value_ring.slot(turn), edge_slot = slot % Shared::edges;
      u8* to = shared.values[slot];
      const u32 full = shared.value_ring.full_barrier(turn++), edge = ptx::shared_address(&shared.edge[edge_slot]);
      const bool has_hidden = values.has_hidden(source, turns.now());
      values.load(source, turns.ahead(), ptx::shared_address(to), has_hidden ? edge : full);
      if (!has_hidden) return;
      ptx::mbarrier_wait(edge, phases >> edge_slot & 1);  // a probability of zero would not hide NaN
      phases ^= 1 << edge_slot;
      values.clear_hidden(source, turns.now(), to);
      if (lane == 0) ptx::mbarrier_arrive(full);
    });
  }

  // V to where it is transposed from. The same warp walks the plan, a unit ahead, and loads Q.
  FP_DEVICE void load_staged_values() const {
    const ValueTiles values(params, maps.v);
    u32 turn = 0;
    begin_plan();
    for_each_tile(
        values, [&](const Place& place, u32 unit_turn) { lead(place, unit_turn); },
        [&](typename ValueTiles::Source& source, Turns& turns, u32) {
          shared.staged_ring.wait_empty(turn);
          values.load(source, turns.ahead(), ptx::shared_address(shared.staged[shared.staged_ring.slot(turn)]),
                      shared.staged_ring.full_barrier(turn));
          ++turn;
        });
  }
  FP_DEVICE void transpose() const {
    using Transposed = typename Shared::Transposed;
    const ValueTiles values(params, maps.v);
    u32 turn = 0;
    for_each_tile(values, [&](typename ValueTiles::Source& source, Turns& turns, u32) {
      u8* from = shared.staged[shared.staged_ring.slot(turn)];
      shared.staged_ring.wait_full(turn);
      if (values.has_hidden(source, turns.now()))  // a probability of zero would not hide NaN
        values.clear_hidden(source, turns.now(), from, warp % Warps::transposing, Warps::transposing);
      shared.value_ring.wait_empty(turn);
      Transposed::transpose(ptx::shared_address(from), ptx::shared_address(shared.values[shared.value_ring.slot(turn)]),
                            warp % Warps::transposing, lane);
      hand_over(shared.value_ring.full_barrier(turn));
      release_tile<Traits>(shared.staged_ring, turn++, lane);
    });
  }

  FP_DEVICE void load_key_rows() const {
    const KeyTiles keys(params, params.k, shared.row_tables.keys);
    u32 turn = 0;
    for_each_tile(keys, [&](typename KeyTiles::Source& source, const Turns& turns, u32) {
      keys.find(source);
      shared.key_ring.wait_empty(turn);
      if (warp == 0) tell(turn, turns);
      load_tile(keys, source, turns, shared.keys, shared.key_ring, turn++);
    });
  }
  // The last warp also walks the plan, a unit ahead, and loads Q.
  FP_DEVICE void load_value_rows() const {
    const bool leads = warp == Warps::loading - 1;
    const ValueTiles values(params, params.v, shared.row_tables.values);
    u32 turn = 0;
    if (leads) begin_plan();
    const u32 units = for_each_tile(
        values,
        [&](const Place& place, u32 unit_turn) {
          if (leads) lead(place, unit_turn);
        },
        [&](typename ValueTiles::Source& source, const Turns& turns, u32) {
          values.find(source);
          shared.value_ring.wait_empty(turn);
          load_tile(values, source, turns, shared.values, shared.value_ring, turn++);
        });
    if (leads) send_last_rows(units);
  }
  // Where a warp that loads V walks the plan too: the next unit, and Q of this one.
  FP_DEVICE void lead(const Place& place, u32 unit_turn) const {
    constexpr bool is_query_wanted_first = Shared::queries > 1;  // one Q alone waits for the unit before
    if constexpr (is_query_wanted_first) load_query(place, unit_turn);
    if (lane == 0) publish(unit_turn + 1);
    __syncwarp();
    if constexpr (!is_query_wanted_first) load_query(place, unit_turn);
  }
  template <class Tiles, class Slots, class Ring>
  FP_DEVICE void load_tile(const Tiles& tiles, typename Tiles::Source& source, const Turns& turns, Slots& slots,
                           const Ring& ring, u32 turn) const {
    tiles.look_ahead(source, turns.next());
    tiles.load(source, turns.now(), ptx::shared_address(slots[ring.slot(turn)]));
    ptx::mbarrier_arrive_after_copies(ring.full_barrier(turn));
  }

  FP_DEVICE void release_place(u32 unit_turn) const {
    __syncwarp();
    if (lane == 0) shared.place_ring.release(ptx::opaque(unit_turn));
  }
  // What the warp has written.
  FP_DEVICE void hand_over(u32 barrier) const {
    ptx::fence_before_products();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  FP_DEVICE void load_queries() const {
    for (u32 turn = 0;; ++turn) {
      shared.place_ring.wait_full(turn);
      const Place& place = shared.places[shared.place_ring.slot(turn)].place;
      if (place.done) return send_last_rows(turn);
      load_query(place, turn);
      __syncwarp();
      if (lane == 0) shared.place_ring.release(turn);
    }
  }
  FP_DEVICE void load_query(const Place& place, u32 turn) const {
    empty_slot(turn);
    if constexpr (Shared::leaves_by_boxes) note_rows_of(place, turn);
    ptx::fence_before_bulk_copies();  // output was where Q will be
    const u32 to = ptx::shared_address(shared.query[shared.query_ring.slot(turn)]);
    u32 barrier;
    if constexpr (Warps::rotates) {
      barrier = shared.turning.landed_queries.full_barrier(turn);
    } else {
      barrier = shared.query_ring.full_barrier(turn);
    }
    if (params.query_box_rows > 0) {
      load_query_boxes(place.item, place.unit, to, barrier);
    } else {
      load_query_rows(place.item, place.unit, to);
      ptx::mbarrier_arrive_after_copies(barrier);
    }
  }
  // Until nobody needs the slot any more in which Q of unit `turn` will be: the output of the unit that had it before
  // may be there and leaves by boxes.
  FP_DEVICE void empty_slot(u32 turn) const {
    shared.query_ring.wait_empty(turn);
    if constexpr (Shared::leaves_by_boxes) {
      const u32 slot = shared.query_ring.slot(turn);
      const WaitingRows rows = shared.waiting_rows[slot];
      if (turn >= Shared::queries && rows.row != WaitingRows::none) {
        if (ptx::elect_one()) store_boxes(ptx::shared_address(shared.query[slot]), rows);
      }
      __syncwarp();  // all have read
    }
  }
  FP_DEVICE void store_boxes(u32 from, WaitingRows rows) const {
    using Rows = typename Shared::OutRows;
#pragma unroll
    for (int block = 0; block < Rows::blocks; ++block)
      ptx::tensor_store(maps.out, from + block * Rows::block_bytes, block * Rows::block_columns, rows.head, rows.row,
                        0);
    ptx::await_stores_have_read();
  }
  // Remembers where this unit's output will go.
  FP_DEVICE void note_rows_of(const Place& place, u32 turn) const {
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
    if (lane == 0) {
      const bool leave = Shared::leave_by_boxes(params, item, unit, first_row());
      shared.waiting_rows[shared.query_ring.slot(turn)] = {leave ? row_of_box(item, unit) : WaitingRows::none,
                                                           head_of_box(unit)};
    }
    __syncwarp();
  }
  // Behind the last of `units` units: the output of those whose slots no other Q wanted.
  FP_DEVICE void send_last_rows(u32 units) const {
    if constexpr (Shared::leaves_by_boxes) {
#pragma unroll 1
      for (int i = 0; i < Shared::queries; ++i) empty_slot(units + i);
      if (ptx::elect_one()) ptx::await_stores();
      __syncwarp();
    }
  }

  // Where the boxes of q and out lie that have this CTA's rows of a unit.
  FP_DEVICE i32 row_of_box(const WorkItem& item, const Unit& unit) const {
    return item.q_begin + static_cast<i32>(params.group.div(unit.first_row + first_row()));
  }
  FP_DEVICE i32 head_of_box(const Unit& unit) const { return unit.kv_head * static_cast<i32>(params.group.divisor); }

  // Rows beyond the unit are of another request, or zero: nothing comes of them.
  FP_DEVICE void load_query_boxes(const WorkItem& item, const Unit& unit, u32 to, u32 barrier) const {
    using Rows = typename Shared::QueryRows;
    const i32 row = row_of_box(item, unit), head = head_of_box(unit);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, Rows::blocks * Rows::stride * params.cta_rows);
    } else {
      ptx::mbarrier_arrive(barrier);
    }
    __syncwarp();
    if (!ptx::elect_one()) return;
#pragma unroll
    for (int block = 0; block < Rows::blocks; ++block)
      ptx::tensor_copy(to + block * Rows::block_bytes, maps.q, barrier, block * Rows::block_columns, head, row, 0,
                       ptx::evict_first());
  }
  // Row by row, where the group does not divide a tile. Rows beyond the unit become zero. By value: what the copies'
  // addresses need stays in registers.
  FP_DEVICE void load_query_rows(const WorkItem item, const Unit unit, u32 to) const {
    using Rows = typename Shared::QueryRows;
    using Query = typename Shared::S::Query;
    constexpr int chunks = Rows::used_bytes / 16;
    const Query* first = static_cast<const Query*>(params.q);
#pragma unroll 1
    for (int i = lane; i < Traits::tile_q * chunks; i += 32) {
      const int local_row = i / chunks, chunk = i % chunks, row = first_row() + local_row;
      ptx::cp_async<16>(to + Rows::chunk_offset(local_row, chunk),
                        first + query_offset(params, item, unit, row) + chunk * (16 / int(sizeof(Query))),
                        row < unit.num_rows);
    }
  }

  // Of the unit's, this CTA's.
  FP_DEVICE int first_row() const {
    if constexpr (Traits::ctas == 1) return 0;
    return static_cast<int>(ptx::cluster_rank()) * params.cta_rows;
  }
  FP_DEVICE i32 unit_rows() const { return params.cta_rows * Traits::ctas; }

  FP_DEVICE Extent extent_of(const Unit& unit) const {
    if constexpr (Warps::converts) {
      return BothTiles::extent(params, unit);
    } else if constexpr (Warps::by_rows) {
      return KeyTiles::extent(unit);
    } else {
      return KeyTiles(params, maps.k).extent(unit);
    }
  }
  FP_DEVICE void walk_plan() const {
    begin_plan();
    if (lane != 0) return;
    for (u32 turn = 0; !shared.places[shared.place_ring.slot(turn)].place.done; ++turn) publish(turn + 1);
  }
  FP_DEVICE void begin_plan() const {
    if (lane == 0) {
      if constexpr (has_mask_tiles<Traits>) {
        shared.cursor.start(mask_tiles);
      } else {
        shared.cursor.start(params.plan, blockIdx.x / Traits::ctas);
      }
      publish(0);
    }
    __syncwarp();
  }
  // By one lane, from place to place in shared memory: a place takes many registers.
  FP_DEVICE void publish(u32 turn) const {
    shared.place_ring.wait_empty(turn);
    TiledPlace& to = shared.places[shared.place_ring.slot(turn)];
    if (turn == 0) {
      shared.cursor.first(params, unit_rows(), to.place);
    } else {
      shared.cursor.next(params, unit_rows(), 1, shared.places[shared.place_ring.slot(turn - 1)].place, to.place);
    }
    const Unit& unit = to.place.unit;
    i32 first_token = 0;
    if constexpr (has_mask_tiles<Traits>) {
      to.tile_cell = shared.cursor.tile_cell;
      if constexpr (has_lane_bits<Traits>) to.lane_bits = LaneBits::begin_of(params.lane_bits, to.place.item, tokens);
    } else {
      first_token = extent_of(unit).first_token;
    }
    to.tokens = {first_token, unit.kv_end, unit.all_begin, unit.all_end - tokens};
    ptx::mbarrier_arrive(shared.place_ring.full_barrier(turn));
  }
};

}  // namespace flashpage
