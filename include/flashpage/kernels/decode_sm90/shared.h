// What the warps of decode_sm90 share: who does what, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/merge/cluster_merge.h"
#include "flashpage/tile/rope/rotation.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

template <class Traits>
struct DecodeWarps {
  static constexpr int loading = 4;                               // a warpgroup: registers are given by warpgroups
  static constexpr int team = Traits::warps_q * Traits::warps_v;  // warps that read the same slot
  static constexpr int teams = Traits::warps_kv;
  static constexpr int computing = team * teams;
  static constexpr int threads = 32 * (loading + computing);
  static constexpr int place_arrivals = 32 + 1;  // the lanes' query copies, and the place itself
  static constexpr int loading_registers = 104;
  static constexpr int computing_registers = 200;
  static_assert(computing == 8);
};

// A unit on its way from the loading warps to the computing ones.
struct SlottedPlace {
  Place place;
  i32 first_token;  // of the first slot; it may lie before the unit's first token
  i32 slots;
  const MergeItem* merge;  // of a piece
  u32* arrivals;
  u32 others_are_done;  // all other pieces of the unit: seen shortly before this one ends
  u32 in_cluster;       // a piece whose others are those of the cluster's other CTAs, who merge it with this one
};

template <class Traits>
struct DecodeShared {
  using S = Shape<Traits>;
  static constexpr int tokens = S::warp_tokens;  // of one slot
  static constexpr int loading_warps = DecodeWarps<Traits>::loading;
  static constexpr int key_bytes = BlockRows<typename S::Cache, Traits::head_dim_qk, tokens>::tile_bytes;
  static constexpr int value_bytes = BlockRows<typename S::Cache, Traits::head_dim_vo, tokens>::tile_bytes;
  static constexpr int query_bytes = S::QueryRows::bytes(Traits::tile_q);
  // Units whose place and Q are known ahead of the computing warps: more where units may be short.
  static constexpr int places_ahead = query_bytes <= 4096 ? 4 : query_bytes <= 16384 ? 2 : 1;

  struct None {};
  using Turns = typename select_type<S::rotate, TurnTable<Traits>, None>::type;
  // For units of few enough rows and columns; beside a table of turns there is no room.
  static constexpr bool has_mailbox = Traits::tile_q == 16 && Traits::head_dim_vo <= 256 && !S::rotate;
  using Mailbox = typename select_type<has_mailbox, ClusterMailbox, None>::type;

  static constexpr int slot_bytes = key_bytes + value_bytes;
  // A slot always belongs to the same team: one that came back to a slot of another team could take the phase before
  // the last for the last one, since copies finish in any order.
  static_assert(Traits::stages % Traits::warps_kv == 0 && slot_bytes % 1024 == 0 && S::row_tiles == 1);

  alignas(1024) u8 slots[Traits::stages][slot_bytes];
  // At a unit's end the teams exchange half an m16 tile at a time: a lane's columns of two n8 tiles side by side.
  alignas(128) float4 exchange[Traits::warps_kv][DecodeWarps<Traits>::team][S::value_tiles / 2][32];
  alignas(128) u8 query[places_ahead][query_bytes];
  i32 pages_ahead[Traits::loader == Loader::rows ? Traits::stages : 1][tokens];  // RowLoader's
  alignas(16) float merge_sums[DecodeWarps<Traits>::computing][132];             // ArrivalMerge's
  alignas(16) float maximum[Traits::tile_q][Traits::warps_kv];
  alignas(16) float sum[Traits::tile_q][Traits::warps_kv];
  SlottedPlace places[places_ahead];
  SlotRing<Traits::stages> ring;
  SlotRing<places_ahead> place_ring;
  u64 cleared[Traits::warps_kv];  // a barrier for the warps of a team
  u32 others_were_done;
  u32 is_last_piece;
  Turns turns;
  Mailbox mailbox;
};

template <class Traits>
struct DecodeFits {
  static constexpr bool value = sizeof(DecodeShared<Traits>) <= cta_shared_bytes(1);
};

// What the slots take at most. A ring of 128 KiB leaves room for the buffer in which the teams exchange their states;
// with rings of 64 to 192 KiB the loads alone are equally fast (docs/tried.md).
inline constexpr int decode_ring_bytes = 128 << 10;

// Given with as many slots as fit, Given::stages at most: the same number for each team, and one at least.
template <class Given>
struct DecodeStages {
  static constexpr int teams = Given::warps_kv;
  static constexpr int slot_bytes = DecodeShared<WithStages<Given, teams>>::slot_bytes;
  static constexpr int most = min_of(Given::stages, decode_ring_bytes / slot_bytes) / teams * teams;
  using Traits = WithStages<Given, fitting_stages<DecodeFits, Given, most, teams, teams>()>;
};

}  // namespace flashpage
