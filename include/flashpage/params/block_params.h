// What the kernels over vLLM's caches of blocks are launched with; csrc/abi_structs.py reads it.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// A sequence and head whose tokens several CTAs share, or nobody (num_pieces 0). The first piece is this CTA's, the
// next ones those of the CTAs behind it.
struct BlockCut {
  i32 sequence;
  i32 first_head;  // query head of the first row
  i32 num_rows;    // query heads
  i32 num_pieces;
};

// Tokens that a row does not see: block-sparse attention. Blocks are the pattern's own, not the cache's.
struct BlockPattern {
  FastDiv block_size;  // tokens
  FastDiv stride;      // every stride-th block is visible; 0: there is no pattern
  i32 local_blocks;    // and so many, the last token's own the last
  i32 first;           // a head's offset to the stripes is first + head * head_step + kv_head * kv_head_step
  i32 head_step;
  i32 kv_head_step;
};

// paged_attention_v1 and _v2: one row a sequence and query head. Lengths and tables are read on the card alone.
struct BlockAttentionParams {
  const void* q;                                                     // [num_seqs, num_q_heads, head_dim]
  void* out;                                                         // [num_seqs, num_q_heads, head_dim]
  i64 q_row_stride, q_head_stride, out_row_stride, out_head_stride;  // elements
  const u8* k;  // [blocks, num_kv_heads, head_dim/x, block_size, x], x = 16 bytes
  const u8* v;  // [blocks, num_kv_heads, head_dim, block_size]
  i64 k_block_stride, k_head_stride, v_block_stride, v_head_stride;  // bytes
  const i32* block_tables;                                           // [num_seqs, table_stride]
  i64 table_stride;
  const i32* seq_lens;        // [num_seqs], tokens
  const float* alibi_slopes;  // [num_q_heads], or null
  const float* k_scale;       // one value; null: 1
  const float* v_scale;
  float*
      partial_out;  // v1: [2 x CTAs, tile_q, head_dim]: of a CTA, its first unit's where that began before, its last's
  float* partial_lse;  // v1: [2 x CTAs, tile_q], base 2
  BlockCut* cuts;      // v1: [CTAs]
  void* tmp_out;       // v2: [num_seqs, num_q_heads, partitions, head_dim], of out's type
  float* exp_sums;     // v2: [num_seqs, num_q_heads, partitions]
  float* max_logits;   // the same, natural logarithms
  BlockPattern pattern;
  float score_scale;  // sm_scale
  i32 num_seqs, num_q_heads, num_kv_heads, head_dim;
  i32 group;           // query heads a KV head
  i32 tile_q;          // rows of a unit
  i32 row_tiles;       // units that a group takes
  i32 max_tokens;      // that block_tables (v2: and tmp_out) have room for; sequences are not read past it
  i32 log_block_size;  // of tokens a block
  i32 partitions;      // v2: that tmp_out has room for; 0: v1
};

// reshape_and_cache, reshape_and_cache_flash: token i goes to slot slots[i] = block x block_size + offset.
struct BlockWriteParams {
  const void* key;    // [num_tokens or more, num_kv_heads, key_dim]
  const void* value;  // [num_tokens or more, num_kv_heads, value_dim]
  i64 key_row_stride, key_head_stride, value_row_stride, value_head_stride;  // elements, as all here
  void* k;
  void* v;
  i64 k_block_stride, k_slot_stride, k_head_stride;  // blocks: a slot's pieces of 16 bytes lie side by side
  i64 v_block_stride, v_slot_stride, v_head_stride;
  const void* slots;     // [num_tokens], negative: not written
  const float* k_scale;  // one value, fp8 caches alone
  const float* v_scale;
  i32 slots_are_int64;
  i32 num_tokens, num_kv_heads, key_dim, value_dim;
  FastDiv block_size;
};

}  // namespace flashpage
