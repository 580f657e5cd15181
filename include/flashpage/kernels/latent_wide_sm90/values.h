// The two warpgroups of latent_wide_sm90 that sum values. In a pair both have this CTA's half of the columns: one for
// its own rows, one for those of the other CTA. Else each has half of the columns.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/output.h"
#include "flashpage/kernels/wide_scores.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct WideValues {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Output = WideOutput<Traits>;
  using Values = typename Output::Values;
  static constexpr int tokens = Shared::tokens, steps = tokens / 16;
  static constexpr int first_thread = 32 * WideRoles::first_of_values;
  static constexpr int columns = Traits::ValueProduct::columns, product_tiles = columns / 8;  // of a quarter
  static_assert(columns == Shared::quarter_panels * Tile::panel_columns);
  using Fragments = u32[steps][4];

  Shared& shared;
  const AttentionParams& params;
  u32 clearings = 0;

  FP_DEVICE WideValues(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    for_each_unit(shared, [&](const WidePlace& place) {
      Values values = {};
      // Counted in registers, because after an asm statement the compiler would read shared memory again.
      u32 use = place.use(0);
      const u32 end = use + place.blocks;
      // This CTA's scores say that its columns have arrived, which the other CTA's probabilities do not.
      if (Shared::is_pair && use != end) wait_for_scores(use);
      for (; use != end; ++use) add_block(place, values, use, end);
      if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::last_tile);
      const float2 sums = take_sums(Shared::message(place, end));
      const int rank = static_cast<int>(ptx::rank_among<Traits::ctas>()), half = Shared::is_pair ? rank % 2 : group();
      const int first_row = (rank ^ whose()) * Shared::rows + warp() * 16 + lane() / 4;
      Output{params, place.place, half, first_row, lane()}.write(values, sums);
      if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::written);
    });
  }

 private:
  // Computed wherever they are used, because few registers are left to hold them: the thread's number is opaque.
  FP_DEVICE static int thread() { return ptx::opaque(threadIdx.x) % 128; }  // of the warpgroup
  FP_DEVICE static int warp() { return ptx::opaque(threadIdx.x) / 32 % 4; }
  FP_DEVICE static int lane() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static int group() { return static_cast<int>(threadIdx.x) / 128 - WideRoles::first_of_values / 4; }
  // Whose rows: this CTA's (0), or the other one's (1).
  FP_DEVICE static int whose() { return Shared::is_pair ? group() : 0; }
  // The first or second of the warpgroup's quarters among those that are kept.
  FP_DEVICE static int quarter(int i) { return Shared::is_pair ? i : 2 * i + group(); }

  // `end`: of the unit's blocks.
  FP_DEVICE void add_block(const WidePlace& place, Values& values, u32 use, u32 end) {
    const u32 slot = Shared::slot(use);
    const ptx::Matrix of_values(ptx::shared_address(shared.kept_values[slot][quarter(0)]), Tile::panel_bytes);
    wait_for(Shared::message(place, use), Shared::probability_bytes + Shared::factor_bytes);
    const float2 factors = read_factors();
    // Marked factors are negative. All warps of both CTAs have the same mark, so they clear together.
    if (__any_sync(0xffffffff, factors.x != 1.f || factors.y != 1.f)) rescale_and_clear(place, values, factors, use);
    Fragments probabilities;
    read_probabilities(probabilities);
    mark_as_taken();
    // The next block's products of scores come first.
    if (Shared::is_pair && use + 1 != end) wait_for_scores(use + 1);
    ptx::wgmma_fence();
    issue_quarter<0>(values, probabilities, of_values);
    issue_quarter<1>(values, probabilities, of_values);
    ptx::wgmma_wait<1>();
    Shared::release_kept(shared.kept_empty[slot][quarter(0)], lane());
    ptx::wgmma_wait<0>();
    Shared::release_kept(shared.kept_empty[slot][quarter(1)], lane());
    ptx::wgmma_settle(values[0]);
    ptx::wgmma_settle(probabilities);
  }
  // Waits until a block's products of scores are almost complete.
  FP_DEVICE void wait_for_scores(u32 use) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.scored[Shared::scored_slot(use)][warp()]),
                       Shared::scored_phase(use));
  }
  // Issues values += P V for a quarter of V's columns.
  template <int i>
  FP_DEVICE static void issue_quarter(Values& values, const Fragments& probabilities, const ptx::Matrix& of_values) {
    // From quarter(0) to quarter(i).
    constexpr int first_byte = i * (Shared::is_pair ? 1 : 2) * Shared::quarter_bytes;
#pragma unroll
    for (int step = 0; step < steps; ++step)
      Traits::ValueProduct::multiply(reinterpret_cast<float (&)[product_tiles][4]>(values[0][i * product_tiles]),
                                     probabilities[step], of_values.at(first_byte + step * 16 * 128), true);
    ptx::wgmma_commit();
  }
  FP_DEVICE void read_probabilities(Fragments& probabilities) const {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint4 words = shared.probabilities[whose()][step][thread()];
      probabilities[step][0] = words.x;
      probabilities[step][1] = words.y;
      probabilities[step][2] = words.z;
      probabilities[step][3] = words.w;
    }
  }
  FP_DEVICE float2 read_factors() const { return shared.factors[whose()][thread()]; }
  // Multiplies earlier values as a block's maxima moved, and clears the block's tokens outside of the unit, which
  // single rows have loaded as zeros. No product is in flight.
  FP_DEVICE void rescale_and_clear(const WidePlace& place, Values& values, const float2& factors, u32 use) {
    const float factor[1][2] = {{fabsf(factors.x), fabsf(factors.y)}};
    WideSoftmax::rescale(values, factor);
    if (Shared::has_boxes && Shared::is_marked(factors.x)) clear_hidden(place, use);
  }
  FP_DEVICE float2 take_sums(u32 message) const {
    wait_for(message, Shared::factor_bytes);
    const float2 sums = read_factors();
    mark_as_taken();
    return sums;
  }
  // `bytes`: of a message from the other CTA. Its asynchronous stores complete this CTA's barrier, and are waited for
  // as those of the copy engine; a wait of the cluster's scope would also empty the L1.
  FP_DEVICE void wait_for(u32 message, int bytes) const {
    if (whose() == 0) return ptx::mbarrier_wait(ptx::shared_address(&shared.handed_over[warp()]), message & 1);
    const u32 barrier = ptx::shared_address(&shared.received[warp()]);
    if (lane() == 0) ptx::mbarrier_arrive_expect(barrier, bytes);
    ptx::mbarrier_wait(barrier, message & 1);
  }
  FP_DEVICE void mark_as_taken() const {
    const u32 barrier = ptx::shared_address(&shared.taken[warp()]);
    if (whose() == 0) return ptx::mbarrier_arrive(barrier);
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive_at(barrier, ptx::cluster_rank() ^ 1);
  }

  // Clears the values of a block's tokens outside of the unit: their memory may hold NaN, and 0 * NaN is NaN.
  // Scores of these tokens are hidden, so products of keys that still run may read either.
  FP_DEVICE void clear_hidden(const WidePlace& place, u32 use) {
    const Unit& unit = place.place.unit;
    const i32 first = place.first_token + static_cast<int>(use - place.use(0)) * tokens;
    if (first >= unit.kv_begin && first + tokens <= unit.kv_end) return;
    constexpr int chunks = Shared::quarter_panels * 8;
    for (int i = 0; i < 2; ++i) {
      // In a pair both warpgroups clear both quarters: neither waits for the other one.
      u8* tile = shared.kept_values[Shared::slot(use)][quarter(i)];
      for (int at = thread(); at < tokens * chunks; at += 128) {
        const int row = at / chunks, chunk = at % chunks;
        if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
        *reinterpret_cast<uint4*>(tile + Tile::chunk_offset(row, chunk)) = make_uint4(0, 0, 0, 0);
      }
    }
    ptx::fence_before_products();
    meet_at(shared.cleared[group()], clearings++);
  }
};

}  // namespace flashpage
