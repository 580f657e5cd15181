// The loading warps of latent_e4m3_sm90: one goes through the plan and loads Q, two copy rows as they are stored, or
// boxes of them, and one reads and arranges the rows' scales.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/shared.h"
#include "flashpage/kernels/wide_query.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/ptx/warp_max.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

// Looks up 32 rows of a block, a lane each.
template <class Traits>
struct E4m3Finder {
  using Shared = E4m3Shared<Traits>;
  using Format = typename Shared::Format;
  using Rows = KvRows<Traits::kv_source>;

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers

  FP_DEVICE E4m3Finder(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE static int lane() { return static_cast<int>(threadIdx.x % 32); }

  // The page, or list entry, of the lane's row of those from `first` on in a block; negative: there is none.
  FP_DEVICE i32 look_up(int block, int first) const {
    const i32 token = token_of(block, first);
    return token < place->place.unit.kv_end ? Rows(params, place->place.item.kv_offset).look_up(token) : -1;
  }
  // The addresses of that row's parts; those of some other row if there is none.
  FP_DEVICE LatentParts find(int block, int first, i32 found) const {
    const Rows all(params, place->place.item.kv_offset);
    return Format::find(params, all.slot(max_of(found, 0), token_of(block, first)));
  }

  FP_DEVICE i32 token_of(int block, int first) const {
    return place->first_token + block * Shared::tokens + first + lane();
  }
};

// Copies rows: a warp has 32 of a block. Eight lanes copy 128 bytes of a row at a time.
template <class Traits>
struct E4m3Rows : E4m3Finder<Traits> {
  using Base = E4m3Finder<Traits>;
  using Shared = typename Base::Shared;
  using Block = typename Shared::Block;
  static constexpr int rows = Shared::tokens / Shared::loaders, row_groups = rows / 4;  // of a warp; of four rows
  static constexpr int together = 4;  // groups whose addresses are in registers at the same time
  static_assert(rows == 32, "a lane looks up one row");

  i32 found;  // in the next block

  using Base::Base;

  FP_DEVICE void open(const WidePlace& next) {
    this->place = &next;
    found = this->look_up(0, warp() * rows);
  }

  FP_DEVICE void load(int block, u32 use) {
    const u32 slot = this->shared.block_ring.slot(use);
    const u32 present = __ballot_sync(0xffffffff, found >= 0);
    const LatentParts parts = this->find(block, warp() * rows, found);
    found = this->look_up(block + 1, warp() * rows);
    this->shared.block_ring.wait_empty(use);
    u8 *const block_memory = this->shared.blocks[slot], *const tail_memory = this->shared.tails[slot];
#pragma unroll
    for (int first = 0; first < row_groups; first += together) {
      u64 pieces[together];
      find_pieces(pieces, first, parts.quantised);
      copy<Shared::panels, 8>(block_memory, pieces, first, 0, present);
      if constexpr (Shared::tail_panels > 0) {
        if constexpr (!Shared::rows_are_whole) find_pieces(pieces, first, parts.rest);
        copy<1, Shared::tail_pieces>(tail_memory, pieces, first, Shared::rows_are_whole ? rest_offset() : 0, present);
      }
    }
    ptx::mbarrier_arrive_after_copies(ptx::shared_address(&this->shared.loaded[slot]));
  }

 private:
  FP_DEVICE static int warp() { return static_cast<int>(threadIdx.x / 32); }

  // From a row's first byte to its tail, if both are in one view.
  FP_DEVICE int rest_offset() const {
    const LatentParts first = Base::Format::find(this->params, CacheSlot{0, 0});
    return static_cast<int>(first.rest - first.quantised);
  }
  // The addresses of the lane's pieces of 16 bytes, one in each of several groups of rows: a copy holds the registers
  // of its address until the memory pipeline takes it.
  FP_DEVICE static void find_pieces(u64 (&pieces)[together], int first, const u8* mine) {
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int finder = (first + i) * 4 + Base::lane() / 8;
      pieces[i] = __shfl_sync(0xffffffff, reinterpret_cast<u64>(mine), finder) + Base::lane() % 8 * 16;
    }
  }
  // Copies panels of the rows that exist; others become zero. `per_row`: pieces that a row has in a panel.
  template <int panels, int per_row>
  FP_DEVICE static void copy(u8* tile, const u64 (&pieces)[together], int first, int offset, u32 present) {
    const int own = Base::lane() / 8, piece = Base::lane() % 8;
    const u32 to = ptx::shared_address(tile) + Block::chunk_offset(warp() * rows + own, piece);
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int row = (first + i) * 4;                             // after the lane's first one
      const u32 here = (to ^ row % 8 * 16) + row * Block::stride;  // the swizzle repeats itself after eight rows
#pragma unroll
      for (int panel = 0; panel < panels; ++panel)
        if (per_row == 8 || piece < per_row)
          ptx::cp_async<16>(here + panel * Block::panel_bytes,
                            reinterpret_cast<const void*>(pieces[i] + offset + panel * 128),
                            (present >> (row + own) & 1) != 0);
    }
  }
};

// Loads boxes by the copy engine: a warp has half of the value columns, and the second one the tail, too. A lane holds
// the origin of one of 32 boxes.
template <class Traits>
struct E4m3Boxes {
  using Shared = E4m3Shared<Traits>;
  static constexpr int panels = Shared::panels / 2;  // of a warp
  static_assert(Shared::tail_panels == 0 || Shared::has_e4m3_tail, "a tail in another view of the cache");

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  const int box_shift;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  BoxOrigin found;

  FP_DEVICE E4m3Boxes(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps), box_shift(31 - __clz(params.box_tokens)) {}

  FP_DEVICE void open(const WidePlace& next) { place = &next; }

  FP_DEVICE void load(int block, u32 use) {
    const int boxes = Shared::tokens >> box_shift, first = block * boxes;
    if (first % 32 == 0) found = box_of_lane(params, *place, first, box_shift);
    const i32 left = place->place.unit.kv_end - place->first_token - block * Shared::tokens;
    const int present = min_of(boxes, (left + (1 << box_shift) - 1) >> box_shift);
    const bool has_tail = Shared::tail_panels > 0 && warp() == 1;
    const u32 slot = shared.block_ring.slot(use), full = shared.block_ring.full_barrier(use);
    // A unit's last block, if it has rows missing, completes `loaded`: the warp of scales clears these rows before it
    // arrives at the full barrier.
    const u32 barrier = left < Shared::tokens ? ptx::shared_address(&shared.loaded[slot]) : full;
    const u32 values = ptx::shared_address(shared.blocks[slot]) + warp() * panels * Shared::panel_bytes;
    const u32 tail = ptx::shared_address(shared.tails[slot]);
    shared.block_ring.wait_empty(use);
    if (barrier != full && ptx::elect_one()) ptx::mbarrier_arrive(full);
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect(barrier, present * (panels + has_tail) * 128 << box_shift);
    for (int box = 0; box < present; ++box) {
      const i32 page = __shfl_sync(0xffffffff, found.page, first + box);
      const i32 row = __shfl_sync(0xffffffff, found.row, first + box);
      if (ptx::elect_one()) {
        const u32 here = box * 128 << box_shift;
#pragma unroll
        for (int panel = 0; panel < panels; ++panel)
          ptx::tensor_copy(values + here + panel * Shared::panel_bytes, maps.k, barrier,
                           (warp() * panels + panel) * Shared::panel_columns, row, 0, page);
        if (has_tail) ptx::tensor_copy(tail + here, maps.v, barrier, 0, row, 0, page);
      }
      __syncwarp();
    }
  }

 private:
  FP_DEVICE static int warp() { return static_cast<int>(threadIdx.x / 32); }
};

// Arranges the scales of a block's tokens, and orders copies of single rows before the products that read them, so that
// the warps which issue these need not. Boxes need no order, but for a unit's last block, whose missing rows it clears.
template <class Traits>
struct E4m3Scales : E4m3Finder<Traits> {
  using Base = E4m3Finder<Traits>;
  using Shared = typename Base::Shared;
  using Format = typename Base::Format;
  static constexpr int groups = Shared::groups;
  static constexpr u32 one = 0x3f800000, exponent_bits = 0x7f800000;  // of fp32
  // The inverse of the largest power is a normal number; the inverse of the least one times probabilities in fp16 keeps
  // a row's sum finite.
  static constexpr u32 least_power = (127 - Shared::least_exponent) << 23, most_power = (127 + 126) << 23;

  static constexpr int ahead = Shared::scales_ahead;
  static constexpr int piece_bytes = Shared::rows_are_whole ? 4 * groups : 4;  // in which scales are aligned
  static constexpr bool has_gaps = Traits::kv_source == KvSource::selected;
  static_assert(ahead * 2 <= 32, "a bit for each row of a lane");

  i32 found[2];    // in the next block to be requested
  u32 exists = 0;  // a bit for each of the lane's rows that are requested, if there are gaps
  // A bit for each slot: the phase of its barrier `loaded`, which only blocks with rows missing use (boxes).
  u32 loaded_phases = 0;

  using Base::Base;

  FP_DEVICE void open(const WidePlace& next) {
    this->place = &next;
    if (next.blocks == 0) return;  // nobody would wait for the copies
    look_up(0);
#pragma unroll 1
    for (int block = 0; block < ahead; ++block) request(block);
  }

  // This warp is on the path from a block's arrival to its products, next to busy warps: what need not be done for each
  // block is done once.
  FP_DEVICE void load(int block, u32 use) {
    const u32 slot = this->shared.block_ring.slot(use);
    auto& to = this->shared.of_tokens[slot];
    const bool is_there[2] = {has_row(block, 0), has_row(block, 1)};
    ptx::cp_async_wait<ahead - 1>();
    this->shared.block_ring.wait_empty(use);
    if (has_scales()) {
      u32 scales[2][groups];
#pragma unroll
      for (int half = 0; half < 2; ++half) ptx::load_shared(scales[half], copies_of(block, half));
#pragma unroll
      for (int half = 0; half < 2; ++half) arrange(to, scales[half], is_there[half], half);
    } else if (use < Shared::slots) {
      u32 scales[groups];
#pragma unroll
      for (u32& scale : scales) scale = __float_as_uint(Format::common_scale(this->params));
#pragma unroll
      for (int half = 0; half < 2; ++half) arrange(to, scales, true, half);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 present = __ballot_sync(0xffffffff, is_there[half]);
      if (Base::lane() == 0) to.present[half] = present;
    }
    if (use < Shared::slots && Base::lane() == 0) to.of_tail = Format::rest_scale(this->params);
    if constexpr (Shared::has_boxes) {
      clear_missing(block, slot);
    } else {
      ptx::mbarrier_wait(ptx::shared_address(&this->shared.loaded[slot]), use / Shared::slots & 1);
      ptx::fence_before_products();
    }
    ptx::mbarrier_arrive(this->shared.block_ring.full_barrier(use));
    request(block + ahead);
  }

 private:
  FP_DEVICE bool has_scales() const { return Format::has_scales(this->params); }
  FP_DEVICE bool has_row(int block, int half) const {
    if constexpr (has_gaps) return (exists >> (block % ahead * 2 + half) & 1) != 0;
    return this->token_of(block, half * 32) < this->place->place.unit.kv_end;
  }
  // Clears the rows after a unit's last token. Boxes also bring rows beyond it, and rows of boxes that are not loaded
  // keep what an earlier block left: both may hold NaN.
  FP_DEVICE void clear_missing(int block, u32 slot) {
    const i32 left = this->place->place.unit.kv_end - this->place->first_token - block * Shared::tokens;
    if (left >= Shared::tokens) return;
    const int lane = Base::lane();
    ptx::mbarrier_wait(ptx::shared_address(&this->shared.loaded[slot]), loaded_phases >> slot & 1);
    loaded_phases ^= 1u << slot;
    for (int row = left; row < Shared::tokens; ++row) {
      if (lane < Shared::panels * 8)
        ptx::store_shared(ptx::shared_address(this->shared.blocks[slot]) + Shared::Block::chunk_offset(row, lane), 0, 0,
                          0, 0);
      if (Shared::tail_panels > 0 && lane < 8)
        ptx::store_shared(ptx::shared_address(this->shared.tails[slot]) + Shared::Block::chunk_offset(row, lane), 0, 0,
                          0, 0);
    }
    ptx::fence_before_products();
  }
  FP_DEVICE void look_up(int block) {
    if (!has_gaps && !has_scales()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) found[half] = Base::look_up(block, half * 32);
  }
  // Begins to copy the scales of a block's rows, of those that exist: after a unit's last block no copy may be under
  // way when the next unit's begin. A lane reads the scales that it copied.
  FP_DEVICE void request(int block) {
    if (!has_gaps && !has_scales()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 bit = 1u << (block % ahead * 2 + half), to = copies_of(block, half);
      if (has_gaps) exists = found[half] >= 0 ? exists | bit : exists & ~bit;
      if (!has_scales() || found[half] < 0) continue;
      const LatentParts parts = this->find(block, half * 32, found[half]);
#pragma unroll
      for (int at = 0; at < 4 * groups; at += piece_bytes)
        ptx::cp_async<piece_bytes>(to + at, reinterpret_cast<const u8*>(parts.scales) + at, true);
    }
    ptx::cp_async_commit();
    look_up(block + 1);
  }
  FP_DEVICE u32 copies_of(int block, int half) const {
    return ptx::shared_address(this->shared.copied_scales[block % ahead][half * 32 + Base::lane()]);
  }
  // Writes the scales of half of a block, and the power of each step: that of its largest scale over all groups of
  // columns. Missing tokens have scales of 0, which raise no power.
  FP_DEVICE static void arrange(typename Shared::Tokens& to, const u32 (&scales)[groups], bool is_there, int half) {
    u32 largest = 0;
#pragma unroll
    for (const u32 scale : scales) largest = max_of(largest, is_there ? scale & exponent_bits : 0);
    const bool is_first = Base::lane() < 16;
    const u32 of_first = ptx::warp_max(is_first ? largest : 0), of_second = ptx::warp_max(is_first ? 0 : largest);
    const u32 power = min_of(max_of(is_first ? of_first : of_second, least_power), most_power);
    const float inverse = __uint_as_float(2 * one - power);
    const int step = half * 2 + Base::lane() / 16, at = TokenOrder::index_of(half * 32 + Base::lane());
    if (Base::lane() % 16 == 0) {
      to.exponents[step] = static_cast<float>(static_cast<i32>(power >> 23) - 127);
      to.inverses[step] = inverse;
    }
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      const float scale = is_there ? __uint_as_float(scales[i]) : 0.f;
      to.scales[i][at] = scale;
      to.quotients[i][at] = static_cast<u16>(ptx::pack2<Half>(scale * inverse, 0.f));
    }
  }
};

template <class Traits>
struct E4m3Load {
  using Shared = E4m3Shared<Traits>;

  FP_DEVICE static void run(Shared& shared, const AttentionParams& params, const KvMaps& maps) {
    const WideUnits<Traits, Shared> units(shared, params);
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == WideRoles::plan_warp) return units.plan(WideQuery<Traits, Shared>(shared, params, maps));
    if (warp == Shared::scales_warp) return units.load_blocks(E4m3Scales<Traits>(shared, params), false);
    if constexpr (Shared::has_boxes) {
      units.load_blocks(E4m3Boxes<Traits>(shared, params, maps), warp == 0);
    } else {
      units.load_blocks(E4m3Rows<Traits>(shared, params), warp == 0);
    }
  }
};

}  // namespace flashpage
