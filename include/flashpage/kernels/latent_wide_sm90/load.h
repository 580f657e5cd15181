// The loading warps of latent_wide_sm90: one goes through the plan and loads Q; three load a part of the columns each.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/softmax/transform.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// The view of the cache that has a part's columns: the tail has its own, and is K's second half.
template <WidePart part>
struct WideColumns {
  FP_DEVICE static const KvView& view(const AttentionParams& params) {
    return part == WidePart::tail ? params.v : params.k;
  }
  FP_DEVICE static const TensorMap& map(const KvMaps& maps) { return part == WidePart::tail ? maps.v : maps.k; }
};

// Loads a part by the copy engine. A lane holds the origin of one of 32 boxes. The CTAs of a cluster load half of a
// block's boxes each, for both.
template <class Traits, WidePart part>
struct WideBoxes {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  static constexpr int tokens = Shared::tokens, first_panel = Shared::first_panel(part);

  Shared& shared;
  const AttentionParams& params;
  const TensorMap& map;
  const int box_shift;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  BoxOrigin found;

  FP_DEVICE WideBoxes(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), map(WideColumns<part>::map(maps)), box_shift(31 - __clz(params.box_tokens)) {}

  FP_DEVICE void open(const WidePlace& next) { place = &next; }

  FP_DEVICE void load(int block, u32 use) {
    constexpr int held = 2 / Traits::ctas;  // boxes whose origins a thread has at a time
    const int boxes = tokens >> box_shift, own = boxes / Traits::ctas, first = block * boxes;
    if (first % 32 == 0) found = look_up(first);
    const int own_begin = Traits::ctas == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * own;
    const i32 left = place->place.unit.kv_end - place->first_token - block * tokens;
    const int present = min_of(boxes, (left + (1 << box_shift) - 1) >> box_shift);
    for (int begin = own_begin; begin < own_begin + own; begin += held) {
      BoxOrigin at[held];
#pragma unroll
      for (int i = 0; i < held; ++i) {
        at[i].page = __shfl_sync(0xffffffff, found.page, first + begin + i);
        at[i].row = __shfl_sync(0xffffffff, found.row, first + begin + i);
      }
      if (begin == own_begin) shared.wait_empty(use, part);
      if (ptx::elect_one()) {
#pragma unroll
        for (int i = 0; i < Shared::panels_of(part); ++i) {
          const int panel = first_panel + i;
          const u32 to = shared.block(use) + panel * Tile::panel_bytes + (begin * 128 << box_shift);
          const u32 barrier = shared.full_barrier(use, panel);
          if (begin == own_begin) ptx::mbarrier_arrive_expect(barrier, present * 128 << box_shift);
#pragma unroll
          for (int box = 0; box < held; ++box)
            if (begin + box < present) copy(to + (box * 128 << box_shift), barrier, column_of(i), at[box]);
        }
      }
      __syncwarp();
    }
  }

 private:
  FP_DEVICE static i32 column_of(int panel_of_part) {
    return ((part == WidePart::tail ? 0 : first_panel) + panel_of_part) * Tile::panel_columns;
  }
  FP_DEVICE void copy(u32 to, u32 barrier, i32 column, const BoxOrigin& at) const {
    if constexpr (Traits::ctas == 1) {
      ptx::tensor_copy(to, map, barrier, column, at.row, 0, at.page, ptx::evict_first());
    } else {
      ptx::tensor_copy_to_pair(to, map, barrier, column, at.row, 0, at.page);
    }
  }

  // The origin of the lane's box among the 32 boxes from `first` on.
  FP_DEVICE BoxOrigin look_up(int first) const {
    const i32 token = place->first_token + ((first + static_cast<int>(threadIdx.x % 32)) << box_shift);
    u32 page, row;
    params.page.divmod(token, page, row);
    const bool exists = token < place->place.unit.kv_end;
    return {exists ? __ldg(params.kv_indices + place->place.item.kv_offset + page) : 0, static_cast<i32>(row)};
  }
};

// Loads a part by cp.async, row by row, from pages of any size. A lane looks up the pages of its two tokens of a block
// while the block before is loaded.
template <class Traits, WidePart part>
struct WideRows {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int tokens = Shared::tokens, groups = tokens / 32;
  static constexpr int first_panel = Shared::first_panel(part), panels = Shared::panels_of(part);
  static constexpr int chunks = max_of(1, panels* Tile::panel_columns* int(sizeof(Cache)) / 16);  // of a row

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  i32 found[groups];

  FP_DEVICE WideRows(Shared& shared, const AttentionParams& params, const KvMaps&) : shared(shared), params(params) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    look_up(0);
  }

  FP_DEVICE void load(int block, u32 use) {
    const Rows rows(params, place->place.item.kv_offset);
    constexpr int column = part == WidePart::tail ? 0 : first_panel * Tile::panel_columns;
    u64 mine[groups];
#pragma unroll
    for (int group = 0; group < groups; ++group)
      mine[group] = reinterpret_cast<u64>(
          rows.template row<Cache>(WideColumns<part>::view(params), found[group], token_of(block, group), 0, column));
    look_up(block + 1);
    const i32 count = place->place.unit.kv_end - place->first_token - block * tokens;
    shared.wait_empty(use, part);
#pragma unroll
    for (int group = 0; group < groups; ++group)
      copy(shared.block(use) + first_panel * Tile::panel_bytes + group * 32 * Tile::stride, mine[group],
           count - group * 32);
#pragma unroll
    for (int i = 0; i < panels; ++i) ptx::mbarrier_arrive_after_copies(shared.full_barrier(use, first_panel + i));
  }

 private:
  // The lane's token, or the unit's last one.
  FP_DEVICE i32 token_of(int block, int group) const {
    const i32 token = place->first_token + block * tokens + group * 32 + static_cast<int>(threadIdx.x % 32);
    return min_of(token, place->place.unit.kv_end - 1);
  }
  FP_DEVICE void look_up(int block) {
    const Rows rows(params, place->place.item.kv_offset);
#pragma unroll
    for (int group = 0; group < groups; ++group)
      found[group] = place->place.unit.kv_end > 0 ? rows.look_up(token_of(block, group)) : 0;
  }

  // Copies 32 rows, of which `count` exist; others become zero. `mine`: the row of this lane's token.
  FP_DEVICE static void copy(u32 to, u64 mine, i32 count) {
    constexpr int rows_a_pass = 32 / chunks, batch = chunks == 32 ? 4 : 2;
    static_assert(32 % chunks == 0);
    const int lane = threadIdx.x % 32, lane_row = lane / chunks, lane_chunk = lane % chunks;
    const u32 lane_to = to + Tile::chunk_offset(lane_row, lane_chunk);
    const u64 policy = ptx::evict_first();
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += batch * rows_a_pass) {
      // Reads all sources before it issues the copies: ptxas makes a cp.async wait for earlier shuffles.
      u64 from[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i)
        from[i] = __shfl_sync(0xffffffff, mine, begin + i * rows_a_pass + lane_row) + lane_chunk * 16;
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int first = begin + i * rows_a_pass;
        const u32 here = (lane_to ^ (first & 7) * 16) + first * Tile::stride;
        ptx::cp_async<16>(here, reinterpret_cast<const void*>(from[i]), first + lane_row < count, policy);
      }
    }
  }
};

template <class Traits>
struct WideLoad {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  template <WidePart part>
  using PartLoader = typename select_type<Shared::by_boxes, WideBoxes<Traits, part>, WideRows<Traits, part>>::type;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE WideLoad(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps) {}

  FP_DEVICE void run() const {
    if (warp == 0) load_part<WidePart::left>();
    if (warp == 1) load_part<WidePart::right>();
    if constexpr (Shared::tail_panels > 0) {
      if (warp == 2) load_part<WidePart::tail>();
    }
    if (warp == WideWarps::plan_warp) plan();
  }

 private:
  template <WidePart part>
  FP_DEVICE void load_part() const {
    PartLoader<part> loader(shared, params, maps);
    u32 use = 0;
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const WidePlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) return;
      loader.open(place);
      for (int block = 0; block < place.blocks; ++block) loader.load(block, use++);
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_use);
      if (part == WidePart::left && threadIdx.x == 0) stamp_first<Traits>(params, Stamp::first_load);
    }
  }

  FP_DEVICE void plan() const {
    if (lane == 0) {
      shared.cursor.start(params.plan, blockIdx.x / Traits::ctas);
      publish(0);
      stamp<Traits>(params, Stamp::plan_known);
    }
    __syncwarp();
    for (u32 use = 0;; ++use) {
      shared.place_ring.wait_full(use);
      const Place& place = shared.places[shared.place_ring.slot(use)].place;
      if (place.done) return;
      load_query(place, use);
      __syncwarp();
      if (lane == 0) publish(use + 1);
      __syncwarp();
    }
  }

  // Called by one lane. Places are written in shared memory, because a place takes many registers.
  FP_DEVICE void publish(u32 use) const {
    shared.place_ring.wait_empty(use);
    constexpr i32 unit_rows = Shared::rows * Traits::ctas;
    WidePlace& to = shared.places[shared.place_ring.slot(use)];
    if (use == 0) {
      shared.cursor.first(params, unit_rows, to.place);
    } else {
      shared.cursor.next(params, unit_rows, 1, shared.places[shared.place_ring.slot(use - 1)].place, to.place);
    }
    const Unit& unit = to.place.unit;
    to.scale = score_scale_of<Traits>(params, unit);
    to.first_token = Shared::by_boxes ? unit.kv_begin & -params.box_tokens : unit.kv_begin;
    to.blocks = unit.kv_end > unit.kv_begin ? ceil_div(unit.kv_end - to.first_token, Shared::tokens) : 0;
    ptx::mbarrier_arrive(shared.place_ring.full_barrier(use));
  }

  // Loads this CTA's rows of the unit; rows that do not exist become zero.
  FP_DEVICE void load_query(const Place& place, u32 use) const {
    constexpr int chunks = Tile::used_bytes / 16;
    constexpr int together = Shared::tail_panels > 0 ? 2 : 1;  // rows; two spill where each is two whole copies
    const int first_row = Traits::ctas == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * Shared::rows;
    const i32 count = place.unit.num_rows - first_row;
    u64 mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      mine[i] = reinterpret_cast<u64>(static_cast<const typename Traits::Cache*>(params.q) +
                                      query_offset(params, place.item, place.unit, first_row + i * 32 + lane));
    shared.query_ring.wait_empty(use);
    const u32 to = ptx::shared_address(shared.query);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll together
      for (int i = 0; i < 32; ++i) {
        const int row = half * 32 + i;
        const u64 from = __shfl_sync(0xffffffff, mine[half], i);
#pragma unroll
        for (int first = 0; first < chunks; first += 32) {
          const int chunk = first + lane;
          if (chunk < chunks)
            ptx::cp_async<16>(to + Tile::chunk_offset(row, chunk), reinterpret_cast<const void*>(from + chunk * 16),
                              row < count);
        }
      }
    ptx::mbarrier_arrive_after_copies(shared.query_ring.full_barrier(use));
  }
};

}  // namespace flashpage
