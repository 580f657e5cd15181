// How the plan's warp of latent_wide_sm90 and latent_e4m3_sm90 loads Q.
#pragma once
#include "flashpage/kernels/wide_units.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

// Shared has the tile and its ring.
template <class Traits, class Shared>
struct WideQuery {
  using Tile = typename Shared::Tile;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  int lane = threadIdx.x % 32;

  FP_DEVICE WideQuery(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps) {}

  // Loads this CTA's rows of the unit.
  FP_DEVICE void operator()(const Place& place, u32 use) const {
    if (params.query_box_rows > 0) {
      load_boxes(place, use);
    } else {
      load_rows(place, use);
    }
  }

  // Brings this CTA's rows of a later unit to the L2, if boxes load them.
  FP_DEVICE void prefetch(const Place& place) const {
    if (place.done || params.query_box_rows == 0 || !ptx::elect_one()) return;
    u32 row, head;
    params.group.divmod(place.unit.first_row + Shared::first_row(), row, head);
    for (int panel = 0; panel < Tile::panels; ++panel)
      ptx::tensor_prefetch(maps.q, panel * Tile::panel_columns, head, place.item.q_begin + row, 0);
  }

 private:
  // Rows beyond the unit are zero or belong to another request; their results are not stored.
  FP_DEVICE void load_boxes(const Place& place, u32 use) const {
    u32 row, head;
    params.group.divmod(place.unit.first_row + Shared::first_row(), row, head);
    const u32 barrier = shared.query_ring.full_barrier(use), to = ptx::shared_address(shared.query);
    shared.query_ring.wait_empty(use);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, Tile::tile_bytes);
    } else {
      ptx::mbarrier_arrive(barrier);
    }
    __syncwarp();
    if (!ptx::elect_one()) return;
    for (int panel = 0; panel < Tile::panels; ++panel)
      ptx::tensor_copy(to + panel * Tile::panel_bytes, maps.q, barrier, panel * Tile::panel_columns, head,
                       place.item.q_begin + row, 0);
  }
  // Rows that do not exist become zero.
  FP_DEVICE void load_rows(const Place& place, u32 use) const {
    constexpr int chunks = Tile::used_bytes / 16;
    // A row without a tail is two copies of all lanes, and two such rows at a time would spill. So would the lane's
    // offsets in the rows if they stayed in registers: the opaque lane has them computed again.
    constexpr int together = Shared::tail_panels > 0 ? 2 : 1;
    const int own = static_cast<int>(ptx::opaque(lane));
    const i32 count = place.unit.num_rows - Shared::first_row();
    constexpr int in_part = min_of(32, Shared::rows), parts = Shared::rows / in_part;  // rows, which lanes look up
    u64 mine[parts];
#pragma unroll
    for (int i = 0; i < parts; ++i)
      mine[i] =
          reinterpret_cast<u64>(static_cast<const typename Traits::Cache*>(params.q) +
                                query_offset(params, place.item, place.unit, Shared::first_row() + i * 32 + lane));
    shared.query_ring.wait_empty(use);
    const u32 to = ptx::shared_address(shared.query);
#pragma unroll
    for (int part = 0; part < parts; ++part)
#pragma unroll together
      for (int i = 0; i < in_part; ++i) {
        const int row = part * 32 + i;
        const u64 from = __shfl_sync(0xffffffff, mine[part], i);
#pragma unroll
        for (int first = 0; first < chunks; first += 32) {
          const int chunk = first + own;
          if (chunk < chunks)
            ptx::cp_async<16>(to + Tile::chunk_offset(row, chunk), reinterpret_cast<const void*>(from + chunk * 16),
                              row < count);
        }
      }
    ptx::mbarrier_arrive_after_copies(shared.query_ring.full_barrier(use));
  }
};

}  // namespace flashpage
