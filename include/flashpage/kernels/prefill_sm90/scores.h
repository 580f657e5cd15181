// A tile's scores in prefill_sm90 between their product and the softmax: transform and masks.
#pragma once
#include "flashpage/kernels/prefill_sm90/pipeline.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// The tiles of a unit in sequence, as masking needs them.
template <class Traits>
struct UnitTiles {
  // The fp8 loop has no registers for them: it loads them with each tile.
  using Tokens = typename select_type<PrefillWarps<Traits>::multiplies_fp8, const UnitTokens&, const UnitTokens>::type;

  const CurrentTile<Traits>& tile;  // written by loading warps, if the kernel has mask tiles
  Tokens tokens;
  i32 first;  // first token of the tile

  FP_DEVICE explicit UnitTiles(const Pipeline<Traits>& pipeline)
      : tile(pipeline.tile),
        tokens(pipeline.unit().tokens),
        first(has_mask_tiles<Traits> ? tile.first_token : tokens.first) {}

  // Moves to the next tile; returns false if the unit has at most `short_tokens` left.
  FP_DEVICE bool next(int short_tokens) {
    if constexpr (has_mask_tiles<Traits>) return !tile.is_last;
    return (first += Traits::tile_kv) + short_tokens < tokens.end;
  }
  // After next() returned false: whether tokens are left.
  FP_DEVICE bool ends_short() const { return first < tokens.end; }
};

// The steps that a warp applies to its scores of one unit: a scale, the variant's transform and the masks.
template <class Traits>
struct ScoreRules {
  using Warps = PrefillWarps<Traits>;
  static constexpr int tokens = Traits::tile_kv;
  static constexpr bool keeps_rows = flashpage::keeps_rows<Traits> && !Warps::multiplies_fp8;
  using KeptRows = typename select_type<keeps_rows, TransformedRows<Traits>, NoRows>::type;
  // Whether every tile is masked: mask tiles of packed bits do not cover a mask function that is used in addition.
  static constexpr bool masks_all =
      masks_all_tiles<Traits> && (!has_mask_tiles<Traits> || (has_lane_bits<Traits> && Traits::Variant::has_mask));

  const AttentionParams& params;
  const VariantArgs& args;
  const TiledPlace& tiled;
  WarpRows rows;
  HalfScales scale;  // of the lane's two rows, with the scales of their query heads
  HalfScales softmax_scale;
  bool transforms;
  [[maybe_unused]] KeptRows kept_rows;

  FP_DEVICE ScoreRules(const AttentionParams& params, const VariantArgs& args, const Pipeline<Traits>& pipeline,
                       int first_row, int lane)
      : params(params),
        args(args),
        tiled(pipeline.unit()),
        rows{params, tiled.place.item, tiled.place.unit, first_row, lane},
        scale(scales_of(pipeline, first_row)),
        softmax_scale{softmax_scale_of<Traits>(scale.of_half[0], args),
                      softmax_scale_of<Traits>(scale.of_half[1], args)},
        transforms(transforms_scores<Traits>(scale)),
        kept_rows(scale, rows, args) {}

  // Leaves a tile unchanged that needs neither transform nor mask.
  FP_DEVICE void apply(auto& scores, UnitTiles<Traits>& tiles) const {
    const CurrentTile<Traits>& tile = tiles.tile;
    if constexpr (has_mask_tiles<Traits>) tiles.first = tile.first_token;
    const i32 first = tiles.first;
    const bool is_cut = first < tiles.tokens.clear_begin || first > tiles.tokens.clear_end;
    const bool masks = masks_all || tile.visibility != TileVisibility::all || is_cut;
    if (!(transforms || masks)) return;
    if constexpr (keeps_rows) {
      transform_by_logit<Traits>(scores, rows, args, first, [&](int, int half) { return kept_rows.row[half]; });
    } else if (transforms) {
      transform_scores<Traits>(scores, scale, rows, args, first);
    }
    if constexpr (has_lane_bits<Traits> && !Traits::Variant::has_mask) {
      const LaneBits bits(tiled.lane_bits, tiled.place.item.kv_len, tokens);
      if (tile.visibility != TileVisibility::all) mask_by_lane_bits<Traits>(scores, rows, bits, tile);
      if (is_cut) mask_cut_ends<Traits>(scores, rows.recomputed(), first);
    } else if (masks) {
      mask_scores<Traits, true>(scores, rows, args, first);
    }
  }
  // As apply, in two steps, so that no register of the masks is live during the transform. Not for mask tiles.
  FP_DEVICE void transform(auto& scores, const UnitTiles<Traits>& tiles) const {
    if (transforms) transform_scores<Traits>(scores, scale, rows, args, tiles.first);
  }
  FP_DEVICE void mask(auto& scores, const UnitTiles<Traits>& tiles) const {
    if (masks_all || tiles.first < tiles.tokens.clear_begin || tiles.first > tiles.tokens.clear_end)
      mask_scores<Traits, true>(scores, rows, args, tiles.first);
  }

 private:
  FP_DEVICE HalfScales scales_of(const Pipeline<Traits>& pipeline, int first_row) const {
    float scale = score_scale_of<Traits>(params, tiled.place.item, tiled.place.unit);
    if constexpr (Warps::converts) scale *= pipeline.query_factor(first_row / 16);
    if (!scales_heads(params)) return {scale, scale};
    const auto head_scale = [&](int half) { return head_scale_of(params, tiled.place.item, rows.row(0, half).head); };
    return {scale * head_scale(0), scale * head_scale(1)};
  }
};

}  // namespace flashpage
