// Scores: dot products of queries and keys.
#pragma once
#include "flashpage/cpu/converted_rows.h"

namespace flashpage::cpu {

// Loads the unit's rows of q as operands, rotated if the kernel encodes positions.
template <class Traits>
void load_queries(Work<Traits>& work) {
  using Operand = typename Work<Traits>::Operand;
  constexpr int head_dim = Traits::head_dim_qk;
  const AttentionParams& params = work.params;
  i32 position = 0;
  for (i32 r = 0; r < work.unit.num_rows; ++r) {
    const Row& row = work.unit.rows[r];
    const auto* source = static_cast<const typename Traits::StoredQuery*>(params.q) +
                         (i64{work.unit.item->q_begin} + row.row) * params.q_row_stride +
                         row.head * params.q_head_stride;
    Operand* destination = work.queries + r * head_dim;
    if constexpr (Work<Traits>::has_rope) {
      if (r == 0) work.rotation.start(row.position);
      if (r > 0 && row.position != position) work.rotation.advance();
      position = row.position;
      work.rotation.rotate(source, destination);
    } else {
      for (int i = 0; i < head_dim; i += num_lanes)
        store_first(destination + i, load_first(source + i, head_dim - i), head_dim - i);
    }
  }
}

// Rotates the tile's keys into work.made_keys, where those in formats already are.
template <class Traits>
void rotate_tile_keys(Work<Traits>& work) {
  constexpr int head_dim = Traits::head_dim_qk;
  work.rotation.start(work.tile.begin);
  for (i32 i = 0; i < work.tile.count; ++i) {
    auto* made = work.made_keys + i * head_dim;
    if constexpr (Work<Traits>::has_formats) {
      work.rotation.rotate(made, made);
    } else {
      work.rotation.rotate(work.tile.keys[i], made);
    }
    work.rotation.advance();
  }
}

template <class Traits>
void pack_tile_keys(Work<Traits>& work) {
  using W = Work<Traits>;
  using Operand = typename W::Operand;
  constexpr int head_dim = Traits::head_dim_qk;
  auto& tile = work.tile;
  const Ahead<typename Traits::StoredCache, Traits::head_dim_vo> values = {tile.values, tile.count};
  if constexpr (W::has_rope || W::converts || W::has_formats) {
    if constexpr (W::converts) convert_tile(work);
    if constexpr (W::has_formats) convert_format_keys(work);
    if constexpr (W::has_rope) rotate_tile_keys(work);
    const Operand* rows[Traits::tile_kv];
    rows_at(work.made_keys, head_dim, tile.count, rows);
    if constexpr (W::converts || W::has_formats) {
      pack_keys<Operand, head_dim, W::qk_words>(rows, tile.count, work.panels, Ahead<Operand, head_dim>{rows, 0});
    } else {
      pack_keys<Operand, head_dim, W::qk_words>(rows, tile.count, work.panels, values);
    }
  } else if constexpr (W::has_tails) {
    constexpr int shared = Traits::head_dim_vo, tail = head_dim - shared;
    pack_keys<Operand, shared, W::qk_words>(tile.keys, tile.count, work.panels, values);
    if constexpr (tail > 0) {
      u32* panels = work.panels + shared / W::pack * panel_width;
      pack_keys<Operand, tail, W::qk_words>(tile.key_tails, tile.count, panels, values);
    }
  } else {
    pack_keys<Operand, head_dim, W::qk_words>(tile.keys, tile.count, work.panels, values);
  }
}

// Writes the dot products of the strip's rows with the tokens they see to work.scores.
template <class Traits>
void score_strip(Work<Traits>& work, const Strip& strip) {
  using W = Work<Traits>;
  const Product product = {.rows = reinterpret_cast<const u32*>(work.queries) + strip.row * W::qk_words,
                           .row_stride = W::qk_words,
                           .panels = work.panels,
                           .panel_words = W::qk_words * panel_width,
                           .step_begin = 0,
                           .step_end = W::qk_words,
                           .sums = work.scores,
                           .sums_stride = W::tile_kv,
                           .carry = nullptr};
  multiply<typename W::Operand>(product, strip.num_rows, strip.vector_begin(), strip.vector_end());
}

}  // namespace flashpage::cpu
