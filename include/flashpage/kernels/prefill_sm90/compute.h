// The computing warpgroups of prefill_sm90.
#pragma once
#include "flashpage/kernels/prefill_sm90/shared.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/st_global.h"
#include "flashpage/ptx/stmatrix.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/softmax_by_sum.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// A group has 64 rows. While it exponentiates the scores of one tile, the tensor cores multiply the probabilities of
// the tile before with their values, and another group's products: the groups take turns to issue.
template <class Traits>
struct PrefillCompute {
  using S = Shape<Traits>;
  using Warps = PrefillWarps<Traits>;
  using Shared = PrefillShared<Traits>;
  using Keys = typename Shared::Keys;
  using Values = typename Shared::Values;
  using QueryRows = typename Shared::QueryRows;
  using OutRows = typename Shared::OutRows;
  static constexpr int tokens = Shared::tokens;
  static constexpr int short_tokens = Traits::ShortKeyProduct::columns;  // of a last tile that needs no more; 0: none
  // Tiles of packed bits know nothing of a function beside them.
  static constexpr bool masks_all =
      masks_all_tiles<Traits> && (!has_mask_tiles<Traits> || (has_lane_bits<Traits> && Traits::Variant::has_mask));
  using KeyProduct = typename Traits::KeyProduct;
  using ShortKeyProduct = typename Traits::ShortKeyProduct;
  using Probabilities = flashpage::Probabilities<Traits, tokens / 8>;
  using Softmax = SoftmaxBySum<Traits>;
  static constexpr int turn_barrier = 1;                              // names: one a group
  static constexpr int group_barrier = turn_barrier + Warps::groups;  // and one more

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;
  int thread = threadIdx.x - Warps::loading * 32;
  int lane = threadIdx.x % 32;
  int group = thread / 128;
  int first_row = thread / 32 * 16 + cta_row();  // of the unit, the warp's
  u32 turn = 0;                                  // of the tile whose scores are multiplied
  u32 unit_turn = 0;                             // of its unit
  TileInTurn<Traits> tile{};                     // whose scores are multiplied, where the loading warps tell it

  FP_DEVICE PrefillCompute(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  // Where Q of two units fits, a unit's first scores are multiplied with the last values of the one before it.
  static constexpr bool joined = Shared::queries > 1;

  FP_DEVICE void run() {
    run_units([&](float (&scores)[1][tokens / 8][4]) { attend(scores); });
  }

 protected:
  // attend(scores): a unit whose first scores are there; it leaves with those of the next one.
  FP_DEVICE void run_units(auto&& attend) {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
    if (group == Warps::groups - 1) pass_turn();
    float scores[1][tokens / 8][4];
    first_scores(scores[0]);
    while (!tiled_place().place.done) {
      if (thread == 0) stamp_first<Traits>(params, Stamp::first_tile);
      attend(scores);
    }
    if (group == 0) await_turn();  // every arrival has its wait
    if (thread == 0) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

  FP_DEVICE void await_turn() const {
    if (Warps::take_turns) ptx::named_barrier(turn_barrier + group, 256);
  }
  FP_DEVICE void pass_turn() const {
    const int next = group + 1 == Warps::groups ? 0 : group + 1;
    if (Warps::take_turns) ptx::named_barrier_arrive(turn_barrier + next, 256);
  }

  // The present unit's.
  FP_DEVICE const TiledPlace& tiled_place() const { return shared.places[shared.place_ring.slot(unit_turn)]; }
  FP_DEVICE u8* query_tile(u32 unit_turn) const { return shared.query[shared.query_ring.slot(unit_turn)]; }

  FP_DEVICE void take_tile() {
    if constexpr (has_mask_tiles<Traits>) tile = from_first_lane(shared.visited[shared.key_ring.slot(turn)]);
  }
  FP_DEVICE void await_first_keys() {
    shared.place_ring.wait_full(unit_turn);
    if (tiled_place().place.done) return;
    shared.query_ring.wait_full(unit_turn);
    shared.key_ring.wait_full(turn);
    take_tile();
    if (!Warps::rotates && (Warps::by_rows || (!Warps::converts && params.query_box_rows == 0)))
      ptx::fence_before_products();
  }
  FP_DEVICE void first_scores(float (&scores)[tokens / 8][4]) {
    await_first_keys();
    await_turn();
    issue_scores<KeyProduct>(scores, turn);  // of whatever is there, where no unit is left
    pass_turn();
    finish_first_scores(scores);
  }
  FP_DEVICE void finish_first_scores(float (&scores)[tokens / 8][4]) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(scores);
    if (!tiled_place().place.done) release_tile(shared.key_ring, turn);
  }

  // Rows, and the keys before them, came by cp.async.
  FP_DEVICE void await_values(u32 turn, bool are_there) const {
    if (!are_there) shared.value_ring.wait_full(turn);
    if constexpr (Warps::by_rows) ptx::fence_before_products();
  }

  // What these hold is of no use any more. Said where a unit's end branches: ptxas would keep it through both ways, and
  // find no registers for products side by side (C7511).
  FP_DEVICE static void forget(float (&scores)[tokens / 8][4]) {
    float unset[tokens / 8][4];
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = unset[n][e];
  }

  FP_DEVICE void attend(float (&scores)[1][tokens / 8][4]) {
    const TiledPlace& tiled = tiled_place();
    const WorkItem& item = tiled.place.item;
    const Unit& unit = tiled.place.unit;
    const UnitTokens tokens_of_unit = tiled.tokens;
    float scale = score_scale_of<Traits>(params, unit);
    if constexpr (Warps::converts) scale *= shared.query_factors[shared.query_ring.slot(unit_turn)][first_row / 16];
    const float softmax_scale = softmax_scale_of<Traits>(scale);
    const bool transforms = transforms_scores<Traits>(params, scale);
    i32 first = has_mask_tiles<Traits> ? tile.first_token : tokens_of_unit.first;  // of the tile
    float values[1][S::value_tiles][4] = {}, factor[1][2];
    SoftmaxState<1> state;
    state.clear();
    const WarpRows warp_rows{params, item, unit, first_row, lane};
    if (params.sinks) begin_with_sinks(state, warp_rows);
    using Rows = typename select_type<keeps_rows<Traits>, TransformedRows<Traits>, NoRows>::type;
    [[maybe_unused]] const Rows rows(scale, warp_rows);
    auto look_through = [&](auto& scores) {
      const bool is_cut = first < tokens_of_unit.clear_begin || first > tokens_of_unit.clear_end;
      const bool masks = masks_all || tile.seen != Seen::all || is_cut;
      if (!(transforms || masks)) return;
      if constexpr (keeps_rows<Traits>) {
        transform_by_logit<Traits>(scores, warp_rows, args, first, [&](int, int half) { return rows.row[half]; });
      } else if (transforms) {
        transform_scores<Traits>(scores, scale, warp_rows, args, first);
      }
      if constexpr (has_lane_bits<Traits> && !Traits::Variant::has_mask) {
        const LaneBits bits(tiled.lane_bits, item.kv_len, tokens);
        if (tile.seen != Seen::all) mask_by_lane_bits<Traits>(scores, warp_rows, bits, tile);
        if (is_cut) mask_cut_ends<Traits>(scores, warp_rows.recomputed(), first);
      } else if (masks) {
        mask_scores<Traits, true>(scores, warp_rows, args, first);
      }
    };
    look_through(scores);
    Probabilities probabilities;
    Softmax::begin(state, scores, probabilities, softmax_scale);
    bool keys_there = false, values_there = false;  // seen before they are wanted
    // A tile, or the short one: its scores beside the values of the tile before.
    const auto step = [&]<class Product>(Product) {
      auto& now = reinterpret_cast<float (&)[1][Product::columns / 8][4]>(scores);
      if (!keys_there) shared.key_ring.wait_full(turn + 1);
      ++turn;
      if constexpr (has_mask_tiles<Traits>) {
        take_tile();
        first = tile.first_token;
      }
      if constexpr (Warps::by_rows) await_values(turn - 1, values_there);
      await_turn();
      issue_scores<Product>(now[0], turn);
      if constexpr (!Warps::by_rows) await_values(turn - 1, values_there);
      issue_values<tokens>(values[0], probabilities, turn - 1, true);
      values_there = shared.value_ring.is_full(turn);
      keys_there = shared.key_ring.is_full(turn + 1);
      // Both: the last products of values end some ten cycles after they could be issued, and what they read is free.
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(now[0]);
      ptx::wgmma_settle(values[0]);
      release_tile(shared.key_ring, turn);
      release_tile(shared.value_ring, turn - 1);
      look_through(now);
      if (Softmax::run(state, now, probabilities, softmax_scale, factor)) state.rescale(values, factor);
    };
    // The last tile's values, and the next unit's first scores behind them.
    const auto finish = [&]<class Product>(Product) {
      await_values(turn, values_there);
      ++unit_turn;
      if constexpr (joined) {
        ++turn;
        await_first_keys();
        await_turn();
        issue_values<Product::columns>(values[0], probabilities, turn - 1, false);
        issue_scores<KeyProduct>(scores[0], turn);
      } else {
        await_turn();
        issue_values<Product::columns>(values[0], probabilities, turn++, false);
      }
      pass_turn();
      ptx::wgmma_wait<joined ? 1 : 0>();
      ptx::wgmma_settle(values[0]);
    };
#pragma unroll 1
    while (has_mask_tiles<Traits> ? !tile.is_last : (first += tokens) + short_tokens < tokens_of_unit.end)
      step(KeyProduct{});
    bool ends_short = false;
    if constexpr (short_tokens > 0) {
      ends_short = first < tokens_of_unit.end;
      if (ends_short) {
        forget(scores[0]);
        step(ShortKeyProduct{});
        forget(scores[0]);
        finish(ShortKeyProduct{});
      }
    }
    if (!ends_short) {
      if constexpr (short_tokens > 0) forget(scores[0]);
      finish(KeyProduct{});
    }
    release_tile(shared.value_ring, turn - 1);
    write(state, values[0], tiled.place, query_tile(unit_turn - 1));
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    __syncwarp();
    release(shared.place_ring, unit_turn - 1);
    if constexpr (joined) {
      finish_first_scores(scores[0]);
    } else {
      first_scores(scores[0]);
    }
  }

  // Of the unit, the CTA's first.
  FP_DEVICE int cta_row() const {
    return Traits::ctas == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * params.cta_rows;
  }

  FP_DEVICE void release_tile(const auto& ring, u32 turn) const { flashpage::release_tile<Traits>(ring, turn, lane); }
  FP_DEVICE void release(const auto& ring, u32 turn) const {
    if (lane == 0) ring.release(turn);
  }

  // scores = Q K^T of the group's rows and one tile, as much of it as the product takes.
  template <class Product, int token_tiles>
  FP_DEVICE void issue_scores(float (&scores)[token_tiles][4], u32 turn) const {
    const ptx::Matrix query(ptx::shared_address(query_tile(unit_turn)) + group * 64 * 128, 0);
    const ptx::Matrix keys(ptx::shared_address(shared.keys[shared.key_ring.slot(turn)]), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Keys::padded_bytes / 32; ++step) {
      const int block = step / 4, in_block = step % 4 * 32;
      Product::multiply(scores, query.at(block * QueryRows::block_bytes + in_block),
                        keys.at(block * Keys::block_bytes + in_block), step > 0);
    }
    ptx::wgmma_commit();
  }

  // values += P V of the first `used` tokens of a tile. `pass`: the turn, shortly before the last step, so that the
  // next group's products follow at once.
  template <int used>
  FP_DEVICE void issue_values(float (&values)[S::value_tiles][4], const Probabilities& probabilities, u32 turn,
                              bool pass) const {
    constexpr int steps = used / 16;
    const ptx::Matrix tile(ptx::shared_address(shared.values[shared.value_ring.slot(turn)]), Values::block_bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (pass && step == steps - 2) pass_turn();
      Traits::ValueProduct::multiply(values, probabilities.fragment[step][0], tile.at(step * 16 * 128), true);
    }
    ptx::wgmma_commit();
  }

  // A finished unit: rows to the output through the tile of Q, where they become whole lines or boxes, or to the
  // partials. Whichever way, the slot of Q is released once: who loads the next one knows what it finds.
  FP_DEVICE void write(SoftmaxState<1>& state, float (&values)[S::value_tiles][4], const Place& place, u8* tile) const {
    const WorkItem item = place.item;  // read once: between stores the compiler would read the place again
    Unit unit = place.unit;
    if constexpr (Traits::ctas > 1) unit.num_rows = min_of(unit.num_rows, cta_row() + params.cta_rows);
    // Rows as 64 bits are not kept through the tiles: registers are few.
    const int first_row = static_cast<int>(ptx::opaque(this->first_row)),
              group = static_cast<int>(ptx::opaque(this->group));
    const bool is_partial = item.partial_row >= 0;
    const float value_scale = value_scale_of(params, unit.kv_head);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(state.sum[0][half]);
      // A row that has seen a token has seen its maximum: its sum is one or more.
      const float inverse = sum[half] > 0.f ? value_scale * ptx::reciprocal_approx(sum[half]) : 0.f;
#pragma unroll
      for (int n = 0; n < S::value_tiles; ++n) {
        values[n][half * 2] *= inverse;
        values[n][half * 2 + 1] *= inverse;
      }
    }
    if (is_partial) {
      release(shared.query_ring, unit_turn - 1);
      store_partial(values, item, unit, first_row);
    } else {
      ptx::named_barrier(group_barrier + group, 128);  // the group's products have read Q
      put_rows(values, first_row - cta_row(), tile);
      if (Shared::leave_by_boxes(params, item, unit, cta_row())) {
        ptx::fence_before_bulk_copies();
        __syncwarp();
        release(shared.query_ring, unit_turn - 1);
      } else {
        copy_out(item, unit, first_row, tile);
      }
    }
    // Behind the rows: their fence would wait for these stores.
    if (is_partial || params.lse) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < unit.num_rows)
          *lse_target(params, item, unit, row) = row_lse(state.maximum[0][half], sum[half]);
      }
    }
  }

  // The warp's rows into the tile, from `first_row` of the CTA.
  FP_DEVICE void put_rows(const float (&values)[S::value_tiles][4], int first_row, u8* tile) const {
    using Out = typename Traits::Out;
    if constexpr (Warps::transposes) {  // a lane's columns of two tiles are neighbours
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
          *reinterpret_cast<u32*>(tile + OutRows::byte_offset(first_row + half * 8 + lane / 4, at * 2)) =
              ptx::pack2<Out>(first, second);
        });
      }
    } else {
      const u32 rows = OutRows::lane_address(ptx::shared_address(tile), first_row + lane % 16, lane / 16);
#pragma unroll
      for (int n = 0; n < S::value_tiles; n += 2) {
        u32 matrices[4];  // two of 8 rows of each tile; zeros where no columns are: Q has its padding there
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&sums)[4] = values[n + i / 2];
          matrices[i] = (n + i / 2) * 8 < S::value_columns ? ptx::pack2<Out>(sums[i % 2 * 2], sums[i % 2 * 2 + 1]) : 0;
        }
        ptx::stmatrix_x4(OutRows::at_chunk(rows, n), matrices);
      }
    }
  }

  FP_DEVICE void store_partial(const float (&values)[S::value_tiles][4], const WorkItem& item, const Unit& unit,
                               int first_row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane / 4;
      if (row >= unit.num_rows) continue;
      const i64 offset = out_offset<Traits>(params, item, unit, row);
      for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
        store_pair<Traits>(params, true, offset + at, first, second);
      });
    }
  }

  // The warp's rows to the output, 16 bytes a lane. All are read before the first is stored, so that Q of a unit to
  // come waits for no store.
  FP_DEVICE void copy_out(const WorkItem& item, const Unit& unit, int first_row, const u8* tile) const {
    constexpr int chunks = Traits::head_dim_vo / 8, parts = ceil_div(16 * chunks, 32);
    uint4 part[parts];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
      if (row < 16)
        part[i] = *reinterpret_cast<const uint4*>(tile + OutRows::chunk_offset(first_row - cta_row() + row, chunk));
    }
    __syncwarp();
    release(shared.query_ring, unit_turn - 1);
    const u64 mine = out_offset<Traits>(params, item, unit, first_row + lane % 16);  // a row's is found once
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
      const u64 offset = __shfl_sync(0xffffffff, mine, row) + chunk * 8;
      const bool is_there = row < min_of(16, unit.num_rows - first_row);
      ptx::store_global(static_cast<typename Traits::Out*>(params.out) + offset, part[i], is_there);
    }
  }
};

}  // namespace flashpage
