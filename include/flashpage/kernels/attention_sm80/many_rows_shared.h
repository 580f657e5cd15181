// The shared memory of attention_sm80's loop over many rows.
#pragma once
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/load/format_rows.h"

namespace flashpage {

// The addresses of the tokens' scales, as those of their rows; empty if there are no formats.
template <class Traits, bool converts = has_formats<Traits>>
struct ScaleRows {};
template <class Traits>
struct ScaleRows<Traits, true> {
  alignas(16) const u8* key_scales[Traits::stages][Traits::tile_kv];
  alignas(16) const u8* value_scales[Traits::stages][Traits::tile_kv];
  i32 here;  // the number of the place that is computed: registers are few where rows are converted
};

template <class Traits>
struct ManyRowsShared : ScaleRows<Traits> {
  using S = Shape<Traits>;
  using Stored = StoredRows<Traits>;
  using Element = typename select_type<has_formats<Traits>, u8, typename S::Cache>::type;
  static constexpr int tokens = S::warp_tokens;
  static constexpr int slots = Traits::warps_kv * Traits::stages;  // of all groups of warps
  alignas(128) u8 query[S::QueryRows::bytes(Traits::tile_q)];
  alignas(128) u8 key[slots][Stored::key_bytes(tokens)];
  alignas(128) u8 value[slots][Stored::value_bytes(tokens)];
  alignas(128) u8 finished[Stored::finished_bytes(tokens)];  // rotated keys; converted keys and then values
  // The addresses of the tokens' rows, for as many tiles as there are stages.
  alignas(16) const Element* key_row[slots][tokens];
  alignas(16) const Element* value_row[slots][tokens];
  float scale[2];  // score_scale_of each of two places

  // The offsets of a unit's rows in q, computed once and not by every lane that uses them. They lie among the values,
  // whose copies begin after those of Q are issued; with more slots there is memory of their own.
  static constexpr int offset_bytes = Traits::tile_q * static_cast<int>(sizeof(i64));
  static constexpr bool has_offsets = slots > 1 || Stored::value_bytes(tokens) < offset_bytes;
  alignas(16) i64 offsets[has_offsets ? Traits::tile_q : 1];
  FP_DEVICE i64* query_offset() {
    if constexpr (has_offsets) return offsets;
    return reinterpret_cast<i64*>(value[0]);
  }
};

}  // namespace flashpage
