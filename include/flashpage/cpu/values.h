// Output: products of weights and values, and the rows that are written.
#pragma once
#include "flashpage/cpu/converted_rows.h"
#include "flashpage/cpu/mask.h"

namespace flashpage::cpu {

// Replaces tokens that a custom mask hides from every row by zeros: their memory may hold NaN, and 0 * NaN is NaN.
template <class Traits>
void drop_unseen_values(Work<Traits>& work) {
  for (i32 i = 0; i < work.tile.count; ++i)
    if (!work.seen[i / num_lanes][i % num_lanes]) work.tile.values[i] = zero_row<typename Traits::StoredCache>;
}

template <class Traits>
void pack_tile_values(Work<Traits>& work) {
  using W = Work<Traits>;
  if constexpr (W::converts || W::has_formats) {
    const typename W::Operand* rows[Traits::tile_kv];
    if constexpr (W::has_formats) {
      convert_format_values<Traits, has_custom_mask<Traits>>(work);
      rows_at(work.made_values, W::head_dim_vo, work.tile.count, rows);
    } else {
      rows_at(work.made_keys, W::head_dim_qk, work.tile.count, rows);
    }
    pack_values<typename W::Operand, W::head_dim_vo, W::kv_steps>(rows, work.tile.count, work.panels,
                                                                  Ahead<typename W::Operand, 1>{rows, 0});
  } else {
    if constexpr (has_custom_mask<Traits>) drop_unseen_values(work);
    const Ahead<typename Traits::StoredCache, Traits::head_dim_qk> next_keys = {work.next.keys, work.next.count};
    pack_values<typename W::Operand, W::head_dim_vo, W::kv_steps>(work.tile.values, work.tile.count, work.panels,
                                                                  next_keys);
  }
}

// Rescales the strip's rows of work.out to the new maximum and adds this tile's products.
template <class Traits>
void value_strip(Work<Traits>& work, const Strip& strip) {
  using W = Work<Traits>;
  const Product product = {.rows = reinterpret_cast<const u32*>(work.weights) + strip.row * W::kv_steps,
                           .row_stride = W::kv_steps,
                           .panels = work.panels,
                           .panel_words = W::kv_steps * panel_width,
                           .step_begin = strip.begin / W::pack,
                           .step_end = ceil_div(strip.end, W::pack),
                           .sums = work.out + strip.row * W::out_stride,
                           .sums_stride = W::out_stride,
                           .carry = work.softmax.carry + strip.row};
  multiply<typename W::Operand>(product, strip.num_rows, 0, W::out_vectors);
}

template <class Out, int head_dim>
void write_row(const float* source, float factor, Out* destination) {
  for (int i = 0; i < head_dim; i += num_lanes) store_first(destination + i, load(source + i) * factor, head_dim - i);
}

// Writes to out and lse, or to the partial buffers if the unit is cut.
template <class Traits>
void write_outputs(const Work<Traits>& work) {
  constexpr int head_dim = Traits::head_dim_vo;
  const AttentionParams& params = work.params;
  const WorkItem& item = *work.unit.item;
  for (i32 r = 0; r < work.unit.num_rows; ++r) {
    const Row& row = work.unit.rows[r];
    const float* source = work.out + r * Work<Traits>::out_stride;
    const float sum = work.softmax.sum[r];
    const float factor = sum == 0.0f ? 0.0f : work.unit.value_scale / sum;
    const float lse = sum == 0.0f ? -infinity : work.softmax.max[r] + __builtin_log2f(sum);
    if (item.partial_row >= 0) {
      const i64 place = i64{item.partial_row} + r;
      write_row<float, head_dim>(source, factor, params.partial_out + place * head_dim);
      params.partial_lse[place] = lse;
    } else {
      const i64 place = i64{item.q_begin} + row.row;
      auto* out = static_cast<typename Traits::Out*>(params.out);
      write_row<typename Traits::Out, head_dim>(
          source, factor, out + place * params.out_row_stride + row.head * params.out_head_stride);
      if (params.lse) params.lse[place * params.num_q_heads + row.head] = lse;
    }
  }
}

}  // namespace flashpage::cpu
