// The attention kernel of the CPU: one thread computes the plan's units tile by tile on vector registers.
#pragma once
#include <stdlib.h>

#include <new>
#include <type_traits>

#include "flashpage/cpu/scores.h"
#include "flashpage/cpu/softmax.h"
#include "flashpage/cpu/trace.h"
#include "flashpage/cpu/values.h"

namespace flashpage::cpu {

// Sets `tile` to the one that begins at token `begin` of the unit; it is empty at the unit's end.
template <class Traits>
void locate_tile(const Work<Traits>& work, i32 begin, KvTile<Traits>& tile) {
  tile.begin = begin;
  tile.count = min_of(Traits::tile_kv, work.unit.end - begin);
  locate_rows(work.params, *work.unit.item, work.unit.kv_head, tile);
}

// Computes the scores of all row strips before their values, because keys and values use the same panels.
template <class Traits>
void attend_tile(Work<Traits>& work) {
  const i32 num_rows = work.unit.num_rows;
  __builtin_memset(work.seen, 0, sizeof(work.seen));
  pack_tile_keys(work);
  for (i32 row = 0; row < num_rows; row += strip_rows) {
    const Strip strip = work.strip(row);
    score_strip(work, strip);
    softmax_strip(work, strip);
  }
  pack_tile_values(work);
  for (i32 row = 0; row < num_rows; row += strip_rows) value_strip(work, work.strip(row));
}

template <class Traits>
void attend_unit(Work<Traits>& work, i32 cta) {
  load_queries(work);
  start_softmax(work);
  __builtin_memset(work.out, 0, sizeof(float) * work.unit.num_rows * Work<Traits>::out_stride);
  locate_tile(work, work.unit.begin, work.next);
  stamp_first<Traits>(work.params, cta, Stamp::first_load);
  stamp_first<Traits>(work.params, cta, Stamp::first_tile);
  while (work.next.count > 0) {
    work.tile = work.next;
    locate_tile(work, work.tile.begin + work.tile.count, work.next);
    attend_tile(work);
  }
  stamp<Traits>(work.params, cta, Stamp::last_tile);
  write_outputs(work);
  stamp<Traits>(work.params, cta, Stamp::written);
}

template <class Traits>
void attend_ctas(Work<Traits>& work, i32 cta_begin, i32 cta_end) {
  const AttentionParams& params = work.params;
  AttentionParams of_units = params;
  if constexpr (converts_latents<Traits>) of_units.k_scale = of_units.v_scale = nullptr;  // they scale elements
  for (i32 cta = cta_begin; cta < cta_end; ++cta) {
    stamp<Traits>(params, cta, Stamp::start);
    for_each_item(params.plan, cta, [&](const WorkItem& item) {
      for (i32 u = 0; u < item.num_units; ++u) {
        make_unit(of_units, item, u, work.unit);
        stamp_first<Traits>(params, cta, Stamp::plan_known);
        attend_unit(work, cta);
      }
    });
    stamp<Traits>(params, cta, Stamp::end);
    stamp<Traits>(params, cta, Stamp::sm);
  }
}

// Has a stack frame of its own, which is made only if it is called.
template <class Traits>
[[gnu::noinline]] void attend_on_stack(const AttentionParams& params, const VariantArgs& args, i32 cta_begin,
                                       i32 cta_end) {
  Work<Traits> work(params, args);
  attend_ctas(work, cta_begin, cta_end);
}

// A program may give its threads 512 KiB of stack, and the work of wide heads has more. An allocation takes some
// 0.4 us, which shows next to the shortest decodes of other heads.
constexpr size_t most_on_stack = 256 << 10;

// Runs the items of CTAs [cta_begin, cta_end). If there is no memory the work is on the stack: there is no way to tell.
template <class Traits>
void attention(const AttentionParams& params, const VariantArgs& args, i32 cta_begin, i32 cta_end) {
  using Work = cpu::Work<Traits>;
  static_assert(std::is_trivially_destructible_v<Work>, "the memory is freed as it is");
  void* memory = sizeof(Work) > most_on_stack ? aligned_alloc(alignof(Work), sizeof(Work)) : nullptr;
  if (memory == nullptr) return attend_on_stack<Traits>(params, args, cta_begin, cta_end);
  attend_ctas(*new (memory) Work(params, args), cta_begin, cta_end);
  free(memory);
}

}  // namespace flashpage::cpu
