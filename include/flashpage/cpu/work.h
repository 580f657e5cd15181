// Everything that one thread needs while it computes a unit. Functions of the kernel take it and name what they change.
#pragma once
#include "flashpage/cpu/kv_tile.h"
#include "flashpage/cpu/rope.h"
#include "flashpage/cpu/unit.h"

namespace flashpage::cpu {

// Softmax state of all rows of a unit, in base-2 units.
template <int tile_q>
struct SoftmaxState {
  float max[tile_q];
  float sum[tile_q];
  float carry[tile_q];  // factor that rescales older sums and outputs to the new maximum
};

// Rows that are multiplied together, and the range of the tile's tokens that any of them sees.
struct Strip {
  i32 row, num_rows;
  i32 begin, end;  // counted from the tile's first token

  int vector_begin() const { return begin / num_lanes; }
  int vector_end() const { return ceil_div(end, num_lanes); }
};

template <class T>
struct Work {
  using Traits = T;
  using Kv = typename Traits::StoredCache;
  using Operand = cpu::Operand<typename Traits::StoredQuery, Kv>;
  static constexpr int tile_q = Traits::tile_q, tile_kv = Traits::tile_kv;
  static constexpr int head_dim_qk = Traits::head_dim_qk, head_dim_vo = Traits::head_dim_vo;
  static constexpr int pack = word_elements<Operand>;
  static constexpr int qk_words = head_dim_qk / pack, kv_steps = tile_kv / pack;
  static constexpr int out_vectors = ceil_div(head_dim_vo, num_lanes), out_stride = out_vectors * num_lanes;
  static constexpr int key_words = qk_words * round_up(tile_kv, panel_width);
  static constexpr int value_words = kv_steps * round_up(head_dim_vo, panel_width);
  static constexpr bool has_tails = is_latent<Traits::kv_source>, converts = converts_latents<Traits>;
  static constexpr bool has_formats = flashpage::has_formats<Traits>;
  static constexpr bool has_rope = Traits::position_encoding == PositionEncoding::rope;
  static_assert(tile_kv % num_lanes == 0 && head_dim_qk % 8 == 0 && head_dim_vo % 8 == 0);
  static_assert(head_dim_qk <= max_head_dim && head_dim_vo <= max_head_dim);
  static_assert(!has_tails || (head_dim_qk >= head_dim_vo && !has_rope));

  const AttentionParams& params;
  const VariantArgs& args;
  Rotation<has_rope ? head_dim_qk : 2> rotation;

  Unit<tile_q> unit;
  SoftmaxState<tile_q> softmax;
  KvTile<Traits> tile, next;
  MaskLanes seen[tile_kv / num_lanes];  // custom masks: tokens of the tile that any row sees

  alignas(64) Operand queries[tile_q * head_dim_qk];
  // Rotated, or converted from what is stored: latent rows in fp8 (which are V as well), or formats.
  alignas(64) Operand made_keys[has_rope || converts || has_formats ? tile_kv * head_dim_qk : 1];
  alignas(64) Operand made_values[has_formats ? tile_kv * head_dim_vo : 1];
  alignas(64) u32 panels[max_of(key_words, value_words)];  // the tile's keys, later its values
  alignas(64) float scores[strip_rows * tile_kv];
  alignas(64) Operand weights[tile_q * tile_kv];
  alignas(64) float out[tile_q * out_stride];

  Work(const AttentionParams& p, const VariantArgs& a) : params(p), args(a), rotation(p.rope_scale, p.rope_theta) {}

  Strip strip(i32 row) const {
    const i32 rows = min_of(strip_rows, unit.num_rows - row), last = row + rows - 1;
    return {row, rows, clamp(unit.rows[row].begin - tile.begin, 0, tile.count),
            clamp(unit.rows[last].end - tile.begin, 0, tile.count)};
  }
};

}  // namespace flashpage::cpu
