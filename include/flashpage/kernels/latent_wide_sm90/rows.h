// Loads single rows of latent_wide_sm90 by cp.async, and fences them: the rows of a list, or of pages without boxes.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

// The warps take groups of four rows in turn, and eight lanes copy a row's 128 bytes of a panel. A lane looks up one of
// its warp's rows of a block while the block before is loaded.
template <class Traits>
struct WideRows {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int loaders = Shared::loaders, in_group = Shared::group_rows;
  static constexpr int groups = ceil_div(Shared::row_groups, loaders);  // of a warp
  static_assert(groups * in_group <= 32 && in_group == 4, "a lane looks up one row, and copies one of a group");

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  i32 found;               // the page, or list entry, of the lane's row in the next block; negative: there is none

  FP_DEVICE WideRows(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    found = look_up(0);
  }

  FP_DEVICE void load(int block, u32 use) {
    const u32 present = __ballot_sync(0xffffffff, found >= 0);  // a bit for each of the warp's rows
    const CacheSlot slot = Rows(params, place->place.item.kv_offset).slot(max_of(found, 0), token_of(block));
    u64 rows[groups];
    if constexpr (Shared::tail_panels > 0) {
      find(params.v, slot, rows);
      const WideQuarter tail = shared.tail_of(use);
      wait_empty(tail);
      copy<Shared::tail_panels, 0>(tail, rows, present);
    }
    find(params.k, slot, rows);
    found = look_up(block + 1);
    copy_quarter<0>(use, rows, present);
    copy_quarter<1>(use, rows, present);
    copy_quarter<2>(use, rows, present);
    copy_quarter<3>(use, rows, present);
  }

 private:
  FP_DEVICE static int lane() { return static_cast<int>(threadIdx.x % 32); }
  FP_DEVICE static int warp() { return static_cast<int>(threadIdx.x / 32); }

  FP_DEVICE i32 token_of(int block) const {
    const int row = (warp() + lane() / in_group * loaders) * in_group + lane() % in_group;
    return place->first_token + block * Shared::tokens + row;
  }
  FP_DEVICE i32 look_up(int block) const {
    const i32 token = token_of(block), end_of_block = place->first_token + (block + 1) * Shared::tokens;
    const bool exists = token < min_of(end_of_block, place->place.unit.kv_end);
    return exists ? Rows(params, place->place.item.kv_offset).look_up(token) : -1;
  }
  // The addresses that the lane copies from, in the first panel. Each row's comes from the lane that looked it up.
  FP_DEVICE static void find(const KvView& view, const CacheSlot& slot, u64 (&rows)[groups]) {
    const i64 elements = slot.page * view.page_stride + slot.in_page * view.token_stride;
    const u64 mine = reinterpret_cast<u64>(view.data) + elements * sizeof(typename Traits::Cache);
#pragma unroll
    for (int i = 0; i < groups; ++i)
      rows[i] = __shfl_sync(0xffffffff, mine, i * in_group + lane() / 8) + lane() % 8 * 16;
  }
  // Tells the scoring warps which tokens of a list's block exist.
  FP_DEVICE void write_present(const WideQuarter& first, u32 use, u32 present) const {
    const int group = warp() + lane() * loaders;
    if (group < Shared::row_groups) shared.present[Shared::slot(use)][group] = present >> lane() * in_group & 15;
    ptx::mbarrier_arrive(ptx::shared_address(first.copied));
  }
  FP_DEVICE static void wait_empty(const WideQuarter& quarter) {
    ptx::mbarrier_wait(ptx::shared_address(quarter.empty), quarter.phase ^ 1);
  }

  template <int i>
  FP_DEVICE void copy_quarter(u32 use, const u64 (&rows)[groups], u32 present) const {
    const WideQuarter quarter = shared.kept_quarter(i, use);
    wait_empty(quarter);
    if constexpr (Shared::is_selected && i == 0) write_present(quarter, use, present);
    copy<Shared::quarter_panels, Shared::panel_of_quarter(i)>(quarter, rows, present);
  }
  // Copies panels of the rows that exist; others become zero.
  template <int panels, int first_panel>
  FP_DEVICE static void copy(const WideQuarter& quarter, const u64 (&rows)[groups], u32 present) {
    const u32 to = ptx::shared_address(quarter.memory) + Tile::chunk_offset(warp() * in_group + lane() / 8, lane() % 8);
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      // Some warps have a group less.
      if ((i + 1) * loaders > Shared::row_groups && warp() + i * loaders >= Shared::row_groups) break;
      const int later = i * loaders * in_group;                       // rows after the first group's
      const u32 here = (to ^ later % 8 * 16) + later * Tile::stride;  // the swizzle repeats itself after eight rows
#pragma unroll
      for (int panel = 0; panel < panels; ++panel)
        ptx::cp_async<16>(here + panel * Tile::panel_bytes,
                          reinterpret_cast<const void*>(rows[i] + (first_panel + panel) * 128),
                          (present >> (i * in_group + lane() / 8) & 1) != 0);
    }
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(quarter.copied));
  }
};

// Fences the rows of a block that other warps have copied, once for all products that read them.
template <class Traits>
struct WideFence {
  using Shared = WideShared<Traits>;

  Shared& shared;

  FP_DEVICE void operator()(u32 use) const {
    if constexpr (Shared::tail_panels > 0) pass_on(shared.tail_of(use));
#pragma unroll
    for (int i = 0; i < Shared::kept; ++i) pass_on(shared.kept_quarter(i, use));
  }

 private:
  FP_DEVICE static void pass_on(const WideQuarter& columns) {
    ptx::mbarrier_wait(ptx::shared_address(columns.copied), columns.phase);
    ptx::fence_before_products();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(columns.full));
  }
};

}  // namespace flashpage
