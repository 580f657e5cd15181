// Element types and shapes of shared tiles that follow from a kernel's Traits.
#pragma once
#include "flashpage/tile/layout/narrow_rows.h"
#include "flashpage/tile/layout/piece_rows.h"
#include "flashpage/tile/layout/shared_rows.h"
#include "flashpage/tile/layout/stored_formats.h"
#include "flashpage/tile/layout/swizzled_rows.h"
#include "flashpage/tile/load/copy.h"

namespace flashpage {

template <class Traits>
struct Shape {
  using Query = typename Traits::Query;
  using Cache = typename Traits::Cache;
  using Formats = StoredFormats<Traits>;
  static constexpr bool rotate = Traits::position_encoding == PositionEncoding::rope;
  // K and V lie in swizzled panels, as the copy engine writes them; each warp of the token dimension has a tile of
  // `tile_kv` tokens of its own.
  static constexpr bool swizzled = Traits::layout == RowsLayout::swizzled || Traits::layout == RowsLayout::narrow;
  static constexpr bool latent = is_latent<Traits::kv_source>;  // V is the first columns of K's tile
  // The key type that the score product reads: the cache's own (swizzled: keys are rotated on their way to the tensor
  // cores), or rotated keys widened to the query's type.
  using Key = typename select_type<(rotate && !swizzled), Query, Cache>::type;
  // The bits of a number of such a key.
  static constexpr int key_bits = is_same<Key, Cache> ? Formats::key_bits : 8 * static_cast<int>(sizeof(Key));
  // fp8 keys are multiplied with fp16 queries, because one instruction widens two keys to fp16, where bf16 takes four.
  // This needs Q in registers, where it is scaled into fp16's range first (tile/load/half_query.h). Rotating keys takes
  // those registers, except for fp8 keys under bf16 queries, whose rotations are exact enough in fp16.
  static constexpr bool rotate_in_half = rotate && is_fp8<Cache> && is_same<Query, Bf16> && !Traits::Variant::has_logit;
  // A variant that loads for more than 16 tokens takes those registers too, because the loads are in flight at once.
  static constexpr bool loads_for_many = Traits::Variant::logit_loads_by_token && Traits::tile_kv > 16;
  static constexpr bool query_in_registers = Traits::head_dim_qk <= 128 && Traits::tile_q / Traits::warps_q <= 16 &&
                                             (!rotate || rotate_in_half) && !loads_for_many;
  // Whether the tensor cores multiply fp8 factors: queries, keys, probabilities and values.
  static constexpr bool fp8_products = is_fp8<Query>;
  static constexpr bool can_widen_query =
      !fp8_products && (swizzled || Traits::layout == RowsLayout::pieces) && query_in_registers;
  using Product = typename select_type<(key_bits < 16 && !fp8_products && can_widen_query), Half, Query>::type;
  // The type of probabilities: fp16 over fp8 values (exact for both formats), otherwise the query's type.
  using Probability = typename select_type<(Formats::value_bits < 16 && !fp8_products), Half, Query>::type;

  static constexpr int threads = 32 * Traits::warps_q * Traits::warps_v * Traits::warps_kv;  // threads that compute
  static constexpr int rows_a_warp = Traits::tile_q / Traits::warps_q;
  // Units of at most eight rows, whose products have their factors swapped (tile/product/swapped.h).
  static constexpr bool swaps = Traits::tile_q == 8;
  static constexpr int row_tiles = swaps ? 1 : rows_a_warp / 16;  // m16 tiles of one warp
  static constexpr int warp_tokens = swizzled ? Traits::tile_kv : Traits::tile_kv / Traits::warps_kv;
  // Steps of Q K^T: products of 16 terms, or 32 of fp8.
  static constexpr int key_steps = ceil_div(Traits::head_dim_qk, fp8_products ? 32 : 16);
  // Unrolling more steps takes registers; keys of 192 columns have twelve.
  static constexpr bool unrolls_keys =
      row_tiles * key_steps <= 8 || (!swizzled && warp_tokens <= 48 && key_steps <= 12);
  static constexpr int key_unroll = unrolls_keys ? key_steps : swizzled ? 4 : 8;

  // More than 256 value columns do not fit in registers. Neighbouring warps share them if tiles are swizzled (whole
  // panels) or latent. Otherwise the unit runs once for each part, and the last part overlaps the one before.
  static constexpr bool warps_share_columns = swizzled || latent;
  static constexpr int value_parts = warps_share_columns ? Traits::warps_v : ceil_div(Traits::head_dim_vo, 256);
  static constexpr int value_passes = warps_share_columns ? 1 : value_parts;
  static constexpr int value_columns = value_parts == 1 ? Traits::head_dim_vo
                                                        : round_up(ceil_div(Traits::head_dim_vo, value_parts),
                                                                   swizzled ? 1024 / Formats::value_bits : 16);
  static constexpr int value_tiles = round_up(value_columns, 16) / 8;  // n8 tiles of one warp's accumulator

  using QueryRows = SharedRows<Query, Traits::head_dim_qk>;
  template <class Element, int columns>
  using PitchedRows = typename select_type<swizzled, LineRows<Traits::layout, Element, columns, warp_tokens>,
                                           SharedRows<Element, columns>>::type;
  template <class Element, int columns>
  using Rows = typename select_type<Traits::layout == RowsLayout::pieces, PieceRows<Element, columns, warp_tokens>,
                                    PitchedRows<Element, columns>>::type;
  using CacheKeyRows = Rows<Cache, Formats::key_columns>;
  using KeyRows = Rows<Key, is_same<Key, Cache> ? Formats::key_columns : Traits::head_dim_qk>;
  using ValueRows = typename select_type<latent && !swizzled, LeadingColumns<CacheKeyRows, Cache, value_columns>,
                                         Rows<Cache, value_columns * Formats::value_bits / (8 * sizeof(Cache))>>::type;
  static constexpr int value_copy_bytes = copy_bytes<Cache, Traits::head_dim_vo>;

  FP_DEVICE static constexpr int first_value_column(int pass) {
    return pass + 1 == value_passes ? Traits::head_dim_vo - value_columns : pass * value_columns;
  }

  static_assert((swaps || Traits::tile_q == 16 * row_tiles * Traits::warps_q) && warp_tokens % 16 == 0);
  static_assert(warps_share_columns || Traits::warps_v == 1);
};

}  // namespace flashpage
