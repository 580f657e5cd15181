// The roles of the warps of latent_decode_sm90, and the shared memory between them.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/tile/layout/slot_halves.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/load/copy.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/slotted_place.h"

namespace flashpage {

// Rows in fp8 have more loading warpgroups, which convert them: two of them, where few packed rows leave the registers.
template <int converters_>
struct LatentWarpsOf {
  static constexpr int slot_loaders = 2, publisher = 3;
  static constexpr int first_converter = 4, converters = converters_;
  static constexpr int loading = first_converter + converters;  // warpgroups, because setmaxnreg works on warpgroups
  static constexpr int team = 4;                                // a warpgroup, whose warps share the tokens of a slot
  static constexpr int teams = 2;                               // share the columns of a slot
  static constexpr int computing = team * teams;
  static constexpr int threads = 32 * (loading + computing);
  static constexpr int place_arrivals = 32 + 1;  // the lanes' query copies, and the place
  // Registers of a thread. What all threads begin with is also the sum that they can divide.
  static constexpr int first_registers = 65536 / threads / 8 * 8;
  static constexpr int loading_registers = converters == 0 ? 104 : converters == 4 ? 72 : 64;
  static constexpr int converting_registers = converters == 4 ? 136 : 72;
  static constexpr int computing_registers = converters == 0 ? 200 : converters == 4 ? 152 : 136;
  static_assert(4 * loading_registers + converters * converting_registers + computing * computing_registers <=
                (loading + computing) * first_registers);
};
template <class Traits>
using LatentWarps = LatentWarpsOf<!converts_latents<Traits> ? 0
                                  : Traits::tile_q <= 16    ? 8
                                                            : 4>;

// A unit's tokens, as the converting warps see them.
struct ConvertedUnit {
  i64 offset;  // of the request's page numbers
  i32 first_token, kv_end, slots;
  i32 first_length;  // first_length_of
  bool done;         // no unit is left; the other fields are undefined
};

template <class Traits>
struct LatentShared {
  using Cache = typename Traits::Cache;
  using Warps = LatentWarps<Traits>;
  static constexpr bool converts = converts_latents<Traits>;
  static constexpr int tokens = Traits::tile_kv;  // of one slot: rows of a product
  static constexpr int rows = Traits::tile_q;     // of a unit: columns of a product
  static constexpr bool is_selected = reads_lists<Traits::kv_source>;
  using Present = PresentTokens<Traits::kv_source>;
  // Tokens whose presence is noted together: the share of a loading warp.
  static constexpr int noted = tokens / (converts ? Warps::converters : Warps::slot_loaders);
  static constexpr int converted_ahead = 2, scale_bytes = 16;  // units; bytes of a row's scales, at most
  using Slot = SwizzledRows<Cache, Traits::head_dim_qk, tokens>;
  using QueryRows = SwizzledRows<Cache, Traits::head_dim_qk, rows>;
  using Probabilities = SwizzledRows<Cache, tokens, rows>;  // a row of q has the slot's tokens
  static constexpr int blocks = Traits::head_dim_vo / 64;   // of value columns: rows of a product
  static constexpr int slot_bytes = Slot::tile_bytes;
  static constexpr int places_ahead = QueryRows::tile_bytes <= 20480 && !converts ? 2 : 1;
  // Pieces of 16 bytes that each lane of a converting warp has in flight; for more rows memory has no room for more.
  static constexpr int pieces_ahead = !converts ? 0 : (rows <= 16 ? 96 : 44) / max_of(1, Warps::converters);
  static_assert(tokens == 64 && rows % 16 == 0 && Probabilities::panels == 1 && Slot::panel_columns == 64);
  static_assert(Traits::head_dim_vo % 128 == 0 && Traits::head_dim_qk % 16 == 0, "blocks of two teams, whole steps");
  static_assert(Traits::warps_q == 1 && Traits::warps_kv == Warps::team && Traits::warps_v == Warps::teams);

  // Issues a warp's copies of the unit's rows of q; offset(row) returns query_offset. Panels are filled up with zeros.
  FP_DEVICE static void load_query(u32 destination, const AttentionParams& params, const Unit& unit, int lane,
                                   auto&& offset) {
    constexpr int used = QueryRows::used_bytes / 16, chunks = QueryRows::panels * 8;
#pragma unroll 4
    for (int i = lane; i < rows * chunks; i += 32) {
      const int row = i / chunks, chunk = i % chunks;
      const Cache* from = static_cast<const Cache*>(params.q) + offset(row) + (chunk < used ? chunk * 8 : 0);
      ptx::cp_async<16>(destination + QueryRows::chunk_offset(row, chunk), from, row < unit.num_rows && chunk < used);
    }
  }

  alignas(1024) u8 slots[Traits::stages][slot_bytes];
  alignas(1024) u8 query[places_ahead][QueryRows::tile_bytes];
  alignas(1024) u8 probabilities[Probabilities::tile_bytes];
  alignas(128) float4 exchange[Warps::teams][rows / 8][32 * Warps::team];  // of each team's sums of scores
  i32 pages_ahead[Traits::loader == Loader::rows && !converts ? Traits::stages : 1][tokens];  // of LatentRows
  alignas(16) u8 scales[converts ? tokens : 1][scale_bytes];  // of the rows that are converted
  alignas(16) u8 arriving[max_of(1, Warps::converters)][max_of(1, pieces_ahead)][converts ? 32 : 1][16];  // pieces
  Present present[is_selected ? Traits::stages : 1][tokens / noted];                                      // of a slot
  float top[Warps::teams][Warps::team][rows];  // maxima of the warps' scores
  float sum[Warps::teams][Warps::team][rows];
  SlottedPlace places[places_ahead];
  ConvertedUnit converted[converted_ahead];
  SlotRing<Traits::stages> ring;
  SlotRing<places_ahead> place_ring;
  SlotRing<converted_ahead> converted_ring;
};

template <class Traits>
struct LatentFits {
  static constexpr bool value = sizeof(LatentShared<Traits>) <= cta_shared_bytes(1);
};

// Given with as many slots as fit, at most Given::stages.
template <class Given>
struct LatentStages {
  using Traits = WithStages<Given, fitting_stages<LatentFits, Given, Given::stages, 1, 2>()>;
};

}  // namespace flashpage
