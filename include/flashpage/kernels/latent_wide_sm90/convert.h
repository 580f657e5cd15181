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

// A CTA converts its tokens of a block in passes of 32, of which a warp has eight. Four lanes have a token, each 16
// numbers of every panel of 64 columns. A lane copies its numbers by cp.async and reads no others, so that it waits for
// the oldest copies alone: when they are converted, their place receives those of the next pass. Tokens are looked up a
// pass before that.
template <class Traits>
struct WideConvert {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Rows = KvRows<Traits::kv_source>;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  static constexpr KvSource source = Traits::kv_source;
  static constexpr int warps = Shared::loaders, passes = Shared::passes, of_warp = 32 / warps;  // tokens, in a pass
  static constexpr int quarters = 4, panels = Shared::quarter_panels, rest_panel = Shared::value_panels - 1;
  static constexpr int copied_bytes = of_warp * Tile::stride;  // of a panel, by a warp in a pass
  static_assert(of_warp == 8 && panels == 2 && Shared::pieces_ahead == quarters * panels + 1);
  static_assert(is_same<Format, DeepseekV4Latent<Traits>>, "numbers of 16 bits follow a row's e4m3 as its last panel");

  // Of the lane's token in a pass.
  struct Token {
    uint2 exponents;  // a byte for each panel
    u32 present;      // bits: which of the warp's tokens exist, and which of eight tokens of the other CTA
  };

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  Token arriving;
  i32 found, found_of_peer;  // entries of the pass after `arriving`

  FP_DEVICE WideConvert(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    if (place->blocks == 0) return;
    look_up(0);
    u64 row;
    arriving = locate(0, row);
    look_up(1);
    request<0>(row);
    request<1>(row);
  }

  FP_DEVICE void load(int block, u32 use) {
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const int number = block * passes + pass;
      const bool has_next = number + 1 < place->blocks * passes;
      u64 row;
      const Token next = locate(number + 1, row);
      look_up(number + 2);
      convert_half<0>(use, pass, has_next, row);
      convert_half<1>(use, pass, has_next, row);
      arriving = next;
    }
  }

  // Loads this CTA's rows of Q, of which each warp has a part; rows that do not exist become zero.
  FP_DEVICE void load_query(const WidePlace& of_unit) const {
    constexpr int own = Shared::rows / warps, chunks = Tile::used_bytes / 16;
    const u32 use = of_unit.units_before;
    const int first = static_cast<int>(ptx::opaque(warp())) * own;  // or the compiler holds addresses from unit to unit
    const i32 count = of_unit.place.unit.num_rows - Shared::first_row();
    const i32 lane_row = Shared::first_row() + first + lane() % own;
    const u64 mine = reinterpret_cast<u64>(static_cast<const Cache*>(params.q) +
                                           query_offset(params, of_unit.place.item, of_unit.place.unit, lane_row));
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
  FP_DEVICE static u32 lane() { return ptx::opaque(threadIdx.x % 32); }
  FP_DEVICE static int warp() { return static_cast<int>(threadIdx.x / 32); }
  // The warp's first token of a pass, in a block.
  FP_DEVICE static int first_token(int pass) {
    const int rank = Shared::shares_blocks ? static_cast<int>(ptx::cluster_rank()) : 0;
    return rank * 32 + pass * 32 + warp() * of_warp;
  }
  // The lane's token in a pass. `number` counts the passes of a unit, here and below.
  FP_DEVICE i32 token_of(int number) const {
    return place->first_token + number / passes * Shared::tokens + first_token(number % passes) +
           static_cast<int>(lane() / 4);
  }
  // The token of a block that the other CTA converts, for each of eight lanes.
  FP_DEVICE i32 token_of_peer(int block) const {
    return place->first_token + block * Shared::tokens + (first_token(0) ^ 32) + static_cast<int>(lane() % of_warp);
  }
  FP_DEVICE i32 last_token() const { return place->place.unit.kv_end - 1; }

  // Entries of tokens past the unit's end are those of its last one. Nothing here depends on an entry, because it would
  // be waited for.
  FP_DEVICE void look_up(int number) {
    const Rows rows(params, place->place.item);
    found = rows.look_up(min_of(token_of(number), last_token()));
    if constexpr (looks_up_peer) found_of_peer = rows.look_up(min_of(token_of_peer(number), last_token()));
  }
  static constexpr bool looks_up_peer = Shared::shares_blocks && Shared::is_selected;
  FP_DEVICE bool exists(i32 entry, i32 token) const {
    return entry >= 0 && token <= last_token() && is_used<source>(params, token, place->first_length);
  }
  // Finds the lane's token of a pass: `row`, the address of its numbers in the first panel, or 0.
  FP_DEVICE Token locate(int number, u64& row) const {
    const i32 token = token_of(number);
    const bool is_there = exists(found, token);
    const LatentParts parts = Rows(params, place->place.item)
                                  .template parts<Format>(params, is_there ? found : 0, min_of(token, last_token()));
    row = is_there ? reinterpret_cast<u64>(parts.quantised) + lane() % 4 * 16 : 0;
    u32 present = __ballot_sync(0xffffffff, is_there);
    if constexpr (Shared::is_selected) {
      present &= 0x11111111;  // bits of the first lanes of eight tokens become neighbours, four at a time
      present = (present | present >> 3 | present >> 6 | present >> 9) & 0x000f000f;
      present = (present | present >> 12) & 0xff;
    }
    if constexpr (looks_up_peer)
      present |= (__ballot_sync(0xffffffff, exists(found_of_peer, token_of_peer(number))) & 0xff) << 8;
    return {*reinterpret_cast<const uint2*>(parts.scales), present};  // scales of some row, if there is no token
  }

  FP_DEVICE u32 own_place(int i) const { return ptx::shared_address(shared.arriving[i][warp()][threadIdx.x % 32]); }
  FP_DEVICE static constexpr int panel_of(int quarter, int i) { return Shared::panel_of_quarter(quarter) + i; }

  // Requests the numbers of two quarters, in a group of their own. Rows that do not exist become zero.
  template <int half>
  FP_DEVICE void request(u64 row) const {
    const bool is_there = row != 0;
    const u64 from = is_there ? row : reinterpret_cast<u64>(params.k.data);
#pragma unroll
    for (int i = 0; i < 2 * panels; ++i) {
      const int panel = panel_of(half * 2 + i / panels, i % panels);
      // A lane has 32 bytes of the last panel, and 16 of others.
      const u64 here = from + panel * 64 + (panel == rest_panel ? lane() % 4 * 16 : 0);
      ptx::cp_async<16>(own_place(half * 2 * panels + i), reinterpret_cast<const void*>(here), is_there);
      if (panel == rest_panel)
        ptx::cp_async<16>(own_place(quarters * panels), reinterpret_cast<const void*>(here + 16), is_there);
    }
    ptx::cp_async_commit();
  }

  // Converts two quarters, after which they are fenced and passed on: a fence takes as long as to convert one.
  template <int half>
  FP_DEVICE void convert_half(u32 use, int pass, bool has_next, u64 row) const {
    ptx::cp_async_wait<1>();
    convert_quarter<half * 2>(use, pass);
    convert_quarter<half * 2 + 1>(use, pass);
    if (half == 0 && Shared::is_selected) write_present(use, pass);
    ptx::fence_before_products();
    if constexpr (Shared::shares_blocks) __syncwarp();
    pass_on(shared.kept_quarter(half * 2, use), pass);
    pass_on(shared.kept_quarter(half * 2 + 1, use), pass);
    if (has_next) {
      request<half>(row);
    } else {
      ptx::cp_async_commit();
    }
  }

  template <int quarter>
  FP_DEVICE void convert_quarter(u32 use, int pass) const {
    const WideQuarter at = shared.kept_quarter(quarter, use);
    if (pass == 0) ptx::mbarrier_wait(ptx::shared_address(at.empty), at.phase ^ 1);
    u32 words[panels][4];
#pragma unroll
    for (int i = 0; i < panels; ++i) ptx::load_shared(words[i], own_place(quarter * panels + i));
    const u32 to = ptx::shared_address(at.memory) + Tile::chunk_offset(first_token(pass) + lane() / 4, lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      if (panel_of(quarter, i) == rest_panel) {
        write_rest(words[i], to + i * Tile::panel_bytes);
      } else {
        const u32 exponents = panel_of(quarter, i) < 4 ? arriving.exponents.x : arriving.exponents.y;
        write_numbers(words[i], exponents >> panel_of(quarter, i) % 4 * 8 & 0xff, to + i * Tile::panel_bytes);
      }
    }
  }
  FP_DEVICE static void store(u32 to, const u32 (&pairs)[4]) {
    ptx::store_shared(to, pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // Eight lanes have neighbouring rows, so that their chunks are in all banks.
  FP_DEVICE static void write_numbers(const u32 (&words)[4], u32 exponent, u32 to) {
    if constexpr (is_same<Cache, Bf16>) {
      u32 pairs[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) widen4_by(words[i], exponent, pairs[i / 2][i % 2 * 2], pairs[i / 2][i % 2 * 2 + 1]);
      store(to, pairs[0]);
      store(to ^ 16, pairs[1]);
    } else {
      // A token that is not there has numbers of 0 and a scale of some row, which may hold anything: no scale is
      // infinite, as 0 times it would be NaN.
      const float scale = latent_scale(PowerOfTwo{static_cast<u8>(min_of(exponent, 254u))});
      store_widened<Cache>(words, false, scale, [=](u32 i, const u32(&pairs)[4]) { store(to ^ i * 16, pairs); });
    }
  }
  // Sixteen numbers of 16 bits.
  FP_DEVICE void write_rest(const u32 (&words)[4], u32 to) const {
    u32 first[4] = {words[0], words[1], words[2], words[3]}, second[4];
    ptx::load_shared(second, own_place(quarters * panels));
    if constexpr (!is_same<Cache, Bf16>) {
      scale_pairs<Cache, Bf16>(first, 1.f);
      scale_pairs<Cache, Bf16>(second, 1.f);
    }
    store(to, first);
    store(to ^ 16, second);
  }
  // Tells the scoring warps which tokens of a list's block exist: four in a byte.
  FP_DEVICE void write_present(u32 use, int pass) const {
    if (lane() != 0) return;
    u8(&groups)[Shared::row_groups] = shared.present[Shared::slot(use)];
    const int first = first_token(pass) / Shared::group_rows;
    groups[first] = arriving.present & 15, groups[first + 1] = arriving.present >> 4 & 15;
    if constexpr (looks_up_peer)
      groups[first ^ 8] = arriving.present >> 8 & 15, groups[(first ^ 8) + 1] = arriving.present >> 12 & 15;
  }
  // Signals that the warp's rows of a quarter are written and fenced, and brings them to the other CTA.
  FP_DEVICE void pass_on(const WideQuarter& at, int pass) const {
    const u32 full = ptx::shared_address(at.full);
    if constexpr (!Shared::shares_blocks) return ptx::mbarrier_arrive(full);
    if (lane() != 0) return ptx::mbarrier_arrive(full);
    const u32 rank = ptx::cluster_rank() ^ 1, there = ptx::peer_address(full, rank);
    const u32 here = ptx::shared_address(at.memory) + first_token(pass) * Tile::stride;
    const u32 to = ptx::peer_address(here, rank);
#pragma unroll
    for (int i = 0; i < panels; ++i)
      ptx::copy_to_peer(to + i * Tile::panel_bytes, here + i * Tile::panel_bytes, copied_bytes, there);
    ptx::mbarrier_arrive_expect(full, panels * copied_bytes);  // of the other CTA's warp
  }
};

}  // namespace flashpage
