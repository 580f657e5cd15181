// The steps of every CTA over vLLM's sequences (include/flashpage/kernels/blocks/steps.h), for
// tests/kernels/test_vllm_steps.py.
#include "flashpage/kernels/blocks/steps.h"

using namespace flashpage;

namespace {

// One row of the table that the test reads.
struct Row {
  i32 cta, sequence, kv_head, row_tile, token, length, flags, num_pieces;
};

template <int tile_kv>
i32 walk(const BlockAttentionParams& params, i32 num_ctas, Row* rows) {
  const BlockWork<tile_kv> work{params};
  i32 total = 0, count = 0;
  for (i32 i = 0; i < params.num_seqs; ++i) total += work.grains(work.length(i)) * work.heads();
  for (i32 cta = 0; cta < num_ctas; ++cta) {
    BlockShare<4> share;
    share.sequence = -1;
    locate_share(share, work, 0, params.num_seqs, 0, total, cta, num_ctas);
    BlockCursor<tile_kv> cursor;
    cursor.start(work, share);
    for (BlockStep step = cursor.next(work); step.length > 0;
         step = step.left > 1 ? step.following(tile_kv) : cursor.next(work))
      rows[count++] = {cta,        step.sequence, step.kv_head, step.row_tile,
                       step.token, step.length,   step.flags,   work.pieces_from(step, share.size)};
  }
  return count;
}

}  // namespace

extern "C" i32 walk_steps(const BlockAttentionParams* params, i32 tile_kv, i32 num_ctas, Row* rows) {
  return tile_kv == 64 ? walk<64>(*params, num_ctas, rows) : walk<128>(*params, num_ctas, rows);
}
