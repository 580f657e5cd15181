// The loading warps of latent_wide_sm90 over rows of DeepSeek V4: each copies rows to memory of its own, and writes
// them to blocks in the type of the products.
//
// The two CTAs of a pair read the same tokens for 64 packed rows each. Each converts half of a block's tokens, and the
// copy engine brings them to the other CTA's shared memory, so that each number is converted once.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/peer_copy.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

// A CTA converts its tokens of a block in passes of 32, of which a warp has eight. A lane has two tokens of them, and
// of each quarter of the columns 16 numbers of both. It copies these by cp.async and reads no others, so that it waits
// for the oldest copies alone: when they are converted, their place receives those of the next pass. Tokens are looked
// up a pass before that.
template <class Traits>
struct WideConvert {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  static constexpr int warps = Shared::loaders, passes = Shared::passes, of_warp = 32 / warps;  // tokens, in a pass
  static constexpr int of_lane = 2, quarters = 4;
  static constexpr int copied_rows_bytes = of_warp * Tile::stride;  // of a panel, by a warp in a pass
  static_assert(of_warp == 8 && Shared::quarter_panels == 2, "eight lanes have 128 bytes of two panels");
  static_assert(Format::quantised + 64 == Traits::head_dim_vo && Format::rest == 64 && Format::scale_columns == 64);
  static_assert(is_same<typename Format::Scale, PowerOfTwo> && is_same<typename Format::Rest, Bf16>);

  // What a lane knows of its two tokens of a pass: exponents of its panel of each quarter, and which tokens exist.
  struct Pass {
    u32 exponents[of_lane];
    u32 present;  // bits of eight tokens of the warp, and of the eight tokens of the other CTA that it looks up
  };

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  Pass arriving;
  i32 found[of_lane], found_of_peer;  // entries of the pass after `arriving`; negative: there is none

  FP_DEVICE WideConvert(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    if (place->blocks == 0) return;
    look_up(0);
    u64 from[of_lane], rest[of_lane];
    arriving = locate(0, from, rest);
    look_up(1);
#pragma unroll
    for (int quarter = 0; quarter < quarters; ++quarter) request(quarter, from, rest);
  }

  FP_DEVICE void load(int block, u32 use) {
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const int number = block * passes + pass;
      const bool has_next = number + 1 < place->blocks * passes;
      u64 from[of_lane], rest[of_lane];
      const Pass next = locate(number + 1, from, rest);
      look_up(number + 2);
      convert_quarter<0>(use, pass, has_next, from, rest);
      convert_quarter<1>(use, pass, has_next, from, rest);
      convert_quarter<2>(use, pass, has_next, from, rest);
      convert_quarter<3>(use, pass, has_next, from, rest);
      arriving = next;
    }
  }

  // Loads this CTA's rows of Q, of which each warp has a part; rows that do not exist become zero.
  FP_DEVICE void load_query(const WidePlace& of_unit) const {
    constexpr int own = Shared::rows / warps, chunks = Tile::used_bytes / 16;
    const u32 use = of_unit.units_before;
    const int first = warp() * own;
    const i32 count = of_unit.place.unit.num_rows - Shared::first_row();
    const u64 mine = reinterpret_cast<u64>(
        static_cast<const Cache*>(params.q) +
        query_offset(params, of_unit.place.item, of_unit.place.unit, Shared::first_row() + first + lane() % own));
    shared.query_ring.wait_empty(use);
    const u32 to = ptx::shared_address(shared.query);
#pragma unroll 2
    for (int i = 0; i < own; ++i) {
      const u64 from = __shfl_sync(0xffffffff, mine, i);
#pragma unroll
      for (int chunk = 0; chunk < chunks; chunk += 32)
        ptx::cp_async<16>(to + Tile::chunk_offset(first + i, chunk + lane()),
                          reinterpret_cast<const void*>(from + (chunk + lane()) * 16), first + i < count);
    }
    ptx::mbarrier_arrive_after_copies(shared.query_ring.full_barrier(use));
  }

 private:
  FP_DEVICE static int lane() { return static_cast<int>(ptx::opaque(threadIdx.x % 32)); }
  FP_DEVICE static int warp() { return static_cast<int>(threadIdx.x / 32); }
  FP_DEVICE static int in_row() { return lane() % 8; }      // the lane's 16 numbers among those of a quarter
  FP_DEVICE static bool is_odd() { return in_row() >= 4; }  // whether they are in the quarter's second panel
  FP_DEVICE static int first_token(int pass) {              // of this CTA's warp, in a block
    const int rank = Shared::shares_blocks ? static_cast<int>(ptx::cluster_rank()) : 0;
    return rank * 32 + pass * 32 + warp() * of_warp;
  }

  // The entry of a token of the unit; negative: there is none. Without a branch, after which the compiler would wait.
  FP_DEVICE i32 look_up_at(i32 token) const {
    const i32 last = place->place.unit.kv_end - 1;
    const i32 entry = Rows(params, place->place.item).look_up(min_of(token, last));
    return token <= last ? entry : -1;
  }
  FP_DEVICE i32 token_of(int number, int i) const {
    return place->first_token + number / passes * Shared::tokens + first_token(number % passes) + i * 4 + lane() / 8;
  }
  FP_DEVICE void look_up(int number) {
#pragma unroll
    for (int i = 0; i < of_lane; ++i) found[i] = look_up_at(token_of(number, i));
    if constexpr (Shared::shares_blocks && Shared::is_selected) {
      const int of_block = first_token(0) ^ 32;
      found_of_peer = look_up_at(place->first_token + number * Shared::tokens + of_block + lane() % of_warp);
    }
  }
  // Where the lane's numbers of a pass are, in the first quarter, and its numbers of the last panel.
  FP_DEVICE Pass locate(int number, u64 (&from)[of_lane], u64 (&rest)[of_lane]) const {
    Pass pass{};
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const bool exists = found[i] >= 0;
      const i32 token = min_of(token_of(number, i), place->place.unit.kv_end - 1);
      const LatentParts parts =
          Rows(params, place->place.item).template parts<Format>(params, max_of(found[i], 0), token);
      from[i] = exists ? reinterpret_cast<u64>(parts.quantised) + in_row() * 16 : 0;
      rest[i] = exists ? reinterpret_cast<u64>(parts.rest) + in_row() % 4 * 32 : 0;
      // The panels of a lane in the order of quarters are 0, 4, 2 and 6, or those after them.
      const uint2 bytes = *reinterpret_cast<const uint2*>(parts.scales);  // of some row, if there is no token
      pass.exponents[i] = exists ? ptx::byte_permute(bytes.x, bytes.y, is_odd() ? 0x7351 : 0x6240) : 0;
      const u32 present = __ballot_sync(0xffffffff, exists);  // bits of lanes 0, 8, 16 and 24 are four tokens
      pass.present |= (present & 1 | present >> 7 & 2 | present >> 14 & 4 | present >> 21 & 8) << i * 4;
    }
    if constexpr (Shared::shares_blocks && Shared::is_selected)
      pass.present |= (__ballot_sync(0xffffffff, found_of_peer >= 0) & 0xff) << 8;
    return pass;
  }

  FP_DEVICE u8* own_place(int i) const { return shared.arriving[i][warp()][threadIdx.x % 32]; }
  // Places of a quarter's numbers follow each other; after all of them come the second pieces of the last panel.
  FP_DEVICE static constexpr int second_piece(int i) { return quarters * of_lane + i; }
  FP_DEVICE static bool has_rest(int quarter) { return quarter == quarters - 1 && is_odd(); }

  // Requests a quarter's numbers, in a group of their own. Rows that do not exist become zero.
  FP_DEVICE void request(int quarter, const u64 (&from)[of_lane], const u64 (&rest)[of_lane]) const {
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const bool exists = from[i] != 0;
      const u64 any = reinterpret_cast<u64>(params.k.data);
      const u64 first = has_rest(quarter) ? rest[i] : from[i] + Shared::panel_of_quarter(quarter) * 64;
      const u32 to = ptx::shared_address(own_place(quarter * of_lane + i));
      ptx::cp_async<16>(to, reinterpret_cast<const void*>(exists ? first : any), exists);
      if (has_rest(quarter))
        ptx::cp_async<16>(ptx::shared_address(own_place(second_piece(i))),
                          reinterpret_cast<const void*>(exists ? first + 16 : any), exists);
    }
    ptx::cp_async_commit();
  }

  template <int quarter>
  FP_DEVICE void convert_quarter(u32 use, int pass, bool has_next, const u64 (&from)[of_lane],
                                 const u64 (&rest)[of_lane]) const {
    const WideQuarter at = shared.kept_quarter(quarter, use);
    if (pass == 0) ptx::mbarrier_wait(ptx::shared_address(at.empty), at.phase ^ 1);
    ptx::cp_async_wait<quarters - 1>();
    u32 words[of_lane][4];
#pragma unroll
    for (int i = 0; i < of_lane; ++i) ptx::load_shared(words[i], ptx::shared_address(own_place(quarter * of_lane + i)));
    // Lanes of both panels write their two chunks in different orders, so that eight lanes write to all banks.
    const int row = first_token(pass) + lane() / 8, chunk = in_row() % 4 * 2 + is_odd();
    const u32 to = ptx::shared_address(at.memory) + is_odd() * Tile::panel_bytes + Tile::chunk_offset(row, chunk);
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const u32 of_token = (to ^ i * 4 * 16) + i * 4 * Tile::stride;
      if (has_rest(quarter)) {
        write_rest(words[i], i, of_token);
      } else {
        write_numbers(words[i], arriving.exponents[i] >> quarter * 8 & 0xff, of_token);
      }
    }
    if (quarter == 0 && Shared::is_selected) write_present(use, pass);
    if (has_next) {
      request(quarter, from, rest);
    } else {
      ptx::cp_async_commit();
    }
    pass_on(at, pass);
  }
  FP_DEVICE static void store(u32 to, const u32 (&pairs)[4]) {
    ptx::store_shared(to, pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  FP_DEVICE static void write_numbers(const u32 (&words)[4], u32 exponent, u32 to) {
    const bool turned = is_odd();
    if constexpr (is_same<Cache, Bf16>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 pairs[4];
        const bool second = (half == 1) != turned;
        widen4_by(second ? words[2] : words[0], exponent, pairs[0], pairs[1]);
        widen4_by(second ? words[3] : words[1], exponent, pairs[2], pairs[3]);
        store(to ^ half * 16, pairs);
      }
    } else {
      store_widened<Cache>(words, turned, latent_scale(PowerOfTwo{static_cast<u8>(exponent)}),
                           [=](u32 half, const u32(&pairs)[4]) { store(to ^ half * 16, pairs); });
    }
  }
  // Sixteen numbers of 16 bits; the second eight of them come first, as the panel is an odd one.
  FP_DEVICE void write_rest(const u32 (&words)[4], int i, u32 to) const {
    u32 second[4], first[4] = {words[0], words[1], words[2], words[3]};
    ptx::load_shared(second, ptx::shared_address(own_place(second_piece(i))));
    if constexpr (!is_same<Cache, Bf16>) {
      scale_pairs<Cache, Bf16>(first, 1.f);
      scale_pairs<Cache, Bf16>(second, 1.f);
    }
    store(to, second);
    store(to ^ 16, first);
  }
  // Tells the scoring warps which tokens of a list's block exist: four in a byte.
  FP_DEVICE void write_present(u32 use, int pass) const {
    if (lane() != 0) return;
    u8(&groups)[Shared::row_groups] = shared.present[Shared::slot(use)];
    const int first = first_token(pass) / Shared::group_rows;
    groups[first] = arriving.present & 15, groups[first + 1] = arriving.present >> 4 & 15;
    if constexpr (Shared::shares_blocks)
      groups[first ^ 8] = arriving.present >> 8 & 15, groups[(first ^ 8) + 1] = arriving.present >> 12 & 15;
  }
  // Signals that the warp's rows of a quarter are written, and brings them to the other CTA.
  FP_DEVICE void pass_on(const WideQuarter& at, int pass) const {
    const u32 full = ptx::shared_address(at.full);
    ptx::fence_before_products();
    if constexpr (!Shared::shares_blocks) return ptx::mbarrier_arrive(full);
    __syncwarp();
    if (lane() != 0) return ptx::mbarrier_arrive(full);
    const u32 rank = ptx::cluster_rank() ^ 1, there = ptx::peer_address(full, rank);
#pragma unroll
    for (int panel = 0; panel < Shared::quarter_panels; ++panel) {
      const u32 here = ptx::shared_address(at.memory) + panel * Tile::panel_bytes + first_token(pass) * Tile::stride;
      ptx::copy_to_peer(ptx::peer_address(here, rank), here, copied_rows_bytes, there);
    }
    ptx::mbarrier_arrive_expect(full, Shared::quarter_panels * copied_rows_bytes);  // of the other CTA's warp
  }
};

}  // namespace flashpage
