// The roles of the warps of latent_decode_sm90, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/slot_halves.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/copy.h"
#include "flashpage/tile/load/slotted_place.h"

namespace flashpage {

template <class Traits>
struct LatentWarps {
  static constexpr int loading = 4;  // a warpgroup, because setmaxnreg works on warpgroups
  static constexpr int slot_loaders = 2, publisher = 3;
  static constexpr int team = 4;  // a warpgroup, which multiplies whole slots
  static constexpr int teams = 2;
  // The teams alternate on the slots; or both multiply every slot, with other rows, or with other columns.
  static constexpr int token_teams = Traits::warps_kv, row_teams = Traits::warps_q, column_teams = Traits::warps_v;
  static constexpr int slot_teams = row_teams * column_teams;  // that read the same slot
  static_assert(token_teams * slot_teams == teams);
  // Experiment: the half of a slot that one loading warp fills is released while the other half is multiplied.
  static constexpr bool releases_halves = Traits::ring_bytes == 1;
  static constexpr int computing = team * teams;
  static constexpr int threads = 32 * (loading + computing);
  static constexpr int place_arrivals = 32 + 1;  // the lanes' query copies, and the place
  static constexpr int loading_registers = 104;
  static constexpr int computing_registers = 200;
};

template <class Traits>
struct LatentShared {
  using Cache = typename Traits::Cache;
  static constexpr int tokens = Traits::tile_kv;                 // of one slot: rows of a product
  static constexpr int rows = Traits::tile_q / Traits::warps_q;  // of a team: columns of a product
  static constexpr bool has_exchange = Traits::warps_q == 1;
  using Slot = SwizzledRows<Cache, Traits::head_dim_qk, tokens>;
  using QueryRows = SwizzledRows<Cache, Traits::head_dim_qk, Traits::tile_q>;
  using Probabilities = SwizzledRows<Cache, tokens, rows>;  // a row of q has the slot's tokens
  static constexpr int blocks = Traits::head_dim_vo / 64;   // of value columns: rows of a product
  static constexpr int slot_bytes = Slot::tile_bytes;
  static constexpr int places_ahead = QueryRows::tile_bytes <= 20480 ? 2 : 1;
  static_assert(tokens == 64 && rows % 16 == 0 && Probabilities::panels == 1 && Slot::panel_columns == 64);
  static_assert(Traits::head_dim_vo % 128 == 0 && Traits::head_dim_qk % 16 == 0, "blocks of two teams, whole steps");
  static_assert(Traits::stages % Traits::warps_kv == 0, "a slot always belongs to the same team");

  // Issues a warp's copies of the unit's rows of q; offset(row) returns query_offset. Panels are filled up with zeros.
  FP_DEVICE static void load_query(u32 destination, const AttentionParams& params, const Unit& unit, int lane,
                                   auto&& offset) {
    constexpr int used = QueryRows::used_bytes / 16, chunks = QueryRows::panels * 8;
#pragma unroll 4
    for (int i = lane; i < Traits::tile_q * chunks; i += 32) {
      const int row = i / chunks, chunk = i % chunks;
      const Cache* from = static_cast<const Cache*>(params.q) + offset(row) + (chunk < used ? chunk * 8 : 0);
      ptx::cp_async<16>(destination + QueryRows::chunk_offset(row, chunk), from, row < unit.num_rows && chunk < used);
    }
  }

  // Waits until the loading warp may fill its share of the slot.
  FP_DEVICE void wait_empty(u32 use, int warp) const {
    LatentWarps<Traits>::releases_halves&& warp > 0 ? second_half.wait_empty(use) : ring.wait_empty(use);
  }

  // Memory for ArrivalMerge, free at a unit's end; with row teams, until the next unit's first product.
  FP_DEVICE auto merge_sums() -> float (&)[LatentWarps<Traits>::computing][132] {
    using Sums = float[LatentWarps<Traits>::computing][132];
    static_assert(sizeof(Sums) <= (has_exchange ? sizeof(exchange) : sizeof(probabilities)));
    u8* memory = has_exchange ? reinterpret_cast<u8*>(exchange) : reinterpret_cast<u8*>(probabilities);
    return *reinterpret_cast<Sums*>(memory);
  }

  alignas(1024) u8 slots[Traits::stages][slot_bytes];
  alignas(1024) u8 query[places_ahead][QueryRows::tile_bytes];
  alignas(1024) u8 probabilities[LatentWarps<Traits>::teams][Probabilities::tile_bytes];
  // Token teams hand blocks of values over to each other at a unit's end, column teams their scores of each slot.
  alignas(128) float4 exchange[has_exchange ? 2 : 1][has_exchange ? rows / 8 : 1][has_exchange ? 128 : 1];
  i32 pages_ahead[Traits::loader == Loader::rows ? Traits::stages : 1][tokens];  // of LatentRows
  float top[LatentWarps<Traits>::teams][LatentWarps<Traits>::team][rows];        // maxima of the warps' scores
  float maximum[LatentWarps<Traits>::teams][rows];                               // of the teams' states
  float sum[LatentWarps<Traits>::teams][LatentWarps<Traits>::team][rows];
  SlottedPlace places[places_ahead];
  SlotRing<Traits::stages> ring;
  SlotRing<Traits::stages> second_half;  // only its empty barriers are used, if halves are released
  SlotRing<places_ahead> place_ring;
  u32 is_last_piece;
};

template <class Traits>
struct LatentFits {
  static constexpr bool value = sizeof(LatentShared<Traits>) <= cta_shared_bytes(1);
};

// Given with as many slots as fit, at most Given::stages: the same number for each team.
template <class Given>
struct LatentStages {
  static constexpr int step = Given::warps_kv;
  using Traits = WithStages<Given, fitting_stages<LatentFits, Given, Given::stages / step * step, step, 2>()>;
};

}  // namespace flashpage
