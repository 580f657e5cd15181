// Loads Q for the computing warps of prefill_sm90, and stores the output that waits in the same slots.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/common.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

// One warp. Before it loads Q to a slot, it stores the output that the slot holds, if that leaves by boxes.
template <class Traits>
struct QueryLoader : LoadingWarp<Traits> {
  using Warp = LoadingWarp<Traits>;
  using typename Warp::Shared;
  using typename Warp::Warps;

  using Warp::first_row;
  using Warp::lane;
  using Warp::maps;
  using Warp::params;
  using Warp::shared;

  using Warp::Warp;

  FP_DEVICE void load_query(const Place& place, u32 use) const {
    empty_slot(use);
    if constexpr (Shared::leaves_by_boxes) note_rows_of(place, use);
    ptx::fence_before_bulk_copies();  // the slot may have held output
    const u32 to = ptx::shared_address(shared.query[shared.query_ring.slot(use)]);
    u32 barrier;
    if constexpr (Warps::rotates) {
      barrier = shared.rotation.landed_queries.full_barrier(use);
    } else {
      barrier = shared.query_ring.full_barrier(use);
    }
    if (params.query_box_rows > 0) {
      load_query_boxes(place.item, place.unit, to, barrier);
    } else {
      load_query_rows(place.item, place.unit, to);
      ptx::mbarrier_arrive_after_copies(barrier);
    }
  }
  // Called by a warp that also loads V: loads Q of this unit and publishes the plan's next unit.
  FP_DEVICE void query_and_plan(const Place& place, u32 unit_use) const {
    constexpr bool loads_query_first = Shared::queries > 1;  // a single Q slot is free only after the unit before
    if constexpr (loads_query_first) load_query(place, unit_use);
    if (lane == 0) this->publish(unit_use + 1);
    __syncwarp();
    if constexpr (!loads_query_first) load_query(place, unit_use);
  }
  // Called after the last of `units` units: stores the output in slots that no other Q needed.
  FP_DEVICE void store_last_rows(u32 units) const {
    if constexpr (Shared::leaves_by_boxes) {
#pragma unroll 1
      for (int i = 0; i < Shared::queries; ++i) empty_slot(units + i);
      if (ptx::elect_one()) ptx::wait_stores();
      __syncwarp();
    }
  }

 private:
  // Waits until the slot for Q of unit `use` is free. It may hold the output of the unit before, which then leaves by
  // boxes.
  FP_DEVICE void empty_slot(u32 use) const {
    shared.query_ring.wait_empty(use);
    if constexpr (Shared::leaves_by_boxes) {
      const u32 slot = shared.query_ring.slot(use);
      const WaitingRows rows = shared.waiting_rows[slot];
      if (use >= Shared::queries && rows.row != WaitingRows::none) {
        if (ptx::elect_one()) store_boxes(ptx::shared_address(shared.query[slot]), rows);
      }
      __syncwarp();  // all lanes have read `rows`
    }
  }
  FP_DEVICE void store_boxes(u32 from, WaitingRows rows) const {
    using Rows = typename Shared::OutRows;
#pragma unroll
    for (int panel = 0; panel < Rows::panels; ++panel)
      ptx::tensor_store(maps.out, from + panel * Rows::panel_bytes, panel * Rows::panel_columns, rows.head, rows.row,
                        0);
    ptx::wait_stores_have_read();
  }
  // Records where this unit's output will go.
  FP_DEVICE void note_rows_of(const Place& place, u32 use) const {
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
    if (lane == 0) {
      const bool leave = Shared::leave_by_boxes(params, item, unit, first_row());
      shared.waiting_rows[shared.query_ring.slot(use)] = {leave ? row_of_box(item, unit) : WaitingRows::none,
                                                          head_of_box(unit)};
    }
    __syncwarp();
  }
  // The coordinates of the boxes of q and out that have this CTA's rows of a unit.
  FP_DEVICE i32 row_of_box(const WorkItem& item, const Unit& unit) const {
    return item.q_begin + static_cast<i32>(params.group.div(unit.first_row + first_row()));
  }
  FP_DEVICE i32 head_of_box(const Unit& unit) const { return unit.kv_head * static_cast<i32>(params.group.divisor); }

  // Rows beyond the unit belong to another request or are zero; their results are not stored.
  FP_DEVICE void load_query_boxes(const WorkItem& item, const Unit& unit, u32 to, u32 barrier) const {
    using Rows = typename Shared::QueryRows;
    const i32 row = row_of_box(item, unit), head = head_of_box(unit);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, Rows::panels * Rows::stride * params.cta_rows);
    } else {
      ptx::mbarrier_arrive(barrier);
    }
    __syncwarp();
    if (!ptx::elect_one()) return;
#pragma unroll
    for (int panel = 0; panel < Rows::panels; ++panel)
      ptx::tensor_copy(to + panel * Rows::panel_bytes, maps.q, barrier, panel * Rows::panel_columns, head, row, 0,
                       ptx::evict_first());
  }
  // Loads row by row, if the group does not divide a tile. Rows beyond the unit become zero. Arguments are passed by
  // value so that values for the copies' addresses stay in registers.
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
};

}  // namespace flashpage
