// The loading warps of latent_e4m3_sm90: one goes through the plan and loads Q, two copy rows as they are stored, and
// one reads and arranges the rows' scales.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/shared.h"
#include "flashpage/kernels/wide_query.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

// Looks up 32 rows, half of a block's, a lane each.
template <class Traits>
struct E4m3Finder {
  using Shared = E4m3Shared<Traits>;
  using Format = typename Shared::Format;
  using Rows = KvRows<Traits::kv_source>;
  static constexpr int rows = 32;
  static_assert(Shared::tokens == 2 * rows);

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers

  FP_DEVICE E4m3Finder(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE static int lane() { return static_cast<int>(threadIdx.x % 32); }

  // The page, or list entry, of the lane's row in half of a block; negative: there is none.
  FP_DEVICE i32 look_up(int block, int half) const {
    const i32 token = token_of(block, half);
    return token < place->place.unit.kv_end ? Rows(params, place->place.item.kv_offset).look_up(token) : -1;
  }
  // The addresses of that row's parts; those of some other row if there is none.
  FP_DEVICE LatentParts find(int block, int half, i32 found) const {
    const Rows all(params, place->place.item.kv_offset);
    return Format::find(params, all.slot(max_of(found, 0), token_of(block, half)));
  }

 private:
  FP_DEVICE i32 token_of(int block, int half) const {
    return place->first_token + block * Shared::tokens + half * rows + lane();
  }
};

// Copies rows: a warp has half of a block's. Eight lanes copy 128 bytes of a row at a time.
template <class Traits>
struct E4m3Rows : E4m3Finder<Traits> {
  using Base = E4m3Finder<Traits>;
  using Shared = typename Base::Shared;
  using Block = typename Shared::Block;
  static constexpr int row_groups = Base::rows / 4;  // of four rows
  static constexpr int together = 4;                 // groups whose addresses are in registers at the same time
  static_assert(Shared::loaders == 2);

  i32 found;  // in the next block

  using Base::Base;

  FP_DEVICE void open(const WidePlace& next) {
    this->place = &next;
    found = this->look_up(0, warp());
  }

  FP_DEVICE void load(int block, u32 use) {
    const u32 slot = this->shared.block_ring.slot(use);
    const u32 present = __ballot_sync(0xffffffff, found >= 0);
    const LatentParts parts = this->find(block, warp(), found);
    found = this->look_up(block + 1, warp());
    this->shared.block_ring.wait_empty(use);
    u8 *const block_memory = this->shared.blocks[slot], *const tail_memory = this->shared.tails[slot];
#pragma unroll
    for (int first = 0; first < row_groups; first += together) {
      u64 pieces[together];
      find_pieces(pieces, first, parts.quantised);
      copy<Shared::groups, 8>(block_memory, pieces, first, 0, present);
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
    const u32 to = ptx::shared_address(tile) + Block::chunk_offset(warp() * Base::rows + own, piece);
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

// Arranges the scales of a block's tokens, and orders the copies of its rows before the products that read them, so
// that the warps which issue these need not.
template <class Traits>
struct E4m3Scales : E4m3Finder<Traits> {
  using Base = E4m3Finder<Traits>;
  using Shared = typename Base::Shared;
  using Format = typename Base::Format;
  static constexpr int groups = Shared::groups;
  static constexpr u32 one = 0x3f800000, exponent_bits = 0x7f800000;  // of fp32
  // Inverses of powers are finite, and sums of probabilities, too.
  static constexpr u32 least_power = (127 - 64) << 23, most_power = (127 + 126) << 23;

  i32 found[2];           // in the block after the next one
  u32 scales[2][groups];  // of the next block
  u32 present[2];         // a bit for each of its rows

  using Base::Base;

  FP_DEVICE void open(const WidePlace& next) {
    this->place = &next;
    look_up(0);
    read_scales(0);
  }

  FP_DEVICE void load(int block, u32 use) {
    const u32 slot = this->shared.block_ring.slot(use);
    this->shared.block_ring.wait_empty(use);
    auto& to = this->shared.of_tokens[slot];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      arrange(to, scales[half], half);
      if (Base::lane() == 0) to.present[half] = present[half];
    }
    if (Base::lane() == 0) to.of_tail = Format::rest_scale(this->params);
    ptx::mbarrier_wait(ptx::shared_address(&this->shared.loaded[slot]), use / Shared::slots & 1);
    ptx::fence_before_products();
    ptx::mbarrier_arrive(this->shared.block_ring.full_barrier(use));
    read_scales(block + 1);
  }

 private:
  FP_DEVICE void look_up(int block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) found[half] = Base::look_up(block, half);
  }
  FP_DEVICE void read_scales(int block) {
    const u32 common = __float_as_uint(Format::common_scale(this->params));
    const bool has_scales = Format::has_scales(this->params);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = found[half] >= 0;
      const LatentParts parts = this->find(block, half, found[half]);
      present[half] = __ballot_sync(0xffffffff, exists);
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        scales[half][i] = exists ? common : 0;
        if (exists && has_scales) scales[half][i] = __ldg(reinterpret_cast<const u32*>(parts.scales) + i);
      }
    }
    look_up(block + 1);
  }
  FP_DEVICE static void arrange(typename Shared::Tokens& to, const u32 (&scales)[groups], int half) {
    u32 largest = 0;
#pragma unroll
    for (const u32 scale : scales) largest = max_of(largest, scale & exponent_bits);
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2)
      largest = max_of(largest, __float_as_uint(__shfl_xor_sync(0xffffffff, __uint_as_float(largest), distance)));
    const u32 power = min_of(max_of(largest, least_power), most_power);
    const float inverse = __uint_as_float(2 * one - power);
    const int step = half * 2 + Base::lane() / 16, at = TokenOrder::index_of(half * 32 + Base::lane());
    if (Base::lane() % 16 == 0) {
      to.exponents[step] = static_cast<float>(static_cast<i32>(power >> 23) - 127);
      to.inverses[step] = inverse;
    }
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      const float scale = __uint_as_float(scales[i]);
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
    units.load_blocks(E4m3Rows<Traits>(shared, params), warp == 0);
  }
};

}  // namespace flashpage
