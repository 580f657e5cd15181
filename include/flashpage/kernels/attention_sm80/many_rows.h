// Attention of many packed rows (prefill, append) on mma.sync: each warp has rows of its own, and all warps share the K
// and V tiles.
//
// If one CTA alone fits an SM, because keys are wide, two groups of warps share Q: each has the same rows, every second
// tile of K and V, and barriers of its own, so that one group's products hide the other's softmax. At the end of a unit
// each group adds both groups' parts of one half of the columns, and writes that half.
//
// If queries are e4m3 (flashpage/kernels/prefill_sm89.py), all factors of both products are: the tensor cores of sm_89
// and sm_12x multiply them, while for sm_90 and sm_10x ptxas widens the factors to fp16.
//
// K and V of one tile are two cp.async groups. With two stages, the next keys are copied while a tile's scores are
// multiplied, and the next values while its values are multiplied. With one stage, if two leave no room for a wide
// tile, the score product hides the copies of the tile's own values, and the value product those of the next keys. The
// rows of later tiles are looked up meanwhile, and the first tile of the next unit is copied while the rows of the last
// one are written.
#pragma once
#include "flashpage/kernels/attention_sm80/many_rows_shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/thread_index.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/merge/column_halves.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/capped_scores.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/fp8_softmax.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct ManyRows {
  using S = Shape<Traits>;
  using Cache = typename S::Cache;
  using Shared = ManyRowsShared<Traits>;
  using Stored = StoredRows<Traits>;
  using Element = typename Shared::Element;
  using Softmax = typename select_type<S::fp8_products, Fp8Softmax<S::row_tiles>, SoftmaxState<S::row_tiles>>::type;
  static constexpr int groups = Traits::warps_kv, group_threads = S::threads / groups;
  static constexpr int tokens = S::warp_tokens;
  static constexpr int stages = Traits::stages;
  // With two stages the next tile's copies can be spread over this tile's products, if registers allow.
  static constexpr bool spread = stages == 2 && S::value_columns <= 64;
  // Whether lanes exchange columns and write 16 bytes at a time: whole sectors of the L2.
  static constexpr int stored_columns = is_fp8<typename Traits::Out> ? 64 : 32;
  static constexpr bool stores_tiles = sizeof(typename Traits::Out) <= 2 && S::Formats::value_bits == 16 &&
                                       S::value_columns == Traits::head_dim_vo &&
                                       Traits::head_dim_vo % (groups * stored_columns) == 0;
  static constexpr int written_tiles = S::value_tiles / groups;  // n8 tiles that a warp writes
  // Whether masked and other tiles have a body each.
  static constexpr bool two_bodies =
      Traits::ctas_per_sm <= 2 && S::row_tiles * (S::value_tiles + tokens / 8) * 4 <= 160;
  static_assert(groups == 1 || (groups == 2 && !has_formats<Traits> && !S::rotate && !S::fp8_products));
  static_assert(stages == 1 || (stages == 2 && !has_formats<Traits>));
  static_assert(!S::fp8_products || (tokens % 32 == 0 && Traits::head_dim_qk % 32 == 0 && S::value_columns % 32 == 0));
  static_assert(tokens <= group_threads && Traits::tile_q <= S::threads);

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;

  // Read again for each use, because accumulators leave no register for them.
  FP_DEVICE static int cta_thread() { return ptx::thread_index(); }
  FP_DEVICE static int thread() { return groups == 1 ? cta_thread() : cta_thread() % group_threads; }
  FP_DEVICE static int group() { return groups == 1 ? 0 : cta_thread() / group_threads; }
  FP_DEVICE static int slot(int tile) { return group() * stages + tile % stages; }
  FP_DEVICE static i32 first_token(const Unit& unit, int tile) {
    return unit.kv_begin + (tile * groups + group()) * tokens;
  }
  FP_DEVICE static void group_barrier() {
    if constexpr (groups == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier(1 + group(), group_threads);
    }
  }
  FP_DEVICE static int lane() { return ptx::thread_index() % 32; }

  FP_DEVICE ManyRows(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {
    zero_padding_of_rows();
    if constexpr (S::rotate)
      zero_padding<typename S::Key, Traits::head_dim_qk>(shared.finished, tokens, thread(), S::threads);
  }
  FP_DEVICE void zero_padding_of_rows() {
    for (int stage = 0; stage < Shared::slots && !has_formats<Traits>; ++stage)
      zero_padding<Cache, Traits::head_dim_qk>(shared.key[stage], tokens, cta_thread(), S::threads);
    zero_padding<typename S::Query, Traits::head_dim_qk>(shared.query, Traits::tile_q, cta_thread(), S::threads);
  }

  FP_DEVICE i32 look_up(const Place& place, int tile) const {
    i32 token = first_token(place.unit, tile) + thread();
    bool exists = thread() < tokens && token < place.unit.kv_end;
    return exists ? KvRows<Traits::kv_source>(params, place.item).look_up(token) : 0;
  }

  FP_DEVICE void note_keys(const Place& place, int tile, i32 found) {
    if (thread() >= tokens) return;
    if constexpr (has_formats<Traits>)
      shared.key_scales[slot(tile)][thread()] = row_of(params.key_scales, place, tile, found, 0);
    shared.key_row[slot(tile)][thread()] = row_of(params.k, place, tile, found, 0);
  }
  FP_DEVICE void note_values(const Place& place, int tile, i32 found) {
    int column = S::first_value_column(place.pass);
    if (thread() >= tokens) return;
    if constexpr (has_formats<Traits>) {
      const int scale = Stored::Values::scale_offset(column);
      shared.value_scales[slot(tile)][thread()] = row_of(params.value_scales, place, tile, found, scale);
      column = Stored::Values::value_offset(column);
    }
    shared.value_row[slot(tile)][thread()] = row_of(params.v, place, tile, found, column);
  }
  FP_DEVICE const Element* row_of(const KvView& view, const Place& place, int tile, i32 found, int column) const {
    const Unit& unit = place.unit;
    i32 token = min_of(first_token(unit, tile) + thread(), max_of(unit.kv_end - 1, 0));
    return KvRows<Traits::kv_source>(params, place.item)
        .template row<Element>(view, found, token, unit.kv_head, column);
  }

  // Issues one of `parts` equal parts of a tile's copies of keys; load_values does the same for values.
  template <int parts>
  FP_DEVICE void load_keys(const Unit& unit, int tile, int part) {
    if constexpr (has_formats<Traits>)
      return load_stored<typename Stored::Keys>(shared.key[slot(tile)], shared.key_row[slot(tile)],
                                                shared.key_scales[slot(tile)], unit, tile);
    using Copy = RowCopy<Cache, Traits::head_dim_qk, group_threads>;
    load_part<Copy, parts>(shared.key[slot(tile)], shared.key_row[slot(tile)], unit, tile, part);
  }
  template <int parts>
  FP_DEVICE void load_values(const Unit& unit, int tile, int part) {
    if constexpr (has_formats<Traits>)
      return load_stored<typename Stored::Values>(shared.value[slot(tile)], shared.value_row[slot(tile)],
                                                  shared.value_scales[slot(tile)], unit, tile);
    using Copy = RowCopy<Cache, S::value_columns, group_threads, S::value_copy_bytes>;
    load_part<Copy, parts>(shared.value[slot(tile)], shared.value_row[slot(tile)], unit, tile, part);
  }
  template <class Rows>
  FP_DEVICE void load_stored(u8* destination, const u8* const* row_of, const u8* const* scales_of, const Unit& unit,
                             int tile) {
    Rows::template copy<tokens, S::threads>(
        destination, thread(), unit.kv_end - first_token(unit, tile), [&](u32 row) { return row_of[row]; },
        [&](u32 row) { return scales_of[row]; });
  }
  template <class Copy, int parts>
  FP_DEVICE void load_part(u8* destination, const Element* const* row_of, const Unit& unit, int tile, int part) {
    Copy::template run_part<tokens, parts>(ptx::shared_address(destination), thread(),
                                           unit.kv_end - first_token(unit, tile), part,
                                           [&](u32 row) { return row_of[row]; });
  }

  FP_DEVICE void copy_keys(const Unit& unit, int tile) {
    load_keys<1>(unit, tile, 0);
    ptx::cp_async_commit();
  }
  FP_DEVICE void copy_values(const Unit& unit, int tile) {
    load_values<1>(unit, tile, 0);
    ptx::cp_async_commit();
  }

  FP_DEVICE u32 finished_keys(const Unit& unit, int tile) {
    const u8* keys = shared.key[slot(tile)];
    if constexpr (has_formats<Traits>) {
      Stored::template convert_keys<tokens, S::threads>(keys, shared.finished, thread());
      __syncthreads();
      keys = shared.finished;
    }
    if constexpr (S::rotate) {
      i32 first = unit.kv_begin + tile * tokens;
      rotate_rows<Cache, typename S::Key, Traits::head_dim_qk>(
          keys, shared.finished, tokens, params.rope_scale, params.rope_theta, thread(), S::threads,
          [&](int row) { return static_cast<float>(first + row); });
      __syncthreads();
      keys = shared.finished;
    }
    return ptx::shared_address(keys);
  }
  // Called when all warps have read the keys.
  FP_DEVICE u32 finished_values(int tile) {
    u8* stage = shared.value[slot(tile)];
    if constexpr (has_formats<Traits>) {
      Stored::template convert_values<tokens, S::threads>(stage, shared.finished, thread());
      __syncthreads();
      stage = shared.finished;
    }
    return ptx::shared_address(stage);
  }

  // Issues the copies of Q and of the first tile.
  FP_DEVICE void begin(const Place& place) {
    i32 found[stages];
#pragma unroll
    for (int tile = 0; tile < stages; ++tile) found[tile] = look_up(place, tile);
#pragma unroll
    for (int tile = 0; tile < stages; ++tile) {
      note_keys(place, tile, found[tile]);
      note_values(place, tile, found[tile]);
    }
    if (cta_thread() == 0)
      shared.scale[place.parity] =
          score_scale_of<Traits>(params, place.item, place.unit) * KeyFormatOf<Traits>::left_out;
    if (cta_thread() < Traits::tile_q)
      shared.query_offset()[cta_thread()] = query_offset(params, place.item, place.unit, cta_thread());
    __syncthreads();
    load_query<Traits>(ptx::shared_address(shared.query), params, place.unit, cta_thread(),
                       [&](u32 row) { return shared.query_offset()[row]; });
    copy_keys(place.unit, 0);
    if constexpr (stages == 2) copy_values(place.unit, 0);
  }

  // Computes a place whose first copies are issued; on return those of the next place are issued.
  FP_DEVICE void run(const Place* places, i32& here) {
    const Place& place = places[here];
    const Unit& unit = place.unit;
    if constexpr (has_formats<Traits>)
      if (thread() == 0) shared.here = here;
    int warp_row = thread() / 32 * S::rows_a_warp;
    float values[S::row_tiles][S::value_tiles][4] = {};
    Softmax state;
    start(state, place.item, unit, warp_row);
    i32 next = look_up(place, stages);  // the page number of the thread's token in the tile whose rows are noted next
    if constexpr (S::rotate) {
      ptx::cp_async_wait<stages - 1>();
      __syncthreads();
      rotate_query<Traits>(shared.query, params, place.item, unit, thread());
    }
    if constexpr (groups > 1) {
      ptx::cp_async_wait<stages - 1>();
      __syncthreads();  // all threads have copied Q
    }
    for (int tile = 0; first_token(unit, tile) < unit.kv_end; ++tile) {
      // Two straight bodies let the compiler overlap the products with softmax where there would be a branch; the
      // widest accumulators leave no registers for both.
      if constexpr (!two_bodies) {
        step<Masking::where_needed>(place, tile, next, state, values);
      } else if (needs_mask<Traits>(unit, first_token(unit, tile), tokens)) {
        step<Masking::on>(place, tile, next, state, values);
      } else {
        step<Masking::off>(place, tile, next, state, values);
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // all warps have read the stages and Q
    if constexpr (groups > 1) {
      constexpr int bytes = sizeof shared.query + sizeof shared.key + sizeof shared.value;
      using Halves = ColumnHalves<S::row_tiles, S::value_tiles, group_threads, bytes>;
      if (group() == 0) {
        Halves::template add<0>(state, values, shared.query, thread());
      } else {
        Halves::template add<1>(state, values, shared.query, thread());
      }
      __syncthreads();         // all have read what the others wrote
      zero_padding_of_rows();  // the exchange wrote there
    }
    if constexpr (has_formats<Traits>) here = shared.here;
    const Place& after = places[next_place(ptx::opaque(here))];
    if (!after.done) begin(after);
    if (groups == 1 || group() == 0) {
      write_part<0>(state, values, place, warp_row);
    } else {
      write_part<S::value_tiles - written_tiles>(state, values, place, warp_row);
    }
  }

 private:
  // Computes one tile of keys and values and issues the copies of the next one.
  enum class Masking { off, on, where_needed };
  template <Masking masking>
  FP_DEVICE void step(const Place& place, int tile, i32& next, Softmax& state,
                      float (&values)[S::row_tiles][S::value_tiles][4]) {
    const Unit& unit = place.unit;
    int warp_row = thread() / 32 * S::rows_a_warp;
    i32 first = first_token(unit, tile);
    float scale = shared.scale[place.parity];
    u32 query = query_lane_address<Traits>(ptx::shared_address(shared.query) + warp_row * S::QueryRows::stride, lane());
    ptx::cp_async_wait<stages - 1>();
    group_barrier();  // this tile's keys have arrived, and what the last tile read is free
    // A table is rewritten after the last copies that read it were issued, before the barrier ahead of the next ones.
    if constexpr (stages == 1) copy_values(unit, tile);
    if constexpr (stages == 2 && !spread) copy_keys(unit, tile + 1);
    if constexpr (stages == 1) note_keys(place, tile + 1, next);
    if constexpr (stages == 2) next = look_up(place, tile + 2);
    float scores[S::row_tiles][tokens / 8][4];
    const auto fragment = [&](u32(&a)[S::row_tiles][4], int step) {
      load_query_fragment<Traits>(a, ptx::opaque(query), step);
    };
    const auto copy_part = [&](int step) {
      if constexpr (spread) load_keys<S::key_steps>(unit, tile + 1, step);
    };
    const auto rows = [&] { return WarpRows{params, place.item, unit, warp_row, lane()}; };
    if constexpr (splits_capped_scores<Traits>) {
      multiply_capped_keys<Traits>(scores, finished_keys(unit, tile), scale, rows(), args, fragment, copy_part);
    } else {
      multiply_keys<Traits>(scores, finished_keys(unit, tile), lane(), fragment, copy_part);
    }
    if constexpr (spread) ptx::cp_async_commit();
    if constexpr (has_formats<Traits>) Stored::Keys::scale_tokens(scores, shared.key[slot(tile)], lane());
    if (!splits_capped_scores<Traits> && transforms_scores<Traits>(params, scale))
      transform_scores<Traits>(scores, scale, rows(), args, first);
    if (masking == Masking::on || (masking == Masking::where_needed && needs_mask<Traits>(unit, first, tokens)))
      mask_scores<Traits>(scores, rows(), args, first);
    state.update(scores, values, softmax_scale_of<Traits>(scale, args));
    Probabilities<Traits, tokens / 8> probabilities(scores);
    ptx::cp_async_wait<stages - 1>();
    group_barrier();  // this tile's values have arrived, and its keys have been read
    if constexpr (Stored::scales_probabilities) {
      Stored::Values::scale_tokens(scores, shared.value[slot(tile)], lane());
      probabilities = Probabilities<Traits, tokens / 8>(scores);
    }
    if constexpr (stages == 1) copy_keys(unit, tile + 1);
    if constexpr (stages == 2 && !spread) copy_values(unit, tile + 1);
    if constexpr (stages == 2) note_keys(place, tile + 2, next);
    note_values(place, tile + stages, next);
    if constexpr (stages == 1) next = look_up(place, tile + 2);
    multiply_values(values, probabilities, finished_values(tile), lane(), [&](int step) {
      if constexpr (spread) load_values<value_steps<Traits, tokens / 8>>(unit, tile + 1, step);
    });
    if constexpr (spread) ptx::cp_async_commit();
  }

  // As begin_with_sinks, but the lane's number is read again for each use.
  FP_DEVICE void start(Softmax& state, const WorkItem& item, const Unit& unit, int warp_row) {
    state.clear();
    if (!params.sinks || group() != 0) return;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const WarpRows rows{params, item, unit, warp_row, lane()};
        state.maximum[m][half] = sink_of(rows, rows.packed_row(m, half));
        state.sum[m][half] = lane() % 4 == 0 && state.maximum[m][half] != ptx::negative_infinity() ? 1.f : 0.f;
      }
    if constexpr (S::fp8_products) state.lift_sums();
  }

  // Writes the columns of `written_tiles` tiles from `first_tile` on.
  template <int first_tile>
  FP_DEVICE void write_part(Softmax& state, float (&values)[S::row_tiles][S::value_tiles][4], const Place& place,
                            int warp_row) {
    if (place.item.partial_row >= 0) {
      write_rows<true, first_tile>(state, values, place, warp_row);
    } else {
      write_rows<false, first_tile>(state, values, place, warp_row);
    }
  }

  template <bool partial, int first_tile>
  FP_DEVICE void write_rows(Softmax& state, float (&values)[S::row_tiles][S::value_tiles][4], const Place& place,
                            int warp_row) {
    const Unit& unit = place.unit;
    if constexpr (S::fp8_products) state.lower_maxima();
    float value_scale = out_factor_of<Traits>(params, place.item, unit.kv_head) * ValueFormatOf<Traits>::left_out;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = warp_row + m * 16 + half * 8 + lane() / 4;
        float sum = quad_sum(state.sum[m][half]);
        const bool exists = row < unit.num_rows;
        if (!stores_tiles && !exists) continue;
        float inverse = sum > 0.f ? value_scale / sum : 0.f;
        i64 offset = out_offset<Traits>(params, place.item, unit, row) + S::first_value_column(place.pass);
        if constexpr (stores_tiles && !partial) {
          using Out = typename Traits::Out;
          Out* const to = static_cast<Out*>(params.out) + offset;
          if constexpr (is_fp8<Out>) {
            store_fp8_tiles<first_tile, written_tiles>(values[m], half, lane(), inverse, to, exists);
          } else {
            store_tiles<Out, first_tile, written_tiles>(values[m], half, lane(), inverse, to, exists);
          }
        }
        if (!exists) continue;
        if constexpr (partial || !stores_tiles)
          for_each_column_pair<Traits>(values[m], half, lane(), [&](int at, float first, float second) {
            if (groups == 1 || at / 8 / written_tiles == first_tile / written_tiles)
              store_pair<Traits>(params, partial, offset + at, first * inverse, second * inverse);
          });
        if (lane() % 4 == 0 && first_tile == 0) {
          if (float* lse = lse_target(params, place.item, unit, row)) *lse = row_lse(state.maximum[m][half], sum);
        }
      }
  }
};

}  // namespace flashpage
