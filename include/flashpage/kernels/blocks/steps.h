// Division of work over vLLM's sequences: every CTA finds its own equal share of the tokens of all heads on the card.
// There is no plan and no copy to the host, so lengths may change under a captured graph.
#pragma once
#include "flashpage/params/block_params.h"

namespace flashpage {

// One step of a CTA: tile_kv tokens of a sequence for the rows of one unit (query heads that share a KV head). The
// steps that a CTA has in a unit (v2: in a partition) form a run. Steps of a run differ little, so the cursor computes
// only the first one.
struct alignas(16) BlockStep {
  i32 sequence;
  i32 kv_head;
  i32 row_tile;  // of the KV head's query heads
  i32 token;     // the first one
  i32 length;    // of the sequence; 0: no steps are left
  i32 left;      // steps left in the run, this one included
  i32 flags;
  i32 run;  // index of the run in the CTA
  // goes_on: the unit began in another CTA; is_continued: it ends in another one.
  enum Flags { begins = 1, ends = 2, goes_on = 4, is_continued = 8, is_live = 16 };

  // The next step of the run.
  FP_DEVICE BlockStep following(i32 tile_kv) const {
    BlockStep step = *this;
    step.token += tile_kv;
    --step.left;
    step.flags = (flags & (goes_on | is_continued)) | (step.left == 1 ? ends : 0);
    return step;
  }
};

// `tile_kv`: tokens of a step. v1 may cut a sequence between any two steps, v2 only at its partitions. A grain is the
// smallest amount that a CTA may take.
template <int tile_kv>
struct BlockWork {
  static constexpr int partition_tokens = 512;  // of v2
  static constexpr int least_tokens = 128;      // of a share: a shorter one costs more to merge than to read
  static_assert(partition_tokens % tile_kv == 0);

  const BlockAttentionParams& params;

  FP_DEVICE i32 heads() const { return params.num_kv_heads * params.row_tiles; }
  FP_DEVICE i32 length(i32 sequence) const { return max_of(0, min_of(params.seq_lens[sequence], params.max_tokens)); }
  FP_DEVICE i32 grain_tokens() const { return params.partitions ? partition_tokens : tile_kv; }
  FP_DEVICE i32 grains(i32 length) const { return ceil_div(length, grain_tokens()); }
  // v1: the pieces of a sequence and head from this step's CTA on; `step` is that CTA's last step.
  FP_DEVICE i32 pieces_from(const BlockStep& step, i32 share) const {
    return 1 + ceil_div(ceil_div(step.length - step.token, tile_kv) - 1, share);
  }
  FP_DEVICE i32 least_grains() const { return params.partitions ? 1 : ceil_div(least_tokens, tile_kv); }
};

// Shared memory in which the threads of a CTA find its share.
template <int warps>
struct BlockShare {
  i32 sums[warps];
  i32 size;            // grains of a share
  i32 sequence, head;  // where the share begins, head: kv_head * row_tiles + row_tile; sequence -1: there is none
  i32 grain;           // in that sequence and head
  i32 count;           // grains of this CTA
};

// Sets the share of `cta` if it begins in sequences [first, last). `before`: grains of earlier sequences; `total`:
// grains of all.
template <int tile_kv, int warps>
FP_DEVICE void locate_share(BlockShare<warps>& share, const BlockWork<tile_kv>& work, i32 first, i32 last, i32 before,
                            i32 total, i32 cta, i32 num_ctas) {
  const i32 size = max_of(ceil_div(total, num_ctas), work.least_grains()), begin = cta * size;
  for (i32 i = first; i < last && before <= begin; ++i) {
    const i32 grains = work.grains(work.length(i));
    if (begin < before + grains * work.heads()) {
      share.size = size;
      share.count = min_of(size, total - begin);
      share.sequence = i;
      share.head = (begin - before) / grains;
      share.grain = (begin - before) % grains;
      return;
    }
    before += grains * work.heads();
  }
}

#if defined(__CUDACC__)
// Called by all threads; a CTA barrier afterwards makes the share visible.
template <int tile_kv, int warps>
FP_DEVICE void find_share(BlockShare<warps>& share, const BlockWork<tile_kv>& work, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const i32 num_seqs = work.params.num_seqs, each = ceil_div(num_seqs, warps * 32);
  const i32 first = min_of(thread * each, num_seqs), last = min_of(first + each, num_seqs);
  i32 mine = 0;
  for (i32 i = first; i < last; ++i) mine += work.grains(work.length(i)) * work.heads();
  i32 sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    i32 below = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) share.sums[warp] = sum;
  if (thread == 0) share.sequence = -1;
  __syncthreads();
  i32 before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before += share.sums[w];
    total += share.sums[w];
  }
  locate_share(share, work, first, last, before, total, blockIdx.x, gridDim.x);
}
#endif

// Goes through a share run by run.
template <int tile_kv>
class BlockCursor {
 public:
  template <int warps>
  FP_DEVICE void start(const BlockWork<tile_kv>& work, const BlockShare<warps>& share) {
    left_ = share.sequence < 0 ? 0 : share.count;
    runs_ = 0;
    if (left_ == 0) return;
    sequence_ = share.sequence;
    kv_head_ = share.head / work.params.row_tiles;
    row_tile_ = share.head % work.params.row_tiles;
    token_ = share.grain * work.grain_tokens();
    length_ = work.length(sequence_);
    is_cut_ = token_ > 0 && !work.params.partitions;
    look_ahead(work);
  }

  // The first step of the next run.
  FP_DEVICE BlockStep next(const BlockWork<tile_kv>& work) {
    if (left_ == 0) return {};
    const i32 grains = work.params.partitions ? 1 : min_of(left_, work.grains(length_ - token_));
    const i32 end = min_of(length_, token_ + grains * work.grain_tokens());
    BlockStep step{sequence_,         kv_head_, row_tile_, token_, length_, ceil_div(end - token_, tile_kv),
                   BlockStep::begins, runs_++};
    if (is_cut_) step.flags |= BlockStep::goes_on;
    if (step.left == 1) step.flags |= BlockStep::ends;
    left_ -= grains;
    token_ = end;
    if (token_ < length_) {
      if (!work.params.partitions) step.flags |= BlockStep::is_continued;
    } else {
      is_cut_ = false;
      next_head(work);
    }
    return step;
  }

 private:
  FP_DEVICE void next_head(const BlockWork<tile_kv>& work) {
    token_ = 0;
    if (++row_tile_ < work.params.row_tiles) return;
    row_tile_ = 0;
    if (++kv_head_ < work.params.num_kv_heads || left_ == 0) return;
    kv_head_ = 0;
    do {
      ++sequence_;
      length_ = next_length_;
      look_ahead(work);
    } while (length_ == 0);  // ends, as there is work left
  }

  // Loads the next sequence's length while the current sequence is read.
  FP_DEVICE void look_ahead(const BlockWork<tile_kv>& work) {
    next_length_ = sequence_ + 1 < work.params.num_seqs ? work.length(sequence_ + 1) : 0;
  }

  i32 left_;  // grains left in the share, the current run included
  i32 sequence_, kv_head_, row_tile_, token_, length_, next_length_;
  i32 runs_;  // runs so far
  bool is_cut_;
};

}  // namespace flashpage
