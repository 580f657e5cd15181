// Launch parameters of the kernels for vLLM's caches of blocks; csrc/abi_structs.py generates the Python structs from
// this file.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// A sequence and head whose tokens are divided among several CTAs; num_pieces is 0 if there is none. The first piece
// belongs to this CTA, the others to the CTAs that follow it.
struct BlockCut {
  i32 sequence;
  i32 first_head;  // query head of the first row
  i32 num_rows;    // query heads
  i32 num_pieces;
};

// Block-sparse attention: the tokens that a row sees. These blocks belong to the pattern, not to the cache.
struct BlockPattern {
  FastDiv block_size;  // tokens
  FastDiv stride;      // every stride-th block is visible; 0: no pattern
  i32 local_blocks;    // the last so many blocks, up to the last token's own, are visible in addition
  i32 first;           // a head's offset to the stripes is first + head * head_step + kv_head * kv_head_step
  i32 head_step;
  i32 kv_head_step;
};

// paged_attention_v1 and _v2: one row for each sequence and query head. Lengths and tables are read only on the card.
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
  // v1: [2 x CTAs, tile_q, head_dim]; a CTA has one row tile for its first unit if an earlier CTA began that, and one
  // for its last unit.
  float* partial_out;
  float* partial_lse;  // v1: [2 x CTAs, tile_q], base 2
  BlockCut* cuts;      // v1: [CTAs]
  void* tmp_out;       // v2: [num_seqs, num_q_heads, partitions, head_dim], of out's type
  float* exp_sums;     // v2: [num_seqs, num_q_heads, partitions]
  float* max_logits;   // [num_seqs, num_q_heads, partitions], natural-log units
  BlockPattern pattern;
  float score_scale;  // sm_scale
  i32 num_seqs, num_q_heads, num_kv_heads, head_dim;
  i32 group;           // query heads a KV head
  i32 tile_q;          // query heads in a unit
  i32 row_tiles;       // units for each group of query heads
  i32 max_tokens;      // capacity of block_tables (v2: and of tmp_out) in tokens; tokens beyond it are not read
  i32 log_block_size;  // log2 of the tokens in a block
  i32 partitions;      // v2: capacity of tmp_out in partitions; 0: v1
};

// reshape_and_cache, reshape_and_cache_flash: token i goes to slot slots[i] = block x block_size + offset.
struct BlockWriteParams {
  const void* key;    // [num_tokens or more, num_kv_heads, key_dim]
  const void* value;  // [num_tokens or more, num_kv_heads, value_dim]
  i64 key_row_stride, key_head_stride, value_row_stride, value_head_stride;  // all strides in elements
  void* k;
  void* v;
  i64 k_block_stride, k_slot_stride, k_head_stride;  // blocks: a slot's pieces of 16 bytes are consecutive
  i64 v_block_stride, v_slot_stride, v_head_stride;
  const void* slots;     // [num_tokens]; negative: the token is not written
  const float* k_scale;  // one value; only for fp8 caches
  const float* v_scale;
  i32 slots_are_int64;
  i32 num_tokens, num_kv_heads, key_dim, value_dim;
  FastDiv block_size;
};

// RoPE of queries and keys in place, and reshape_and_cache_flash of the rotated keys and of the values.
struct RotateWriteParams {
  BlockWriteParams write;  // its tokens are the first ones of num_rows
  void* query;             // [num_rows, num_q_heads, key_dim]
  i64 query_row_stride, query_head_stride;
  const i64* positions;  // [num_rows]
  const void* cos_sin;   // [positions, rotary_dim], of query's type or fp32: cosines of all pairs, then sines
  i64 cos_sin_stride;
  i32 num_rows, num_q_heads;
  i32 rotary_dim;  // the first so many elements of a row are rotated
  i32 is_neox;     // pair i is (i, i + rotary_dim / 2), else (2 i, 2 i + 1)
  i32 cos_sin_is_float;
};

}  // namespace flashpage
