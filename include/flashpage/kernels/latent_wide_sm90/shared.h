// The shared memory between the warps of latent_wide_sm90.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/kernels/wide_units.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// The columns of a block of latent rows that one warp loads as boxes: two parts of the value columns, and the tail,
// which has no values. In a pair of CTAs the first part is the half that this CTA keeps until it has multiplied it, and
// the second one the half that it needs for scores alone. Else each part has every other quarter.
enum class WidePart { first, second, tail };

// A quarter of a block's value columns, or its tail: where it is in shared memory, and its barriers.
struct WideQuarter {
  u8* memory;
  u64 *full, *empty;
  u64* copied;      // where copies of single rows end, before they are fenced; `full` if boxes or conversions fill it
  u32 phase;        // of the barriers
  int first_panel;  // of the value columns; 0 for the tail, which has a view of its own
};

template <class Traits>
struct WideShared {
  using Cache = typename Traits::Cache;
  static constexpr int tokens = 64;  // of a block
  static constexpr int rows = 64;    // packed rows of this CTA
  static constexpr int unit_rows = rows * Traits::ctas;
  // Rows in fp8 become rows of Q's type (convert.h). Two CTAs then convert half of a block's tokens each, for both.
  static constexpr bool converts = converts_latents<Traits>, shares_blocks = converts && Traits::ctas > 1;
  static constexpr int passes = 2 / Traits::ctas;  // in which a CTA converts its tokens of a block
  static constexpr bool is_cluster = Traits::ctas > 1;
  static constexpr bool is_pair = is_cluster && !converts;  // two CTAs share the values of both
  static constexpr int places_ahead = 2;
  // Barriers at which a block's scores are announced, used in turn. At a unit's end a warpgroup of values may not yet
  // have waited for those of any block that is kept.
  static constexpr int scored_slots = 4;
  static constexpr bool has_boxes = Traits::loader == Loader::boxes;
  // Lists of tokens may have gaps.
  static constexpr bool is_selected = reads_lists<Traits::kv_source>;
  static_assert(has_boxes ? !is_selected : !is_pair, "lists have no boxes, and CTAs that load single rows no partner");
  // Single rows of a block are in groups, which loading warps take in turn.
  static constexpr int group_rows = 4, row_groups = tokens / group_rows;
  using Tile = SwizzledRows<Cache, Traits::head_dim_qk, tokens>;  // a block, or Q
  static constexpr int value_panels = Traits::head_dim_vo / Tile::panel_columns, half_panels = value_panels / 2;
  static constexpr int tail_panels = Tile::panels - value_panels;
  static constexpr int loaders = converts ? 4 : !has_boxes || tail_panels > 0 ? 3 : 2;  // warps
  // Single rows that are copied as they are: the plan's warp fences them, for all products.
  static constexpr bool copies_rows = !has_boxes && !converts;
  // Arrivals at the barrier where loads end: the lane that expects boxes, or all lanes, whose copies arrive.
  static constexpr int arrivals = has_boxes ? 1 : 32 * loaders * (converts ? passes : 1);
  static_assert(Traits::tile_kv == tokens && Traits::tile_q == rows && Traits::head_dim_qk % 64 == 0);
  static_assert(value_panels % 4 == 0 && tail_panels <= 1 && (Traits::ctas == 1 || Traits::ctas % 2 == 0));

  static constexpr int quarter_panels = value_panels / 4, quarter_bytes = quarter_panels * Tile::panel_bytes;
  // Quarters whose values this CTA multiplies, and those that it needs for scores alone.
  static constexpr int kept = is_pair ? 2 : 4, passing = 4 - kept;
  static constexpr int kept_blocks = is_pair ? 3 : 2, tail_slots = is_pair ? 1 : 2;
  static_assert(scored_slots >= kept_blocks, "a warpgroup of values would wait for a phase that is over");
  static constexpr int readers = is_pair ? 2 : 1;     // warpgroups of values that read a kept quarter
  static constexpr int messengers = is_pair ? 2 : 1;  // CTAs whose probabilities arrive here
  // Registers of a thread. Pairs hold a part of Q, and warps that load single rows have their addresses.
  static constexpr int loading_registers = has_boxes ? 40 : converts ? 72 : 56;
  static constexpr int scoring_registers = 160 - loading_registers;
  static constexpr int value_registers = 176;
  // A warpgroup that takes more registers than are left waits for ever.
  static_assert(loading_registers + scoring_registers + 2 * value_registers <= 4 * WideRoles::first_registers);
  static constexpr int pieces_ahead = 9;  // of 16 bytes, of each lane of a converting warp: a pass
  // What a warp passes on in one message: probabilities of 16 rows, and a float2 of each lane.
  static constexpr int probability_bytes = 16 * tokens * 2, factor_bytes = 32 * 8;

  alignas(1024) u8 query[Tile::tile_bytes];
  alignas(1024) u8 kept_values[kept_blocks][kept][quarter_bytes];
  alignas(1024) u8 passing_values[max_of(passing, 1)][passing > 0 ? quarter_bytes : 16];
  alignas(1024) u8 tails[tail_slots][tail_panels > 0 ? Tile::panel_bytes : 16];
  // Messages of the scoring warps of this CTA, and of the other one: a block's probabilities, and the factors of
  // earlier values; at a unit's end its sums. Each lane has a float2 of factors or sums, of its two rows.
  alignas(128) uint4 probabilities[messengers][tokens / 16][32 * WideRoles::group];
  float2 factors[messengers][32 * WideRoles::group];
  alignas(16) u8
      arriving[converts ? pieces_ahead : 1][converts ? loaders : 1][converts ? 32 : 1][16];  // before it is converted
  alignas(16) u8 present[is_selected ? kept_blocks : 1][row_groups];  // a bit for each of a group's tokens
  WidePlace places[places_ahead];
  PlaceCursor cursor;
  u64 kept_full[kept_blocks][kept], kept_empty[kept_blocks][kept];
  u64 passing_full[max_of(passing, 1)], passing_empty[max_of(passing, 1)];
  u64 tail_full[tail_slots], tail_empty[tail_slots];
  u64 kept_copied[copies_rows ? kept_blocks : 1][kept], tail_copied[copies_rows ? tail_slots : 1];
  // Of warps with the same rows: messages of this CTA, and of the other one; and both readers of this CTA's.
  u64 handed_over[WideRoles::group], received[WideRoles::group], taken[WideRoles::group];
  u64 scored[scored_slots][WideRoles::group];  // in a pair: a block's products of scores, but for the last few
  u64 cleared[2];                              // a warpgroup of values
  SlotRing<places_ahead> place_ring;
  SlotRing<1> query_ring;

  // Called by one thread.
  FP_DEVICE void init() {
    const auto all = [](auto& barriers, u32 count) {
      for (u64& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    for (auto& block : kept_full) all(block, copies_rows ? 1 : arrivals);
    if constexpr (copies_rows) {
      // At a first quarter's barrier each lane arrives once more, after it has written `present`.
      for (auto& block : kept_copied)
        for (int i = 0; i < kept; ++i)
          ptx::mbarrier_init(ptx::shared_address(&block[i]), is_selected && i == 0 ? 2 * arrivals : arrivals);
      all(tail_copied, arrivals);
    }
    for (auto& block : kept_empty) all(block, readers * WideRoles::group * (shares_blocks ? 2 : 1));
    all(passing_full, 1);
    all(passing_empty, WideRoles::group);
    all(tail_full, copies_rows ? 1 : arrivals);
    all(tail_empty, WideRoles::group);
    all(handed_over, 32);
    all(received, 1);
    all(taken, is_pair ? 32 + 1 : 2 * 32);
    for (auto& block : scored) all(block, 32);
    all(cleared, 32 * WideRoles::group);
    place_ring.init(1, 32 * (WideRoles::computing + loaders));
    query_ring.init(converts ? 32 * loaders : 32, WideRoles::group);
    ptx::mbarrier_init_fence();
  }

  // This CTA's first row of a unit.
  FP_DEVICE static int first_row() { return static_cast<int>(ptx::rank_among<Traits::ctas>()) * rows; }

  // `use` counts the blocks of all units.
  FP_DEVICE static u32 slot(u32 use) { return use % kept_blocks; }
  FP_DEVICE static u32 kept_phase(u32 use) { return use / kept_blocks & 1; }
  FP_DEVICE static u32 scored_slot(u32 use) { return use % scored_slots; }
  FP_DEVICE static u32 scored_phase(u32 use) { return use / scored_slots & 1; }
  FP_DEVICE static u32 tail_slot(u32 use) { return use % tail_slots; }
  FP_DEVICE static u32 tail_phase(u32 use) { return use / tail_slots & 1; }
  // The messages before this block's: one a block, and one a unit.
  FP_DEVICE static u32 message(const WidePlace& place, u32 use) { return use + place.units_before; }

  // Marks a factor of earlier values, which is never negative, in its sign: the block has tokens outside of the unit. A
  // NaN can be marked, too.
  FP_DEVICE static float marked(float factor, bool has_others) {
    return __uint_as_float(__float_as_uint(factor) | (has_others ? 1u << 31 : 0));
  }
  FP_DEVICE static bool is_marked(float factor) { return (__float_as_uint(factor) >> 31) != 0; }

  // Called by each warp that has read columns.
  FP_DEVICE static void release(const u64& empty, int lane) {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  // Called by each warp that has read a kept quarter: its memory is free when both CTAs that write to it know.
  FP_DEVICE static void release_kept(const u64& empty, int lane) {
    release(empty, lane);
    if constexpr (shares_blocks) {
      if (lane == 0) ptx::mbarrier_arrive_at(ptx::shared_address(&empty), ptx::cluster_rank() ^ 1);
    }
  }

  FP_DEVICE WideQuarter tail_of(u32 use) {
    const u32 at = tail_slot(use);
    u64* const copied = copies_rows ? &tail_copied[at] : &tail_full[at];
    return {tails[at], &tail_full[at], &tail_empty[at], copied, tail_phase(use), 0};
  }
  // The first panel of a kept quarter of a CTA without a partner.
  FP_DEVICE static constexpr int panel_of_quarter(int i) { return i % 2 * half_panels + i / 2 * quarter_panels; }
  // The kept quarters are in the order in which products of values end.
  FP_DEVICE WideQuarter kept_quarter(int i, u32 use) {
    const u32 at = slot(use);
    const int panel =
        is_pair ? static_cast<int>(ptx::cluster_rank()) * half_panels + i * quarter_panels : panel_of_quarter(i);
    u64* const copied = copies_rows ? &kept_copied[at][i] : &kept_full[at][i];
    return {kept_values[at][i], &kept_full[at][i], &kept_empty[at][i], copied, kept_phase(use), panel};
  }
  FP_DEVICE WideQuarter passing_quarter(int i, u32 use) {
    const int half = static_cast<int>(ptx::cluster_rank()) ^ 1;
    u64* const full = &passing_full[i];
    return {passing_values[i], full, &passing_empty[i], full, use & 1, half * half_panels + i * quarter_panels};
  }
  // The quarters of a part: two.
  template <WidePart part>
  FP_DEVICE WideQuarter quarter_of(int i, u32 use) {
    static_assert(part != WidePart::tail);
    if constexpr (!is_pair) return kept_quarter(2 * i + (part == WidePart::second), use);
    if constexpr (part == WidePart::second) return passing_quarter(i, use);
    return kept_quarter(i, use);
  }
};

}  // namespace flashpage
