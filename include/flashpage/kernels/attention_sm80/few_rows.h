// Attention of few packed rows (decode, speculative verify) on mma.sync; its time is the time to read K and V.
//
// The warps of a CTA share one row tile and alternate on the tokens. Each warp has its own ring of cp.async stages and
// waits for no other warp before the unit ends, when their partial softmax states are combined through shared memory.
//
// With two stages or more, the copies of a later step are issued ahead of a step's products, to the stage that the step
// before has read. A single stage is refilled by halves: the next keys are copied when the scores have been multiplied,
// the next values when the values have been.
//
// Rows in formats (formats/format.h) are copied as they are stored. The warp converts the keys of a stage to a 16-bit
// tile, and then its values to the same place.
#pragma once
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/load/format_rows.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/query_fragments.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct FewRowsShared {
  using S = Shape<Traits>;
  using Stored = StoredRows<Traits>;
  static constexpr int key_bytes = Stored::key_bytes(S::warp_tokens), value_bytes = Stored::value_bytes(S::warp_tokens);
  static constexpr int stage_bytes = key_bytes + value_bytes;
  // After the loop a warp's ring holds its accumulator in fp32.
  static constexpr int value_pitch = S::value_columns + 4;  // floats; the pad spreads rows over banks
  static constexpr int exchange_bytes = Traits::tile_q * value_pitch * 4;
  static constexpr int ring_bytes = round_up(max_of(Traits::stages * stage_bytes, exchange_bytes), 128);

  alignas(128) u8 query[S::QueryRows::bytes(Traits::tile_q)];
  alignas(128) u8 ring[Traits::warps_kv][ring_bytes];
  // Keys that are rotated; keys, and then values, that are converted.
  alignas(128) u8 finished[Traits::warps_kv][Stored::finished_bytes(S::warp_tokens)];
  float maximum[Traits::warps_kv][Traits::tile_q];
  float sum[Traits::warps_kv][Traits::tile_q];
};

template <class Traits>
struct FewRows {
  using S = Shape<Traits>;
  using Cache = typename S::Cache;
  using Shared = FewRowsShared<Traits>;
  using Stored = StoredRows<Traits>;
  static constexpr int tokens = S::warp_tokens;  // of one stage
  static constexpr int stages = Traits::stages;
  static constexpr int step_tokens = Traits::tile_kv;  // of all warps together
  static constexpr bool query_in_registers = S::key_steps * S::row_tiles <= 8;
  static constexpr bool by_halves = stages == 1;
  static constexpr int ahead = by_halves ? 1 : stages - 1;    // steps whose copies are issued before the first one
  static constexpr int pending = by_halves ? 1 : stages - 2;  // groups that may be in flight after a wait
  static_assert(Traits::warps_q == 1 && (tokens == 16 || tokens == 32));
  static_assert(!by_halves || !has_formats<Traits>, "a stage's scales are read after its scores");

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;
  int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  FP_DEVICE FewRows(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {
    zero_key_padding();
    zero_padding<typename S::Query, Traits::head_dim_qk>(shared.query, Traits::tile_q, thread, S::threads);
    if constexpr (S::rotate)
      zero_padding<typename S::Key, Traits::head_dim_qk>(shared.finished[warp], tokens, lane, 32);
  }

  // The accumulators of a unit, once they lay in the ring, leave padding that is not zero.
  FP_DEVICE void zero_key_padding() {
    for (int stage = 0; stage < stages && !has_formats<Traits>; ++stage)
      zero_padding<Cache, Traits::head_dim_qk>(shared.ring[warp] + stage * Shared::stage_bytes, tokens, lane, 32);
  }

  // The warp's ring is found again for each use on 12.x, where NVRTC has no register for it.
  FP_DEVICE u8* key_stage(int step) {
    return shared.ring[ptx::opaque_from<120>(threadIdx.x) / 32] + step % stages * Shared::stage_bytes;
  }

  // The first token of this warp in a step.
  FP_DEVICE i32 first_token(const Unit& unit, int step) const {
    return unit.kv_begin + step * step_tokens + warp * tokens;
  }
  FP_DEVICE i32 look_up(const KvRows<Traits::kv_source>& rows, const Unit& unit, int step) const {
    i32 token = first_token(unit, step) + lane % tokens;
    return token < unit.kv_end ? rows.look_up(token) : 0;
  }

  // Issues the copies of a step's keys, values or both.
  template <bool keys = true, bool values = true>
  FP_DEVICE void load_rows(const Unit& unit, const KvRows<Traits::kv_source>& rows, i32 found, int step,
                           int value_column) {
    i32 first = first_token(unit, step), count = unit.kv_end - first;
    i32 token = min_of(first + lane % tokens, max_of(unit.kv_end - 1, 0));
    u8* stage = key_stage(step);
    if constexpr (has_formats<Traits>) {
      load_stored<typename Stored::Keys>(params.k, params.key_scales, rows, found, token, unit.kv_head, 0, count,
                                         stage);
      load_stored<typename Stored::Values>(params.v, params.value_scales, rows, found, token, unit.kv_head,
                                           value_column, count, stage + Shared::key_bytes);
    } else {
      auto copy = [&]<int columns, int chunk_bytes>(const KvView& view, u8* stage, int column) {
        u64 mine = reinterpret_cast<u64>(rows.template row<Cache>(view, found, token, unit.kv_head, column));
        auto source = [&](u32 row) { return reinterpret_cast<const Cache*>(__shfl_sync(0xffffffff, mine, row)); };
        RowCopy<Cache, columns, 32, chunk_bytes>::template run<tokens>(ptx::shared_address(stage), lane, count, source);
      };
      if constexpr (keys)
        copy.template operator()<Traits::head_dim_qk, copy_bytes<Cache, Traits::head_dim_qk>>(params.k, stage, 0);
      if constexpr (values)
        copy.template operator()<S::value_columns, S::value_copy_bytes>(params.v, stage + Shared::key_bytes,
                                                                        value_column);
    }
  }
  // Copies rows of K or V, and their scales, as they are stored.
  template <class Rows>
  FP_DEVICE void load_stored(const KvView& view, const KvView& scales, const KvRows<Traits::kv_source>& rows, i32 found,
                             i32 token, i32 head, int column, i32 count, u8* stage) {
    const auto of_lanes = [](const u8* mine) {
      return [address = reinterpret_cast<u64>(mine)](u32 row) {
        return reinterpret_cast<const u8*>(__shfl_sync(0xffffffff, address, row));
      };
    };
    Rows::template copy<tokens, 32>(
        stage, lane, count, of_lanes(rows.template row<u8>(view, found, token, head, Rows::value_offset(column))),
        of_lanes(rows.template row<u8>(scales, found, token, head, Rows::scale_offset(column))));
  }

  // The shared address of the keys that the score product reads.
  FP_DEVICE u32 finished_keys(int step, i32 first) {
    const u8* keys = key_stage(step);
    u8* finished = shared.finished[warp];
    if constexpr (has_formats<Traits>) {
      Stored::template convert_keys<tokens, 32>(keys, finished, lane);
      __syncwarp();
      keys = finished;
    }
    if constexpr (S::rotate) {
      rotate_rows<Cache, typename S::Key, Traits::head_dim_qk>(
          keys, finished, tokens, params.rope_scale, params.rope_theta, lane, 32,
          [&](int row) { return static_cast<float>(first + row); });
      __syncwarp();
      keys = finished;
    }
    return ptx::shared_address(keys);
  }
  // As finished_keys, once the scores have been multiplied.
  FP_DEVICE u32 finished_values(int step) {
    u8* stage = key_stage(step) + Shared::key_bytes;
    if constexpr (has_formats<Traits>) {
      __syncwarp();
      Stored::template convert_values<tokens, 32>(stage, shared.finished[warp], lane);
      __syncwarp();
      return ptx::shared_address(shared.finished[warp]);
    }
    return ptx::shared_address(stage);
  }

  // Nothing is loaded before a unit starts: decode has few units a CTA and two CTAs an SM, so units do not overlap.
  FP_DEVICE void begin(const Place&) {}

  FP_DEVICE void run(const Place* places, i32 here) {
    const Place& place = places[here];
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
    int column = S::first_value_column(place.pass);
    KvRows<Traits::kv_source> rows(params, item);
    int steps = ceil_div(unit.kv_end - unit.kv_begin, step_tokens);
    i32 found[ahead + 1];
#pragma unroll
    for (int i = 0; i <= ahead; ++i) found[i] = look_up(rows, unit, i);
    load_query<Traits>(ptx::shared_address(shared.query), params, unit, thread,
                       [&](u32 row) { return query_offset(params, item, unit, row); });
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if constexpr (by_halves) {
        load_rows<true, false>(unit, rows, found[i], i, column);
        ptx::cp_async_commit();
        load_rows<false, true>(unit, rows, found[i], i, column);
      } else {
        load_rows(unit, rows, found[i], i, column);
      }
      ptx::cp_async_commit();
    }
    i32 next = found[ahead];

    float values[S::row_tiles][S::value_tiles][4] = {};
    SoftmaxState<S::row_tiles> state;
    state.clear();
    const WarpRows warp_rows{params, item, unit, 0, lane};
    if (warp == 0 && params.sinks) begin_with_sinks(state, warp_rows);
    float scale = score_scale_of<Traits>(params, item, unit) * KeyFormatOf<Traits>::left_out;
    ptx::cp_async_wait<pending>();
    __syncthreads();  // all threads have copied Q
    if constexpr (S::rotate) {
      rotate_query<Traits>(shared.query, params, item, unit, thread);
      __syncthreads();
    }
    using Query = QueryFragments<Traits, query_in_registers>;
    u32 query = Query::lane_address(ptx::shared_address(shared.query), lane);
    typename Query::Registers query_registers;
    Query::keep(query_registers, query, lane);
    auto query_fragment = [&](u32(&a)[S::row_tiles][4], int step) {
      Query::take(a, query_registers, query, lane, step);
    };

    for (int step = 0; step < steps; ++step) {
      ptx::cp_async_wait<pending>();
      __syncwarp();
      if constexpr (!by_halves) {
        load_rows(unit, rows, next, step + ahead, column);
        ptx::cp_async_commit();
        next = look_up(rows, unit, step + ahead + 1);
      }
      i32 first = first_token(unit, step);
      if (first >= unit.kv_end) continue;
      float scores[S::row_tiles][tokens / 8][4];
      auto nothing = [](int) {};
      multiply_keys<Traits>(scores, finished_keys(step, first), lane, query_fragment, nothing);
      if constexpr (has_formats<Traits>) Stored::Keys::scale_tokens(scores, key_stage(step), lane);
      if constexpr (by_halves) {
        __syncwarp();  // all lanes have read the keys
        load_rows<true, false>(unit, rows, next, step + ahead, column);
        ptx::cp_async_commit();
      }
      if (transforms_scores<Traits>(params, scale)) transform_scores<Traits>(scores, scale, warp_rows, args, first);
      if (needs_mask<Traits>(unit, first, tokens)) mask_scores<Traits>(scores, warp_rows, args, first);
      state.update(scores, values, softmax_scale_of<Traits>(scale, args));
      if constexpr (Stored::scales_probabilities)
        Stored::Values::scale_tokens(scores, key_stage(step) + Shared::key_bytes, lane);
      Probabilities<Traits, tokens / 8> probabilities(scores);
      if constexpr (by_halves) {
        ptx::cp_async_wait<pending>();  // this step's values have arrived
        __syncwarp();
      }
      multiply_values(values, probabilities, finished_values(step), lane, nothing);
      if constexpr (by_halves) {
        __syncwarp();  // all lanes have read the values
        load_rows<false, true>(unit, rows, next, step + ahead, column);
        ptx::cp_async_commit();
        next = look_up(rows, unit, step + ahead + 1);
      }
    }
    ptx::cp_async_wait<0>();
    __syncwarp();
    combine(state, values, item, unit, column);
  }

 private:
  // Combines the warps' states and writes the rows.
  FP_DEVICE void combine(SoftmaxState<S::row_tiles>& state, float (&values)[S::row_tiles][S::value_tiles][4],
                         const WorkItem& item, const Unit& unit, int column) {
    float* mine = reinterpret_cast<float*>(shared.ring[warp]);
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = m * 16 + half * 8 + lane / 4;
        float sum = quad_sum(state.sum[m][half]);
        if (row >= unit.num_rows) continue;
        if (lane % 4 == 0) {
          shared.maximum[warp][row] = state.maximum[m][half];
          shared.sum[warp][row] = sum;
        }
        for_each_column_pair<Traits>(values[m], half, lane, [&](int at, float first, float second) {
          *reinterpret_cast<float2*>(mine + row * Shared::value_pitch + at) = make_float2(first, second);
        });
      }
    __syncthreads();
    write_rows(item, unit, column);
    __syncthreads();  // the rings and Q are free again
    zero_key_padding();
  }

  FP_DEVICE void write_rows(const WorkItem& item, const Unit& unit, int column) {
    constexpr int pairs = S::value_columns / 2;
    float value_scale = out_factor_of<Traits>(params, item, unit.kv_head) * ValueFormatOf<Traits>::left_out;
    for (int i = thread; i < unit.num_rows * pairs; i += S::threads) {
      int row = i / pairs, at = i % pairs * 2;
      float maximum = shared.maximum[0][row];
#pragma unroll
      for (int w = 1; w < Traits::warps_kv; ++w) maximum = fmaxf(maximum, shared.maximum[w][row]);
      float total = 0.f, first = 0.f, second = 0.f;
#pragma unroll
      for (int w = 0; w < Traits::warps_kv; ++w) {
        float weight = state_weight(shared.maximum[w][row], maximum);
        const float* values = reinterpret_cast<const float*>(shared.ring[w]) + row * Shared::value_pitch + at;
        total += weight * shared.sum[w][row];
        first += weight * values[0];
        second += weight * values[1];
      }
      float inverse = total > 0.f ? value_scale / total : 0.f;
      i64 offset = out_offset<Traits>(params, item, unit, row) + column + at;
      store_pair<Traits>(params, item.partial_row >= 0, offset, first * inverse, second * inverse);
      if (at == 0) {
        if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
      }
    }
  }
};

}  // namespace flashpage
