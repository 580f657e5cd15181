// The scoring warpgroup of latent_e4m3_sm90: scores, maxima, probabilities and their sums.
//
// Probabilities of 16 tokens are multiplied by the power of two by which their values are divided. A row's sum is that
// of the probabilities before this, and its maximum that of the scores plus the powers' exponents.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/query.h"
#include "flashpage/kernels/wide_scores.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/stmatrix.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/absent_rows.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct E4m3Scores {
  using Shared = E4m3Shared<Traits>;
  using Weights = typename Shared::Weights;
  static constexpr int tokens = Shared::tokens, tiles = tokens / 8, panel_bytes = Shared::panel_bytes;
  static constexpr int first_thread = 32 * WideRoles::first_scoring;
  using Scores = float[1][tiles][4];
  using Softmax = SoftmaxState<1>;
  static constexpr float above = Shared::above, headroom = Shared::headroom;
  // The powers of the steps of 16 tokens.
  struct Steps {
    float exponents[tokens / 16], inverses[tokens / 16];

    FP_DEVICE Steps(const float (&of_powers)[tokens / 16], const float (&of_inverses)[tokens / 16]) {
#pragma unroll
      for (int i = 0; i < tokens / 16; ++i) exponents[i] = of_powers[i], inverses[i] = of_inverses[i];
    }
  };

  // Where the operands of a block's products are in shared memory. They are found together, before the wait for the
  // block, because each takes a shuffle.
  struct Operands {
    ptx::Matrix terms, keys, rows, tail;
  };

  Shared& shared;
  const AttentionParams& params;
  // Opaque, because the compiler would otherwise read the thread's number again and again, and wait for it.
  int warp = static_cast<int>(ptx::opaque(threadIdx.x % 128 / 32)), lane = threadIdx.x % 32;
  u32 own_chunk = Weights::chunk_offset(warp * 16 + lane % 16, lane / 16);

  FP_DEVICE E4m3Scores(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::start);
    for_each_unit(shared, [&](const WidePlace& place) {
      shared.query_ring.wait_full(place.units_before);
      const u32 query = ptx::shared_address(shared.query);
      const float of_row = E4m3Query<Traits>::convert(query, warp * 16, lane, place.scale);
      if (lane < 16) shared.row_scales[warp * 16 + lane] = of_row;
      __syncwarp();
      ptx::fence_before_products();
      meet_at(shared.converted, place.units_before);
      Softmax softmax;
      softmax.clear();
      if (params.sinks) {
        begin_with_sinks(softmax, rows_of(place));
        lower(softmax);
      }
      ignore_absent_rows(softmax, rows_of(place));
      if (place.blocks > 0) score_blocks(place, softmax);
      shared.query_ring.release(place.units_before);
      finish(place, softmax);
    });
    if (threadIdx.x == first_thread) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  FP_DEVICE void score_blocks(const WidePlace& place, Softmax& softmax) const {
    const i32 partial = partial_blocks(place);
    u32 use = place.use(0);
#pragma unroll 1
    for (i32 left = place.blocks; left > 0; --left, ++use) {
      Scores scores;
      multiply_keys(scores, use);
      if (left == place.blocks && threadIdx.x == first_thread) stamp_first<Traits>(params, Stamp::first_tile);
      const auto& of_tokens = shared.of_tokens[shared.block_ring.slot(use)];
      if (left <= partial)
        hide_unseen(scores, place, rows_of(place), place.first_token + (place.blocks - left) * tokens);
      if ((of_tokens.present[0] & of_tokens.present[1]) != 0xffffffff) hide_missing(scores, of_tokens.present);
      const Steps steps = {of_tokens.exponents, of_tokens.inverses};
      shared.block_ring.release(use);
      const float* const of_rows = shared.row_scales + warp * 16 + lane / 4;
      const float scale[2] = {of_rows[0], of_rows[8]};
      float factor[1][2];
      const u32 message = use + place.units_before;
      const bool is_free = shared.message_ring.is_empty(message);
      const bool moved = raise(softmax, scores, steps, scale, factor);
      exponentiate(softmax, scores, steps, scale);
      // After a vote the compiler knows that no warp diverges, and needs no instructions to join it.
      if (__any_sync(0xffffffff, !is_free)) shared.message_ring.wait_empty(message);
      hand_over(scores, factor, moved, message);
    }
  }

  // Adds the products of all groups of columns to the tail's scores, one group at a time, because there are registers
  // for one. Scales are read before products are issued, because these take all of the shared memory's time.
  FP_DEVICE void multiply_keys(Scores& scores, u32 use) const {
    const auto& all = shared.of_tokens[shared.block_ring.slot(use)];
    const Operands operands = operands_of(shared.block_ring.slot(use));
    Scores products;
    float of_tokens[tiles][2];
    shared.block_ring.wait_full(use);
    read_scales(of_tokens, all.scales[0]);
    issue_tail(scores, operands);
    issue_group(products, operands, 0);
#pragma unroll
    for (int group = 0; group < Shared::groups; ++group) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(products[0]);
      if (group == 0) ptx::wgmma_settle(scores[0]);
      const float of_tail = group == 0 && Shared::has_e4m3_tail ? all.of_tail : 1.f;
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float product = products[0][n][e], of_token = of_tokens[n][e % 2];
          float& score = scores[0][n][e];
          if (group == 0 && Shared::has_e4m3_tail) score *= of_tail;
          score = group == 0 && Shared::tail_panels == 0 ? product * of_token : fmaf(product, of_token, score);
        }
      if (group + 1 == Shared::groups) return;
      read_scales(of_tokens, all.scales[group + 1]);
      issue_group(products, operands, group + 1);
    }
  }
  FP_DEVICE void read_scales(float (&of_tokens)[tiles][2], const float (&scales)[tokens]) const {
    const u32 from = ptx::shared_address(scales + TokenOrder::first_of_lane(lane));
#pragma unroll
    for (int n = 0; n < tiles; n += 2) {
      u32 four[4];
      ptx::load_shared(four, from + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_tokens[n + i / 2][i % 2] = __uint_as_float(four[i]);
    }
  }
  FP_DEVICE Operands operands_of(u32 slot) const {
    const ptx::Matrix terms = matrix_of_cta(shared.query), keys = matrix_at(shared.blocks[slot]);
    if constexpr (Shared::tail_panels == 0) return {terms, keys, terms, keys};
    return {terms, keys, matrix_of_cta(shared.query[2 * Shared::panels * panel_bytes]), matrix_at(shared.tails[slot])};
  }
  // Multiplies both terms of Q by the same keys: four steps each.
  FP_DEVICE static void issue_group(Scores& products, const Operands& operands, int group) {
    ptx::wgmma_settle(products[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Traits::KeyProduct::multiply(products[0], operands.terms.at((group * 2 + step / 4) * panel_bytes + step % 4 * 32),
                                   operands.keys.at(group * panel_bytes + step % 4 * 32), step > 0);
    ptx::wgmma_commit();
  }
  FP_DEVICE static void issue_tail(Scores& scores, const Operands& operands) {
    if constexpr (Shared::tail_panels > 0) {
      ptx::wgmma_settle(scores[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Traits::TailProduct::multiply(scores[0], operands.rows.at(step * 32),
                                      operands.tail.at((Shared::has_e4m3_tail ? step % 2 : step) * 32), step > 0);
      }
      ptx::wgmma_commit();
    }
  }

  // How many of a unit's last blocks have tokens that some rows may not see.
  FP_DEVICE static i32 partial_blocks(const WidePlace& place) {
    const Unit& unit = place.place.unit;
    if (unit.all_begin > place.first_token || unit.all_end < place.first_token) return place.blocks;
    return place.blocks - (unit.all_end - place.first_token) / tokens;
  }
  // Hides the places of a list, and of a unit's last block, that have no token.
  FP_DEVICE void hide_missing(Scores& scores, const u32 (&present)[2]) const {
    const u32 of_lane[2] = {present[0] >> lane % 4 * 2, present[1] >> lane % 4 * 2};
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((of_lane[n / 4] & 1u << (n % 4 * 8 + e)) == 0)
          scores[0][n][e] = scores[0][n][e + 2] = ptx::negative_infinity();
  }
  // Lowers maxima that are those of sinks, which no power multiplies: probabilities next to them would be below fp16's.
  FP_DEVICE static void lower(Softmax& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      softmax.maximum[0][half] -= Shared::least_exponent, softmax.sum[0][half] *= exp2f(Shared::least_exponent);
  }
  // As SoftmaxState::raise, for multiplied probabilities. `scale`: of the lane's two rows.
  FP_DEVICE static bool raise(Softmax& softmax, const Scores& scores, const Steps& steps, const float (&scale)[2],
                              float (&factor)[1][2]) {
    float top[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[0][half] = ptx::negative_infinity();
#pragma unroll
      for (int n = 0; n < tiles; n += 2) {
        const float of_tiles[2] = {fmaxf(scores[0][n][half * 2], scores[0][n][half * 2 + 1]),
                                   fmaxf(scores[0][n + 1][half * 2], scores[0][n + 1][half * 2 + 1])};
        top[0][half] = fmaxf(top[0][half], fmaf(fmaxf(of_tiles[0], of_tiles[1]), scale[half], steps.exponents[n / 2]));
      }
    }
    // A maximum is moved to so much below the largest probability, and not before that exceeds it by more.
    top[0][0] -= above, top[0][1] -= above;
    const bool outgrown = top[0][0] > softmax.maximum[0][0] + headroom || top[0][1] > softmax.maximum[0][1] + headroom;
    if (!__any_sync(0xffffffff, outgrown)) return false;
    softmax.move_to(top, 1.f, factor);
    return true;
  }
  // As SoftmaxState::exponentiate. Probabilities are multiplied, and their sums are not.
  FP_DEVICE static void exponentiate(Softmax& softmax, Scores& scores, const Steps& steps, const float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float origin = finite_or_zero(softmax.maximum[0][half]);
#pragma unroll
      for (int n = 0; n < tiles; n += 2) {
        const float shift = steps.exponents[n / 2] - origin;
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[0][n + i / 2][half * 2 + i % 2];
          score = ptx::exp2_approx(fmaf(score, scale[half], shift));
          total += score;
        }
        softmax.sum[0][half] = fmaf(total, steps.inverses[n / 2], softmax.sum[0][half]);
      }
    }
  }

  FP_DEVICE void hand_over(const Scores& scores, const float (&factor)[1][2], bool moved, u32 message) const {
    u32 probabilities[tokens / 16][4];
    pack_probabilities<Half>(scores, probabilities);
    const u32 slot = shared.message_ring.slot(message);
    const u32 to = ptx::shared_address(shared.weights[slot]);
#pragma unroll
    for (int step = 0; step < tokens / 16; ++step) ptx::stmatrix_x4(to + (own_chunk ^ step * 32), probabilities[step]);
    ptx::fence_before_products();
    if (lane == 0) shared.moved[slot][warp] = moved;
    if (moved) write_factors(slot, factor[0][0], factor[0][1]);
    pass(message);
  }
  FP_DEVICE void write_factors(u32 slot, float first, float second) const {
    if (lane % 4 != 0) return;
    shared.factors[slot][warp * 16 + lane / 4] = first;
    shared.factors[slot][warp * 16 + lane / 4 + 8] = second;
  }
  FP_DEVICE void pass(u32 message) const { ptx::mbarrier_arrive(shared.message_ring.full_barrier(message)); }

  // Passes the rows' sums on, and writes the LSE.
  FP_DEVICE void finish(const WidePlace& place, const Softmax& softmax) const {
    const float totals[2] = {quad_sum(softmax.sum[0][0]), quad_sum(softmax.sum[0][1])};
    const Unit& unit = place.place.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + lane / 4 + half * 8;
      if (lane % 4 != 0 || row >= unit.num_rows) continue;
      if (float* lse = lse_target(params, place.place.item, unit, row))
        *lse = row_lse(softmax.maximum[0][half], totals[half]);
    }
    const u32 message = Shared::message(place, place.blocks);
    shared.message_ring.wait_empty(message);
    write_factors(shared.message_ring.slot(message), totals[0], totals[1]);
    pass(message);
  }

  FP_DEVICE WarpRows rows_of(const WidePlace& place) const {
    return {params, place.place.item, place.place.unit, warp * 16, lane};
  }
};

}  // namespace flashpage
