// How vLLM's operators change scores: ALiBi, the block-sparse pattern, and tokens that do not exist.
#pragma once
#include "flashpage/params/block_params.h"
#include "flashpage/ptx/math.h"
#include "flashpage/tile/product/value_columns.h"

namespace flashpage {

// A row, which is a query head.
struct BlockRow {
  float slope;  // base 2; 0 without ALiBi
  i32 offset;   // to the pattern's stripes

  FP_DEVICE static BlockRow of(const BlockAttentionParams& params, i32 head, i32 kv_head) {
    const BlockPattern& pattern = params.pattern;
    return {params.alibi_slopes ? params.alibi_slopes[head] * log2_e : 0.f,
            pattern.first + head * pattern.head_step + kv_head * pattern.kv_head_step};
  }
};

// Whether a row sees tokens of a block of the pattern; `own`: the last token's block.
FP_DEVICE bool sees_block(const BlockPattern& pattern, i32 offset, i32 block, i32 own) {
  if (own - block < pattern.local_blocks) return true;
  u32 whole, rest;
  pattern.stride.divmod(block + offset, whole, rest);
  return rest == 0;
}

// Whether the row sees any of tokens [first, last].
FP_DEVICE bool sees_any(const BlockPattern& pattern, i32 offset, i32 first, i32 last, i32 length) {
  const i32 own = pattern.block_size.div(length - 1), end = pattern.block_size.div(last);
  for (i32 block = pattern.block_size.div(first); block <= end; ++block)
    if (sees_block(pattern, offset, block, own)) return true;
  return false;
}

// Scales scores to base 2 and adds ALiBi's bias, if any. `first`: the sequence's token at which the tile begins.
template <class Traits, int token_tiles>
FP_DEVICE void bias_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4],
                           const BlockRow (&rows)[Shape<Traits>::row_tiles][2], float scale, i32 first, i32 length,
                           int lane) {
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const i32 token = first + token_of_score<typename Traits::Cache>(n, e % 2, lane);
        scores[m][n][e] = fmaf(scores[m][n][e], scale, rows[m][e / 2].slope * static_cast<float>(token - length + 1));
      }
}

template <class Traits, int token_tiles>
FP_DEVICE void hide_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4],
                           const BlockRow (&rows)[Shape<Traits>::row_tiles][2], const BlockPattern& pattern, i32 first,
                           i32 length, int lane) {
  const bool sparse = pattern.stride.divisor > 0;
  const i32 own = sparse ? pattern.block_size.div(length - 1) : 0;
#pragma unroll
  for (int n = 0; n < token_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 token = first + token_of_score<typename Traits::Cache>(n, e, lane);
      const i32 block = sparse ? pattern.block_size.div(token) : 0;
#pragma unroll
      for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool visible = token < length && (!sparse || sees_block(pattern, rows[m][half].offset, block, own));
          if (!visible) scores[m][n][half * 2 + e] = ptx::negative_infinity();
        }
    }
}

}  // namespace flashpage
