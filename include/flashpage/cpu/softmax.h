// Online softmax: turns the scores of a strip and a tile into weights and keeps each row's running maximum and sum.
#pragma once
#include "flashpage/cpu/mask.h"
#include "flashpage/cpu/work.h"

namespace flashpage::cpu {

// A sink counts as a token without a value, which piece 0 has seen before all others.
template <class Traits>
void start_softmax(Work<Traits>& work) {
  const bool has_sink = work.params.sinks && work.unit.item->piece == 0;
  for (i32 r = 0; r < work.unit.num_rows; ++r) {
    const float sink = has_sink ? work.params.sinks[work.unit.rows[r].head] * log2_e : -infinity;
    work.softmax.max[r] = sink;
    work.softmax.sum[r] = sink == -infinity ? 0.0f : 1.0f;
  }
}

// Scores in base-2 units of one vector of the tile, after scale, variant and masks.
template <class Traits>
inline FloatLanes final_scores(Work<Traits>& work, const Row& row, int vector, FloatLanes dots) {
  using Variant = typename Traits::Variant;
  const WorkItem& item = *work.unit.item;
  const i32 first = work.tile.begin + vector * num_lanes;
  // Variants load captured tensors by token: lanes past the request repeat its last token.
  const IntLanes count = count_from(first), last = IntLanes{} + (item.kv_len - 1), tokens = count < last ? count : last;
  if constexpr (Variant::has_logit) {
    const vm::Floats score = dots * row.scale;
    dots = vm::Floats(Variant::logit(work.args, score, item.request, row.head, row.position, vm::Ints(tokens))).lanes *
           log2_e;
  } else {
    dots = dots * (row.scale * log2_e);
  }
  constexpr bool is_selected = KvTile<Traits>::is_selected;
  const MaskLanes exists = mask_of_bits(is_selected ? work.tile.exists[vector] : (1u << num_lanes) - 1);
  const bool in_range = row.begin <= first && first + num_lanes <= row.end && (!is_selected || all_true(exists));
  if (in_range && !has_custom_mask<Traits>) return dots;
  MaskLanes visible = visible_tokens<Traits>(work.params, work.args, item, row, first, tokens);
  if constexpr (is_selected) visible = visible & exists;
  if constexpr (has_custom_mask<Traits>) work.seen[vector] = work.seen[vector] | visible;
  return blend(visible, dots, splat(-infinity));
}

template <class Traits>
void softmax_row(Work<Traits>& work, const Strip& strip, i32 r) {
  using Operand = typename Work<Traits>::Operand;
  float* scores = work.scores + (r - strip.row) * Traits::tile_kv;
  Operand* weights = work.weights + r * Traits::tile_kv;
  float& max = work.softmax.max[r];
  FloatLanes maxima = splat(max), sums{};
  for (int v = strip.vector_begin(); v < strip.vector_end(); ++v) {
    const FloatLanes x = final_scores(work, work.unit.rows[r], v, load(scores + v * num_lanes));
    store(scores + v * num_lanes, x);
    maxima = x > maxima ? x : maxima;
  }
  const float new_max = horizontal_max(maxima), base = new_max == -infinity ? 0.0f : new_max;
  for (int v = strip.vector_begin(); v < strip.vector_end(); ++v) {
    const FloatLanes weight = exp2_of_negative(load(scores + v * num_lanes) - base);
    store(weights + v * num_lanes, weight);
    sums += weight;
  }
  const float carry = exp2_of_negative(splat(max - base))[0];
  work.softmax.carry[r] = carry;
  work.softmax.sum[r] = work.softmax.sum[r] * carry + horizontal_sum(sums);
  max = new_max;
}

template <class Traits>
void softmax_strip(Work<Traits>& work, const Strip& strip) {
  for (i32 r = strip.row; r < strip.row + strip.num_rows; ++r) softmax_row(work, strip, r);
}

}  // namespace flashpage::cpu
