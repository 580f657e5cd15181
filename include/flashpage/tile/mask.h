// What happens to a score between Q K^T and softmax: the variant's transform, then everything that hides a token.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/shape.h"
#include "flashpage/tile/unit.h"
#include "flashpage/variant.h"

namespace flashpage {

// The rows of one lane: where they stand and how their scores are scaled.
template <class Traits>
struct LaneRows {
  using S = Shape<Traits>;
  i32 packed[S::row_tiles][2];   // clamped to the unit's last row
  float scale[S::row_tiles][2];  // raw score to base 2; with a logit transform to natural units

  FP_DEVICE LaneRows(const AttentionParams& params, const Unit& unit, int first_row, int lane) {
    float unit_scale = params.score_scale;
    if (params.k_scale) unit_scale *= params.k_scale[params.k_scale_stride * unit.kv_head];
    if (!Traits::Variant::has_logit) unit_scale *= log2_e;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        i32 row = first_row + m * 16 + half * 8 + lane / 4;
        packed[m][half] = unit.first_row + min_of(row, unit.num_rows - 1);
        scale[m][half] = unit_scale;
        if (params.q_scale) {
          i32 head = unpack_row(params, unit.kv_head, packed[m][half]).head;
          scale[m][half] *= params.q_scale[params.q_scale_stride * head];
        }
      }
  }
};

template <class Traits, int token_tiles>
FP_DEVICE void transform_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], LaneRows<Traits>& rows,
                                const AttentionParams& params, const VariantArgs& args, const WorkItem& item,
                                const Unit& unit, i32 first_token, int lane) {
  using Variant = typename Traits::Variant;
  if constexpr (Variant::has_logit) {
#pragma unroll
    for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        PackedRow row = unpack_row(params, unit.kv_head, rows.packed[m][half]);
        i32 position = query_position(item, row.row);
#pragma unroll
        for (int n = 0; n < token_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            // A token past the end is masked later; a variant may not load beyond the request.
            i32 token = min_of(first_token + n * 8 + lane % 4 * 2 + e, item.kv_len - 1);
            float& score = scores[m][n][half * 2 + e];
            score = Variant::logit(args, score * rows.scale[m][half], item.request, row.head, position, token) * log2_e;
          }
      }
  }
}

// Hides tokens of a tile that is not wholly visible.
template <class Traits, int token_tiles>
FP_DEVICE void mask_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const LaneRows<Traits>& rows,
                           const AttentionParams& params, const VariantArgs& args, const WorkItem& item, const Unit& unit,
                           i32 first_token, int lane) {
  using Variant = typename Traits::Variant;
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PackedRow row = unpack_row(params, unit.kv_head, rows.packed[m][half]);
      i32 position = query_position(item, row.row);
      TokenRange range = visible_range(params, item, position);
      const u8* bits = params.custom_mask + item.mask_offset;
      i64 first_bit = static_cast<i64>(row.row) * item.kv_len;
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          i32 token = first_token + n * 8 + lane % 4 * 2 + e;
          bool visible = token >= range.begin && token < range.end;
          if constexpr (Traits::mask_source == MaskSource::packed_bits) {
            i64 bit = first_bit + token;
            if (visible) visible = bits[bit >> 3] >> (bit & 7) & 1;
          }
          if constexpr (Variant::has_mask) {
            visible = visible && Variant::mask(args, item.request, row.head, position, min_of(token, item.kv_len - 1));
          }
          if (!visible) scores[m][n][half * 2 + e] = ptx::negative_infinity();
        }
    }
}

// Both, and the factor that softmax still has to apply.
template <class Traits, int token_tiles>
FP_DEVICE void finish_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], LaneRows<Traits>& rows,
                             const AttentionParams& params, const VariantArgs& args, const WorkItem& item, const Unit& unit,
                             i32 first_token, int lane) {
  transform_scores<Traits>(scores, rows, params, args, item, unit, first_token, lane);
  bool always = Traits::mask_source == MaskSource::packed_bits || Traits::Variant::has_mask;
  if (always || first_token < unit.all_begin || first_token + token_tiles * 8 > unit.all_end) {
    mask_scores<Traits>(scores, rows, params, args, item, unit, first_token, lane);
  }
}

}  // namespace flashpage
