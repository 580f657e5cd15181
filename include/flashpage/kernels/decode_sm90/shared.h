// The roles of the warps of decode_sm90, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/layout/slot_halves.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/load/slot_scales.h"
#include "flashpage/tile/load/slotted_place.h"
#include "flashpage/tile/merge/cluster_merge.h"
#include "flashpage/tile/rope/rotation.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

template <class Traits>
struct DecodeWarps {
  static constexpr int loading = 4;                               // a warpgroup, because setmaxnreg works on warpgroups
  static constexpr int team = Traits::warps_q * Traits::warps_v;  // warps that read the same slot
  static constexpr int teams = Traits::warps_kv;
  static constexpr int computing = team * teams;
  static constexpr int threads = 32 * (loading + computing);
  static constexpr int place_arrivals = 32 + 1;  // the lanes' query copies, and the place
  // Lanes that copy scales need more.
  static constexpr bool has_scales = StoredFormats<Traits>::has_scales;
  static constexpr int loading_registers = has_scales ? 120 : 104;
  static constexpr int computing_registers = computing == 12 ? 128 : has_scales ? 192 : 200;
  static_assert(computing == 8 || computing == 12);
};

template <class Traits>
struct DecodeShared {
  using S = Shape<Traits>;
  static constexpr int tokens = S::warp_tokens;  // of one slot
  static constexpr int loading_warps = DecodeWarps<Traits>::loading;
  static constexpr int key_bytes = SlotHalves<Traits, tokens>::First::tile_bytes;
  static constexpr int value_bytes = SlotHalves<Traits, tokens>::Second::tile_bytes;
  static constexpr int query_bytes = S::QueryRows::bytes(Traits::tile_q);
  // Units whose place and Q are loaded ahead of the computing warps: more if units may be short.
  static constexpr int places_ahead = query_bytes <= 4096 ? 4 : query_bytes <= 16384 ? 2 : 1;

  struct None {};
  using Rotations = typename select_type<S::rotate, RotationTable<Traits>, None>::type;
  // The mailbox serves units of few rows and columns. With RoPE, the rotation table leaves no room for it.
  static constexpr bool has_mailbox = Traits::tile_q <= 16 && Traits::head_dim_vo <= 256 && !S::rotate;
  using Mailbox = typename select_type<has_mailbox, ClusterMailbox, None>::type;

  static constexpr int slot_bytes = key_bytes + value_bytes;
  // A slot always belongs to the same team. Copies finish in any order, so a team that returned to another team's slot
  // could take a phase for the next one of the same parity.
  static_assert(Traits::stages % Traits::warps_kv == 0 && slot_bytes % 1024 == 0 && S::row_tiles == 1);

  static constexpr bool merges_in_launch = true;

  // Issues a warp's copies of the unit's rows of q; offset(row) returns query_offset.
  FP_DEVICE static void load_query(u32 destination, const AttentionParams& params, const Unit& unit, int lane,
                                   auto&& offset) {
    flashpage::load_query<Traits, 32>(destination, params, unit, lane, offset);
  }

  alignas(1024) u8 slots[Traits::stages][slot_bytes];
  // At a unit's end the teams exchange half an m16 tile at a time: a lane's columns of two n8 tiles are consecutive.
  alignas(128) float4 exchange[Traits::warps_kv][DecodeWarps<Traits>::team][S::value_tiles / 2][32];
  alignas(128) u8 query[places_ahead][query_bytes];
  i32 pages_ahead[Traits::loader == Loader::rows ? Traits::stages : 1][tokens];  // of DecodeRows
  alignas(16) float merge_sums[DecodeWarps<Traits>::computing][132];             // of ArrivalMerge
  alignas(16) float maximum[Traits::tile_q][Traits::warps_kv];
  alignas(16) float sum[Traits::tile_q][Traits::warps_kv];
  SlottedPlace places[places_ahead];
  SlotRing<Traits::stages> ring;
  SlotRing<places_ahead> place_ring;
  u64 cleared[Traits::warps_kv];  // barriers, one for the warps of each team
  u32 others_were_done;
  u32 is_last_piece;
  Rotations rotations;
  Mailbox mailbox;
  typename select_type<S::Formats::has_scales, SlotScales<Traits, tokens>, None>::type scales;
};

template <class Traits>
struct DecodeFits {
  static constexpr bool value = sizeof(DecodeShared<Traits>) <= cta_shared_bytes(1);
};

// The largest size of the ring. 128 KiB leave room for the buffer in which the teams exchange their states; with rings
// of 64 to 192 KiB the loads alone are equally fast (docs/tried.md).
inline constexpr int decode_ring_bytes = 128 << 10;

// The traits `Given` with as many slots as fit, but at most Given::stages. Each team has the same number, at least one.
template <class Given>
struct DecodeStages {
  static constexpr int teams = Given::warps_kv;
  static constexpr int slot_bytes = DecodeShared<WithStages<Given, teams>>::slot_bytes;
  static constexpr int most = min_of(Given::stages, decode_ring_bytes / slot_bytes) / teams * teams;
  using Traits = WithStages<Given, fitting_stages<DecodeFits, Given, most, teams, teams>()>;
};

}  // namespace flashpage
