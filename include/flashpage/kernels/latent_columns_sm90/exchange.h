// The exchange of scores between the CTAs of a pair in latent_columns_sm90.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/shared.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/st_async.h"

namespace flashpage {

// A warp and the warp of the other CTA with the same number have the same rows. Each thread stores its sums of scores
// to where the same thread of the other CTA reads them, and adds what it receives to its own. The sum of two numbers
// does not depend on their order, so both threads have equal scores.
template <class Traits>
struct ScoreExchange {
  using Shared = ColumnsShared<Traits>;
  static constexpr int chunks = Shared::tokens / 8;
  using Scores = float[1][chunks][4];
  static constexpr u32 warp_bytes = 32 * chunks * sizeof(float4);

  Shared& shared;
  int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  int group = threadIdx.x / 128 - Shared::Warps::loading / 4, warp = threadIdx.x / 32 - Shared::Warps::loading;

  FP_DEVICE explicit ScoreExchange(Shared& shared) : shared(shared) {}

  // `number` counts the blocks of this warp. The other warp must have read the sums of the block before.
  FP_DEVICE void send(const Scores& sums, u32 number) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.scores_read[warp]), (number & 1) ^ 1);
    const u32 rank = ptx::cluster_rank() ^ 1;
    const u32 to = ptx::peer_address(ptx::shared_address(&shared.received[group][0][thread]), rank);
    const u32 barrier = ptx::peer_address(ptx::shared_address(&shared.scores_full[warp]), rank);
#pragma unroll
    for (int n = 0; n < chunks; ++n)
      ptx::store_async(to + n * 128 * static_cast<u32>(sizeof(float4)),
                       make_float4(sums[0][n][0], sums[0][n][1], sums[0][n][2], sums[0][n][3]), barrier);
  }

  FP_DEVICE void receive(Scores& sums, u32 number) const {
    // The address is computed again here, so that no register holds it from send() on.
    const u32 barrier = ptx::shared_address(&shared.scores_full[ptx::opaque(warp)]);
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, warp_bytes);
    __syncwarp();
    ptx::mbarrier_wait(barrier, number & 1);
#pragma unroll
    for (int n = 0; n < chunks; ++n) {
      const float4 other = shared.received[group][n][thread];
      sums[0][n][0] += other.x;
      sums[0][n][1] += other.y;
      sums[0][n][2] += other.z;
      sums[0][n][3] += other.w;
    }
  }
  // Lets the other CTA send the next block.
  FP_DEVICE void release() const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_at(ptx::shared_address(&shared.scores_read[warp]), ptx::cluster_rank() ^ 1);
  }
};

}  // namespace flashpage
