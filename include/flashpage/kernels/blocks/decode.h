// Decode over vLLM's caches of blocks on mma.sync: paged_attention_v1 and _v2.
//
// Persistent CTAs divide all tokens of all sequences and heads equally (kernels/blocks/steps.h). The warps of a CTA
// alternate on the tokens. Each has its own ring of cp.async stages, which continues across the ends of sequences: a
// warp waits for others only where their states are combined.
#pragma once
#include "flashpage/kernels/blocks/scores.h"
#include "flashpage/kernels/blocks/steps.h"
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/thread_index.h"
#include "flashpage/tile/load/half_query.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/product/query_fragments.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct BlockDecodeShared {
  using S = Shape<Traits>;
  using Values = ValueColumns<typename S::Cache, S::value_columns, S::warp_tokens>;
  static constexpr int key_bytes = S::KeyRows::tile_bytes;
  static constexpr int stage_bytes = key_bytes + Values::tile_bytes;
  // At a unit's end the stage that was read last holds the warp's accumulators, eight rows at a time.
  static constexpr int value_pitch = S::value_columns + 8;  // floats; the pad spreads rows over banks
  // Starts after the keys if they have padding, which is zero and must stay zero.
  static constexpr int exchange_begin = S::KeyRows::padded_bytes > S::KeyRows::used_bytes ? key_bytes : 0;
  static_assert(exchange_begin + 8 * value_pitch * 4 <= stage_bytes);

  alignas(128) u8 ring[Traits::warps_kv][Traits::stages][stage_bytes];
  alignas(128)
      u8 query[Traits::stages][S::QueryRows::bytes(Traits::tile_q)];  // of the runs that begin in the stages in flight
  // Each warp advances its own cursor. Steps in flight are in shared memory, because in registers they would displace
  // accumulators.
  static constexpr int most_steps = 8;
  static_assert(Traits::stages + 1 <= most_steps);
  BlockCursor<Traits::tile_kv> cursors[Traits::warps_kv];
  BlockStep steps[Traits::warps_kv][most_steps];
  BlockShare<Traits::warps_kv> share;
  float maximum[Traits::warps_kv][8];
  float sum[Traits::warps_kv][8];
};

// Traits::shared_limit: the shared memory that a CTA can have on the card.
template <class Traits>
struct BlockDecodeFits {
  static constexpr bool value = sizeof(BlockDecodeShared<Traits>) <= Traits::shared_limit;
};

// As many stages as fit Traits::ring_bytes and the shared memory, at most Traits::stages.
template <class Given>
struct BlockDecode {
  static constexpr int most_stages = stages_in_flight<Given>(Given::tile_kv);
  using Traits = WithStages<Given, fitting_stages<BlockDecodeFits, Given, most_stages, 1, 2>()>;
  using S = Shape<Traits>;
  using Cache = typename S::Cache;
  using Query = typename S::Query;
  using Shared = BlockDecodeShared<Traits>;
  using Values = typename Shared::Values;
  using Work = BlockWork<Traits::tile_kv>;
  using Fragments = QueryFragments<Traits, (S::key_steps * S::row_tiles <= 8)>;
  static constexpr int threads = S::threads, shared_bytes = sizeof(Shared);
  static constexpr int ctas_per_sm = Traits::ctas_per_sm, cluster_rows = 0;
  static_assert(shared_bytes <= Traits::shared_limit, "two stages are more than a CTA has: take fewer warps");
  static constexpr int tokens = S::warp_tokens, stages = Traits::stages;  // tokens of a warp's stage
  static_assert(Traits::warps_q == 1 && stages >= 2 && (tokens == 16 || tokens == 32));

  const BlockAttentionParams& params;
  Shared& shared;
  int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i32 left = 0;  // steps of the current run that are not taken yet

  FP_DEVICE static void run(const BlockAttentionParams& params) {
    extern __shared__ __align__(128) u8 memory[];
    BlockDecode(params, *reinterpret_cast<Shared*>(memory)).run();
  }

 private:
  // The state of a unit while it is computed.
  struct State {
    SoftmaxState<S::row_tiles> softmax;
    float values[S::row_tiles][S::value_tiles][4];
    typename Fragments::Registers query_registers;
    u32 query;    // lane address of Q's fragments
    float scale;  // of scores, to base 2
  };

  FP_DEVICE BlockDecode(const BlockAttentionParams& params, Shared& shared) : params(params), shared(shared) {}

  FP_DEVICE void run() {
    zero_tile_padding();
    ptx::grid_dependency_wait();
    const Work work{params};
    find_share(shared.share, work, thread);
    __syncthreads();
    if (thread == 0 && params.cuts) params.cuts[blockIdx.x].num_pieces = 0;
    if (lane == 0) shared.cursors[warp].start(work, shared.share);
    i32 block = look_up(take_step(work, 0));
    auto load_next = [&](int index, int slot) {
      load(step_of(index), block, slot);
      ptx::cp_async_commit();
      block = look_up(take_step(work, index + 1));
    };
    for (int index = 0; index < stages - 1; ++index) load_next(index, index);
    State state;
    for (int index = 0, slot = 0;; ++index) {
      ptx::cp_async_wait<stages - 2>();
      __syncwarp();
      const BlockStep& step = step_of(index);
      if (step.length == 0) break;
      load_next(index + stages - 1, slot == 0 ? stages - 1 : slot - 1);
      if (step.flags & BlockStep::begins) begin(state, step);
      if (step.flags & BlockStep::is_live) compute(state, step, slot);
      if (step.flags & BlockStep::ends) combine(state, step, slot);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    ptx::cp_async_wait<0>();
    write_empty_sequences(work);
    ptx::grid_dependency_launch();
  }

  FP_DEVICE i32 first_row(const BlockStep& step) const { return step.row_tile * Traits::tile_q; }
  FP_DEVICE i32 first_head(const BlockStep& step) const { return step.kv_head * params.group + first_row(step); }
  FP_DEVICE i32 num_rows(const BlockStep& step) const { return min_of(params.group - first_row(step), Traits::tile_q); }
  FP_DEVICE i32 first_token(const BlockStep& step) const { return step.token + warp * tokens; }

  // Zeros the columns that take part in products but do not exist.
  FP_DEVICE void zero_tile_padding() {
    for (int stage = 0; stage < stages; ++stage) {
      zero_padding<Cache, Traits::head_dim_qk, typename S::KeyRows>(shared.ring[warp][stage], tokens, lane, 32);
      zero_padding<Query, Traits::head_dim_qk>(shared.query[stage], Traits::tile_q, thread, threads);
    }
  }

  // The thread's index, from which addresses are computed again for each step: accumulators leave no registers for
  // them.
  FP_DEVICE static u32 thread_again() { return ptx::opaque_from<100>(threadIdx.x); }

  // ---------------------------------------------------------------- loading

  FP_DEVICE BlockStep& step_of(int index) const { return shared.steps[warp][index % Shared::most_steps]; }

  // Takes the next step. It is live if this warp has tokens in it that some row sees.
  FP_DEVICE BlockStep take_step(const Work& work, int index) {
    BlockStep& place = step_of(index);
    BlockStep step;
    if (left > 1) {
      step = step_of(index - 1).following(Traits::tile_kv);
    } else {
      if (lane == 0) place = shared.cursors[warp].next(work);
      __syncwarp();
      step = place;
    }
    left = step.left;
    const i32 first = first_token(step), last = min_of(first + tokens, step.length) - 1;
    bool is_live = first <= last;
    if (is_live && params.pattern.stride.divisor > 0) {
      const i32 head = first_head(step) + min_of(lane % Traits::tile_q, num_rows(step) - 1);
      const i32 offset = BlockRow::of(params, head, step.kv_head).offset;
      is_live = __any_sync(0xffffffff, sees_any(params.pattern, offset, first, last, step.length));
    }
    if (is_live) step.flags |= BlockStep::is_live;
    __syncwarp();
    if (lane == 0) place = step;
    __syncwarp();
    return step;
  }

  // The number of the block that holds this lane's token.
  FP_DEVICE i32 look_up(const BlockStep& step) const {
    const i32 token = first_token(step) + lane % tokens;
    if (token >= step.length || !(step.flags & BlockStep::is_live)) return 0;
    return params.block_tables[step.sequence * params.table_stride + (token >> params.log_block_size)];
  }

  FP_DEVICE void load(const BlockStep& step, i32 block, int slot) {
    if (step.length > 0 && (step.flags & BlockStep::begins)) {
      const Query* rows = static_cast<const Query*>(params.q) + step.sequence * params.q_row_stride +
                          first_head(step) * params.q_head_stride;
      // Opaque, because otherwise values derived from it would stay in registers for all steps.
      const int thread = ptx::opaque(threadIdx.x);
      copy_query<Traits, threads>(ptx::shared_address(shared.query[step.run % stages]), num_rows(step), thread,
                                  [&](u32 row) { return rows + row * params.q_head_stride; });
    }
    if (!(step.flags & BlockStep::is_live)) return;
    const u32 stage = ptx::shared_address(shared.ring[thread_again() / 32][slot]);
    load_keys(stage, step, block);
    if constexpr (sizeof(Cache) == 1) {
      if (params.log_block_size == 3) return load_values<8>(stage + Shared::key_bytes, step, block);
    }
    load_values<16>(stage + Shared::key_bytes, step, block);
  }

  FP_DEVICE void load_keys(u32 tile, const BlockStep& step, i32 block) const {
    constexpr int together = 32 / tokens, pieces = Traits::head_dim_qk * int(sizeof(Cache)) / 16;
    const int lane = thread_again() % 32;
    const int row = row_of_token<Cache>(lane % tokens), piece = lane / tokens;
    const i32 token = first_token(step) + lane % tokens, in_block = token & ((1 << params.log_block_size) - 1);
    const u32 to = tile + S::KeyRows::chunk_offset(row, piece);
    const u8* from = params.k + block * params.k_block_stride + step.kv_head * params.k_head_stride +
                     ((piece << params.log_block_size) + in_block) * 16;
#pragma unroll
    for (int pass = 0; pass < ceil_div(pieces, together); ++pass) {
      if (pieces % together && pass * together + piece >= pieces) continue;
      ptx::cp_async<16>(to + pass * together * S::KeyRows::piece_bytes,
                        from + (pass * together * 16 << params.log_block_size), token < step.length);
    }
  }

  // Copies parts of a column of `bytes`, whose tokens are in one block; neighbouring lanes copy neighbouring bytes of a
  // block. After the sequence's end it writes zeros, because a probability of 0 times NaN is NaN.
  template <int bytes>
  FP_DEVICE void load_values(u32 tile, const BlockStep& step, i32 block) const {
    constexpr int size = sizeof(Cache), parts = tokens * size / bytes, together = 32 / parts;
    constexpr int passes = ceil_div(Traits::head_dim_vo, together);
    static_assert(together % 8 == 0 && (parts == 2 || parts == 4));  // byte_offset is the same for every pass
    constexpr int part_tokens = bytes / size, log_part_tokens = part_tokens == 8 ? 3 : 4;
    static_assert(part_tokens == 1 << log_part_tokens);
    const int lane = is_fp8<Cache> ? ptx::opaque(threadIdx.x) % 32 : threadIdx.x % 32;  // opaque: as in load
    // Lanes are numbered by block, then by column, then by part of the column in the block.
    const int log_mine = min_of(params.log_block_size - log_part_tokens, parts == 2 ? 1 : 2),
              mask = (1 << log_mine) - 1;
    const int column = (lane >> log_mine) % together, blocks_before = (lane >> log_mine) / together;
    const int token_of_tile = ((blocks_before << log_mine) + (lane & mask)) * part_tokens;
    const i32 token = first_token(step) + token_of_tile, in_block = token & ((1 << params.log_block_size) - 1);
    const i64 mine = __shfl_sync(0xffffffff, block, token_of_tile);
    const u32 to = tile + Values::byte_offset(column, token_of_tile * size);
    const u8* from = params.v + mine * params.v_block_stride + step.kv_head * params.v_head_stride +
                     ((column << params.log_block_size) + in_block) * size;
    const int valid_bytes = max_of(0, min_of((step.length - token) * size, bytes));
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      if (Traits::head_dim_vo % together && pass * together + column >= Traits::head_dim_vo) continue;
      ptx::cp_async_first<bytes>(to + pass * together * Values::stride,
                                 from + (pass * together * size << params.log_block_size), valid_bytes);
    }
  }

  // ---------------------------------------------------------------- computing

  FP_DEVICE void begin(State& state, const BlockStep& step) const {
    __syncthreads();  // all warps have copied Q
    state.query = Fragments::lane_address(ptx::shared_address(shared.query[step.run % stages]), lane);
    Fragments::keep(state.query_registers, state.query, lane);
    state.scale = params.score_scale * log2_e * (params.k_scale ? *params.k_scale : 1.f);
    if constexpr (!is_same<typename S::Product, Query>)
      state.scale *= to_half_query(reinterpret_cast<u32(&)[S::key_steps * 4]>(state.query_registers));
    state.softmax.clear();
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::value_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.values[m][n][e] = 0.f;
    }
  }

  // Computed where they are used, because few tiles need them, and accumulators leave no registers for them.
  struct Rows {
    BlockRow of[S::row_tiles][2];
  };
  FP_DEVICE Rows rows_of(const BlockStep& step) const {
    Rows rows;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = min_of(m * 16 + half * 8 + lane / 4, num_rows(step) - 1);
        rows.of[m][half] = BlockRow::of(params, first_head(step) + row, step.kv_head);
      }
    return rows;
  }

  FP_DEVICE void compute(State& state, const BlockStep& step, int slot) const {
    const u32 thread = thread_again(), lane = thread % 32;
    const u32 stage = ptx::shared_address(shared.ring[thread / 32][slot]);
    const i32 first = first_token(step);
    float scores[S::row_tiles][tokens / 8][4];
    multiply_keys<Traits>(
        scores, stage, lane,
        [&](u32(&a)[S::row_tiles][4], int k_step) {
          Fragments::take(a, state.query_registers, state.query, lane, k_step);
        },
        [](int) {});
    // Softmax takes a row's maximum before it scales, which is right for positive scales alone. Slopes are 0 without
    // ALiBi.
    const bool scales_now = params.alibi_slopes || !(state.scale > 0.f);
    if (scales_now) bias_scores<Traits>(scores, rows_of(step).of, state.scale, first, step.length, lane);
    if (first + tokens > step.length || params.pattern.stride.divisor > 0)
      hide_scores<Traits>(scores, rows_of(step).of, params.pattern, first, step.length, lane);
    state.softmax.update(scores, state.values, scales_now ? 1.f : state.scale);
    Probabilities<Traits, tokens / 8> probabilities(scores);
    multiply_value_columns(state.values, probabilities, stage + Shared::key_bytes, lane);
  }

  // ---------------------------------------------------------------- results

  // Combines the warps' states and writes the rows, eight at a time. The stage that was read last is free until the
  // next load.
  FP_DEVICE void combine(State& state, const BlockStep& step, int slot) {
    const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32;
    float* mine = exchange(warp, slot);
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = m * 16 + half * 8;
        if (first >= num_rows(step)) continue;
        __syncwarp();  // other lanes may still read the stage
        const float sum = quad_sum(state.softmax.sum[m][half]);
        if (lane % 4 == 0) {
          shared.maximum[warp][lane / 4] = state.softmax.maximum[m][half];
          shared.sum[warp][lane / 4] = sum;
        }
#pragma unroll
        for (int n = 0; n < S::value_tiles; ++n)
          *reinterpret_cast<float2*>(mine + lane / 4 * Shared::value_pitch + n * 8 + lane % 4 * 2) =
              make_float2(state.values[m][n][half * 2], state.values[m][n][half * 2 + 1]);
        __syncthreads();
        write_rows(step, slot, first);
        __syncthreads();
      }
    if (ptx::thread_index() == 0 && (step.flags & BlockStep::is_continued) && !(step.flags & BlockStep::goes_on))
      note_cut(step);
  }

  FP_DEVICE float* exchange(int of_warp, int slot) const {
    return reinterpret_cast<float*>(shared.ring[of_warp][slot] + Shared::exchange_begin);
  }

  FP_DEVICE void note_cut(const BlockStep& step) const {
    const i32 num_pieces = Work{params}.pieces_from(step, shared.share.size);
    params.cuts[blockIdx.x] = {step.sequence, first_head(step), num_rows(step), num_pieces};
  }

  FP_DEVICE void write_rows(const BlockStep& step, int slot, int first) const {
    constexpr int pairs = S::value_columns / 2;
    const int rows = min_of(num_rows(step) - first, 8);
    const float value_scale = params.v_scale ? *params.v_scale : 1.f;
    for (int i = thread; i < rows * pairs; i += threads) {
      const int row = i / pairs, column = i % pairs * 2;
      float maximum = shared.maximum[0][row];
#pragma unroll
      for (int w = 1; w < Traits::warps_kv; ++w) maximum = fmaxf(maximum, shared.maximum[w][row]);
      float total = 0.f;
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < Traits::warps_kv; ++w) {
        const float weight = state_weight(shared.maximum[w][row], maximum);
        const float2 pair = *reinterpret_cast<const float2*>(exchange(w, slot) + row * Shared::value_pitch + column);
        total += weight * shared.sum[w][row];
        sum.x += weight * pair.x;
        sum.y += weight * pair.y;
      }
      const float inverse = total > 0.f ? value_scale / total : 0.f;
      write_pair(step, first + row, column, make_float2(sum.x * inverse, sum.y * inverse), maximum, total);
    }
  }

  // `maximum` (base 2) and `total` of the row's weights are written with its first columns.
  FP_DEVICE void write_pair(const BlockStep& step, int row, int column, float2 pair, float maximum, float total) const {
    const i32 head = first_head(step) + row;
    if (step.flags & (BlockStep::goes_on | BlockStep::is_continued)) {
      const i64 slot = 2 * blockIdx.x + (step.flags & BlockStep::goes_on ? 0 : 1), at = slot * Traits::tile_q + row;
      *reinterpret_cast<float2*>(params.partial_out + at * Traits::head_dim_vo + column) = pair;
      if (column == 0) params.partial_lse[at] = row_lse(maximum, total);
      return;
    }
    const u32 packed = ptx::pack2<Query>(pair.x, pair.y);
    if (params.partitions) {
      const i64 at = (static_cast<i64>(step.sequence) * params.num_q_heads + head) * params.partitions +
                     step.token / Work::partition_tokens;
      *reinterpret_cast<u32*>(static_cast<Query*>(params.tmp_out) + at * Traits::head_dim_vo + column) = packed;
      if (column == 0) {
        params.max_logits[at] = maximum * ln_2;
        params.exp_sums[at] = total;
      }
      if (step.length > Work::partition_tokens) return;  // other CTAs have parts of this sequence
    }
    *reinterpret_cast<u32*>(out_row(step.sequence, head) + column) = packed;
  }

  FP_DEVICE Query* out_row(i64 sequence, i32 head) const {
    return static_cast<Query*>(params.out) + sequence * params.out_row_stride + head * params.out_head_stride;
  }

  FP_DEVICE void write_empty_sequences(const Work& work) const {
    constexpr int pairs = S::value_columns / 2;
    for (i32 i = blockIdx.x; i < params.num_seqs; i += ptx::grid_size()) {
      if (work.length(i) > 0) continue;
      for (int at = thread; at < params.num_q_heads * pairs; at += threads)
        *reinterpret_cast<u32*>(out_row(i, at / pairs) + at % pairs * 2) = 0;
    }
  }
};

}  // namespace flashpage
