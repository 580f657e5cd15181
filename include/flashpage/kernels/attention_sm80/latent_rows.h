// Attention over latent rows (MLA) on mma.sync: all heads read a tile once, as keys and, its first columns, as values.
//
// Groups of `warps_v` neighbouring warps share 16 or more packed rows. For the scores, each warp multiplies a part of
// the columns, and the group adds these terms (score_parts.h); if the columns do not divide, each warp multiplies whole
// keys. For the output, each warp multiplies its part of the value columns. While a tile is computed, the next one is
// copied and the rows of the one after it are looked up. Rows in another format than the queries' are copied as they
// are stored, and converted to the tile when they have arrived.
#pragma once
#include "flashpage/params/latent_format.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/thread_index.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/latent_tile.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/score_parts.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct LatentRowsShared {
  using S = Shape<Traits>;
  struct Nothing {};
  alignas(128) u8 query[S::QueryRows::bytes(Traits::tile_q)];
  LatentTiles<Traits> tiles;
  typename select_type<ScoreParts<Traits>::are_even, ScoreParts<Traits>, Nothing>::type score_parts;
  // The rows of the unit in q and out, for two places alternately.
  alignas(16) i64 query_offset[Traits::tile_q];
  alignas(16) i64 out_offset[2][Traits::tile_q];
};

template <class Traits>
struct LatentAttention {
  using S = Shape<Traits>;
  using Shared = LatentRowsShared<Traits>;
  static constexpr int tokens = Traits::tile_kv;
  static_assert(Traits::warps_kv == 1 && Traits::stages == 2 && !S::rotate);
  static_assert(tokens <= S::threads && Traits::tile_q <= S::threads);
  static_assert(Traits::head_dim_qk % 16 == 0 && S::value_columns % 64 == 0);
  static_assert(S::value_columns * Traits::warps_v == Traits::head_dim_vo);

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;

  // Read again for each use, because accumulators leave no register for them.
  FP_DEVICE static int thread() { return ptx::thread_index(); }
  FP_DEVICE static int lane() { return ptx::thread_index() % 32; }
  // The warp's first row; below, its first value column.
  FP_DEVICE static int warp_row() { return group() * S::rows_a_warp; }
  FP_DEVICE static int group() { return thread() / 32 / Traits::warps_v; }
  // The warp's number in its group: its part of the columns.
  FP_DEVICE static int part() { return thread() / 32 % Traits::warps_v; }
  FP_DEVICE static int first_column() { return part() * S::value_columns; }

  FP_DEVICE LatentAttention(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  FP_DEVICE i32 look_up(const Place& place, int tile) const {
    const i32 token = place.unit.kv_begin + tile * tokens + thread();
    const bool exists = thread() < tokens && token < place.unit.kv_end;
    return exists ? KvRows<Traits::kv_source>(params, place.item).look_up(token) : -1;
  }

  FP_DEVICE void note_rows(const Place& place, int tile, i32 found) {
    if (thread() >= tokens) return;
    const i32 token = place.unit.kv_begin + tile * tokens + thread();
    constexpr KvSource source = Traits::kv_source;
    const bool exists = token < place.unit.kv_end && found >= 0 &&
                        is_used<source>(params, token, first_length_of<source>(params, place.item));
    const KvRows<Traits::kv_source> rows(params, place.item);
    shared.tiles.note(params, tile, thread(), rows, exists ? found : 0, exists ? token : 0, exists);
  }

  FP_DEVICE void begin(const Place& place) {
    note_rows(place, 0, look_up(place, 0));
    note_rows(place, 1, look_up(place, 1));
    if (thread() < Traits::tile_q) {
      shared.query_offset[thread()] = query_offset(params, place.item, place.unit, thread());
      shared.out_offset[place.parity][thread()] = out_offset<Traits>(params, place.item, place.unit, thread());
    }
    __syncthreads();
    load_query<Traits>(ptx::shared_address(shared.query), params, place.unit, thread(),
                       [&](u32 row) { return shared.query_offset[row]; });
    shared.tiles.copy(params, 0, thread());
    ptx::cp_async_commit();
  }

  // Computes a place whose first copies are issued; on return those of the next place are issued.
  FP_DEVICE void run(const Place* places, i32 here) {
    const Place& place = places[here];
    const Unit& unit = place.unit;
    float values[S::row_tiles][S::value_tiles][4] = {};
    SoftmaxState<S::row_tiles> state;
    state.clear();
    if (params.sinks) begin_with_sinks(state, WarpRows{params, place.item, unit, warp_row(), lane()});
    for (int tile = 0; unit.kv_begin + tile * tokens < unit.kv_end; ++tile) step(place, tile, state, values);
    ptx::cp_async_wait<0>();
    __syncthreads();  // all warps have read the tiles and Q
    const Place& after = places[next_place(ptx::opaque(here))];
    if (!after.done) begin(after);
    write_rows(state, values, place);
  }

 private:
  FP_DEVICE void step(const Place& place, int tile, SoftmaxState<S::row_tiles>& state,
                      float (&values)[S::row_tiles][S::value_tiles][4]) {
    const Unit& unit = place.unit;
    const i32 first = unit.kv_begin + tile * tokens;
    ptx::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived, and all warps have read the one before
    shared.tiles.convert(params, tile, thread());
    shared.tiles.copy(params, tile + 1, thread());
    ptx::cp_async_commit();
    const i32 next = look_up(place, tile + 2);
    const u32 rows = ptx::shared_address(shared.tiles.rows(tile));
    const u32 query =
        query_lane_address<Traits>(ptx::shared_address(shared.query) + warp_row() * S::QueryRows::stride, lane());
    float scores[S::row_tiles][tokens / 8][4];
    auto nothing = [](int) {};
    if constexpr (ScoreParts<Traits>::are_even) {
      ScoreParts<Traits>::multiply(scores, rows, query, part(), lane());
      shared.score_parts.add(scores, group(), part(), lane());
    } else {
      multiply_keys<Traits>(
          scores, rows, lane(),
          [&](u32(&a)[S::row_tiles][4], int step) { load_query_fragment<Traits>(a, ptx::opaque(query), step); },
          nothing);
    }
    const float scale = latent_score_scale<Traits>(params, place.item, unit);
    const WarpRows warp_rows{params, place.item, unit, warp_row(), lane()};
    if (transforms_scores<Traits>(params, scale)) transform_scores<Traits>(scores, scale, warp_rows, args, first);
    if (needs_mask<Traits>(unit, first, tokens)) mask_scores<Traits>(scores, warp_rows, args, first);
    if constexpr (reads_lists<Traits::kv_source>) shared.tiles.hide_missing(scores, tile, lane());
    state.update(scores, values, softmax_scale_of<Traits>(scale, args));
    const Probabilities<Traits, tokens / 8> probabilities(scores);
    multiply_values(values, probabilities, rows + first_column() * int(sizeof(typename S::Cache)), lane(), nothing);
    note_rows(place, tile + 2, next);
  }

  FP_DEVICE void write_rows(const SoftmaxState<S::row_tiles>& state, float (&values)[S::row_tiles][S::value_tiles][4],
                            const Place& place) {
    const Unit& unit = place.unit;
    const bool is_partial = place.item.partial_row >= 0;
    const float value_scale = latent_value_scale<Traits>(params, place.item, unit);
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row() + m * 16 + half * 8 + lane() / 4;
        const float sum = quad_sum(state.sum[m][half]);
        if (row >= unit.num_rows) continue;
        const float inverse = sum > 0.f ? value_scale / sum : 0.f;
        const i64 offset = shared.out_offset[place.parity][row] + first_column();
        for_each_column_pair<Traits>(values[m], half, lane(), [&](int at, float first, float second) {
          store_pair<Traits>(params, is_partial, offset + at, first * inverse, second * inverse);
        });
        if (lane() % 4 == 0 && first_column() == 0) {
          if (float* lse = lse_target(params, place.item, unit, row)) *lse = row_lse(state.maximum[m][half], sum);
        }
      }
  }
};

}  // namespace flashpage
