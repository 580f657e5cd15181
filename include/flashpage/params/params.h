// Launch parameters of the kernels. The CPU, the card and Python use the same structs; csrc/abi_structs.py generates
// Python's from this file. Strides are in elements; the last dimension of every tensor is contiguous. Strides of K and
// V in formats (formats/format.h), and of their scales, are in bytes.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/common/tensor_map.h"
#include "flashpage/plan/work_item.h"

namespace flashpage {

// K or V. Paged: element (page, token in page, head, 0); ragged: page_stride is unused and the token is the row.
struct KvView {
  const void* data;
  i64 page_stride;
  i64 token_stride;
  i64 head_stride;
};

// Lists of tokens of two caches (KvSource::two_lists): what the second cache adds. A row's tokens are the entries of
// its first list, and then those of its second one.
struct SecondLists {
  KvView k;                  // the second cache
  const i32* indices;        // [rows, columns]; of the first lists: AttentionParams::kv_indices, [rows, first_columns]
  const i32* first_lengths;  // [rows], entries of the first lists that are used; null: all
  FastDiv page;              // tokens of a page of the second cache
  i32 columns;
  i32 first_columns;
};

struct AttentionParams {
  const void* q;  // [total_q, num_q_heads, head_dim_qk]
  void* out;      // [total_q, num_q_heads, head_dim_vo]
  float* lse;     // [total_q, num_q_heads], base 2, contiguous; null: not wanted
  i64 q_row_stride;
  i64 q_head_stride;
  i64 out_row_stride;
  i64 out_head_stride;
  KvView k;           // latent rows: the columns that K and V share, or whole rows that hold their scales
  KvView v;           // latent rows: the other columns of K
  KvView key_scales;  // formats with scales: those of a token and head are contiguous, as their numbers are
  KvView value_scales;
  const i32* kv_indices;   // paged: page numbers; WorkItem::kv_offset is an index into it
  const PlanHeader* plan;  // followed by CTA ranges, work items and merge items
  float* partial_out;      // [partial rows, head_dim_vo]
  float* partial_lse;      // [partial rows], base 2
  const u8* custom_mask;   // packed bits, little-endian; bit row * kv_len + token, each request starts on a byte
  u8* lane_bits;           // the mask's bits in mixed tiles, for kernels that read mask tiles (tile/mask/lane_bits.h)
  const float* sinks;      // [num_q_heads], natural-log units, joins the denominator; null: none
  const float* q_scale;    // device scalars or per-head vectors that multiply the float scales; null: 1
  const float* k_scale;
  const float* v_scale;
  i32 q_scale_stride;          // 0: one value; 1: [num_q_heads]
  i32 k_scale_stride;          // 0: one value; 1: [num_kv_heads]
  i32 v_scale_stride;          // 0: one value; 1: [num_kv_heads]
  i32 q_scale_request_stride;  // elements from a request's scales to the next one's; 0: all requests share them
  i32 k_scale_request_stride;
  i32 v_scale_request_stride;
  float score_scale;  // sm_scale times the float q and k scales
  float value_scale;  // the float v scale
  i32 num_q_heads;
  i32 num_kv_heads;
  i32 causal;        // right-aligned: row r sees tokens <= kv_len - q_len + r
  i32 window_left;   // tokens visible left of the row's own; -1: all
  float rope_scale;  // positions are divided by it
  float rope_theta;
  FastDiv group;       // query heads of a KV head
  FastDiv page;        // tokens of a page (ragged: 1)
  u64* trace;          // a traced kernel's clock stamps, [CTAs, Stamp::count]; null otherwise
  i32 box_tokens;      // tokens of one box of K and V; 0: the kernel uses no tensor maps
  i32 query_box_rows;  // rows of q in one box, each with a unit's query heads of a KV head; 0: not loaded by boxes
  i32 num_kv_indices;  // valid entries when the launch was bound: lookups ahead stay below this
  i32 out_box_rows;    // rows of out in one box, counted as query_box_rows; 0: out is not stored by boxes
  i32 cta_rows;  // packed rows of a unit that one CTA has: a whole tile, or the largest number that consists of whole
                 // rows
  float tail_scale;       // latent rows in fp8: the float scale of the columns that K alone has, relative to the others
  i32 most_merge_rounds;  // the attention launch leaves units of more merge_rounds to the merge kernel; 0: it leaves
                          // none
  const float* out_scale;  // divides fp8 outputs: a device scalar (a float divides value_scale); null: 1
  SecondLists second;      // read if rows list tokens of two caches
};

// Values that a variant captured. The spec numbers the slots; strides are in elements.
struct VariantTensor {
  const void* data;
  i64 stride[4];
};
struct VariantArgs {
  VariantTensor tensors[8];
  double scalars[8];
};

// mask_tiles: finds which tiles of a mask are empty, full or mixed (tile/mask/mask_tiles.h). The kernels that read the
// result take it too.
struct MaskTilesParams {
  const PlanHeader* plan;
  const u8* custom_mask;  // as in AttentionParams; null: only a variant's mask function
  u64* cells;
  i64 queue_begin;  // cell of the first queued unit
  i64 list_begin;   // cell of the first unit of the list that is still to be sorted
  i64 lanes_begin;  // first cell of the mixed tiles' bits (tile/mask/lane_bits.h)
  FastDiv group;    // query heads of a KV head
  i32 tile_q;       // packed rows of a unit
  i32 tile_kv;      // tokens of a tile
  i32 tile_heads;   // KV heads with tiles of their own: 1 or all
  i32 causal;       // as in AttentionParams; not read for packed bits, whose tiles follow from the bits alone
  i32 window_left;
};

// merge: combines the partials of one plan. The launch reads num_merges from the plan.
struct MergeParams {
  const PlanHeader* plan;
  const float* partial_out;  // [partial rows, head_dim_vo]
  const float* partial_lse;  // [partial rows], base 2
  void* out;                 // [total_q, num_q_heads, head_dim_vo]
  float* lse;                // [total_q, num_q_heads]; null: not wanted
  i64 out_row_stride;
  i64 out_head_stride;
  i32 head_dim_vo;
  i32 num_q_heads;
  FastDiv group;
  i32 most_merge_rounds;   // the attention launch has merged units of at most so many merge_rounds; 0: none
  i32 is_batch_invariant;  // a row's sums do not depend on the batch's other rows
};

// merge_state, merge_state_in_place, merge_states: out[r, h] over `num_states` states of (v, s), s base 2.
struct MergeStatesParams {
  const void* v;        // state i at v + i * v_state_stride; [rows, num_heads, head_dim], rows and heads strided
  const float* s;       // state i at s + i * s_state_stride; [rows, num_heads]
  const void* v_other;  // merge_state: the second state; null otherwise
  const float* s_other;
  const u8* mask;  // merge_state_in_place: rows to merge, [rows]; null: all
  void* out;       // [rows, num_heads, head_dim], contiguous
  float* lse;      // [rows, num_heads], contiguous
  i64 v_state_stride, v_row_stride, v_head_stride;
  i64 s_state_stride, s_row_stride;
  i32 num_states, rows, num_heads, head_dim;
};

// append_paged_kv_cache: token i of append_key/append_value goes to position positions[i] of request batch_indices[i].
struct AppendParams {
  const void* append_key;    // [nnz, num_kv_heads, head_dim_qk]
  const void* append_value;  // [nnz, num_kv_heads, head_dim_vo]
  i64 key_row_stride, key_head_stride, value_row_stride, value_head_stride;
  KvView k, v;               // the cache (written)
  const i32* batch_indices;  // [nnz]
  const i32* positions;      // [nnz]
  const i32* kv_indptr;      // [batch + 1]
  const i32* kv_indices;
  i32 nnz, num_kv_heads, head_dim_qk, head_dim_vo;
  FastDiv page;
};

// append_quantised: as append_paged_kv_cache, with rows of 16 or 32 bits that are quantised to the formats of K and V
// (formats/format.h) as they are written.
struct AppendQuantisedParams {
  const void* append_key;                                                    // [nnz, num_kv_heads, head_dim_qk]
  const void* append_value;                                                  // [nnz, num_kv_heads, head_dim_vo]
  i64 key_row_stride, key_head_stride, value_row_stride, value_head_stride;  // elements
  KvView k, v;                                                               // the cache (written)
  KvView key_scales, value_scales;                                           // of formats that have scales (written)
  const float* k_scale;  // one value, by which elements are divided in addition to the float scales; null: 1
  const float* v_scale;
  const i32* batch_indices;  // [nnz]; null: positions are slots, page * page size + token in page
  const i32* positions;      // [nnz]; a negative slot, or the position of a negative request, is skipped
  const i32* kv_indptr;      // [batch + 1]; null for slots
  const i32* kv_indices;     // null for slots
  i32 nnz, num_kv_heads;
  i32 num_slots;     // of the cache; later slots, which only `positions` as slots can name, are skipped
  i32 rotates_keys;  // 1: rows of K are first multiplied by a Hadamard matrix over sqrt(head_dim_qk), a power of two
  i32 stops_at_bad_scales;           // 1: a k_scale or v_scale that is not positive and finite ends the launch
  float key_divisor, value_divisor;  // the float scales
  FastDiv page;
};

// append_latent: token i of ckv and kpe goes to position positions[i] of request batch_indices[i], in fp8
// (params/latent_format.h).
struct AppendLatentParams {
  const void* ckv;                     // [nnz, head_dim_vo]
  const void* kpe;                     // [nnz, head_dim_qk - head_dim_vo]; null: there are no such columns
  i64 ckv_row_stride, kpe_row_stride;  // elements
  KvView k, v;                         // the cache (written), as in AttentionParams
  const float* k_scale;                // one value or, with k_scale_stride 1, the scales of tokens (written)
  const float* v_scale;                // one value; null: 1
  const i32* batch_indices;            // [nnz]
  const i32* positions;                // [nnz]
  const i32* kv_indptr;                // [batch + 1]
  const i32* kv_indices;
  i32 nnz, k_scale_stride;
  float shared_scale, tail_scale;  // the float scales of both parts
  FastDiv page;
};

// gather_rows: copies K and V of pages [first, first + count) of kv_indices, one token each, to consecutive rows.
// Elements have 16 bits; rows of the cache start on 16 bytes.
struct GatherRowsParams {
  KvView k, v;            // the cache; token_stride is unused
  const i32* kv_indices;  // [first + count]
  void* k_rows;           // [first + count, num_kv_heads, head_dim_qk], contiguous; rows from `first` on are written
  void* v_rows;           // [first + count, num_kv_heads, head_dim_vo]
  FastDiv k_row_vectors;  // vectors of 16 bytes in one head's row
  FastDiv v_row_vectors;
  FastDiv token_vectors;  // vectors of all heads of a token: those of K or of V, whichever are more
  i32 k_token_vectors;
  i32 v_token_vectors;
  i32 first, count;
};

// widen_pages: pages of K and V in fp8 or in formats become pages of 16-bit elements, in the order of the page numbers.
struct WidenPagesParams {
  KvView k, v;                      // the cache, in bytes
  KvView key_scales, value_scales;  // of formats that have scales, in bytes
  const i32* kv_indices;            // [first + count]; entries that are no page are skipped
  void* k_pages;                    // [first + count, page size, num_kv_heads, head_dim_qk]; from `first` on written
  void* v_pages;                    // [first + count, page size, num_kv_heads, head_dim_vo]
  i32* numbers;                     // [first + count]: each entry's own number
  FastDiv page, heads;              // tokens of a page, KV heads of a token
  i32 first, count;
  i32 num_pages;
};

// rotate_pages: rows of q, and K of each request's tokens, are rotated (RoPE); pages are copied in the order of their
// numbers, with V. Elements have 16 bits; rows of the cache and of q start on 16 bytes.
struct RotatePagesParams {
  const void* q;           // [total_q, num_q_heads, head_dim_qk]
  KvView k, v;             // the cache
  const i32* kv_indices;   // [first + count]; tokens of entries that are no page are skipped. Null: ragged
  const PlanHeader* plan;  // of the attention kernel
  void* q_rows;            // [total_q, num_q_heads, head_dim_qk], contiguous
  void* k_pages;           // [first + count, page size, num_kv_heads, head_dim_qk]; tokens of requests are written
  void* v_pages;           // [first + count, page size, num_kv_heads, head_dim_vo]; null: V is read where it is
  i32* numbers;            // [first + count]: each entry's own number; null: the attention kernel reads no pages
  i64 q_row_stride, q_head_stride;
  FastDiv page;  // tokens of a page (ragged: 1)
  i32 num_q_heads, num_kv_heads;
  i32 first, count;
  i32 num_pages;
  float rope_scale;  // positions are divided by it
  float rope_theta;
};

// value_columns: V of e4m3 is copied so that the tokens of a column follow each other, in the order of the page
// numbers, and those of ragged V in the order of its rows.
struct ValueColumnsParams {
  KvView v;               // the cache, whose rows start on 16 bytes
  const i32* kv_indices;  // [first + count]; tokens of entries that are no page become zeros. Null: ragged
  void* columns;          // [num_kv_heads, head_dim_vo, column_stride]; tokens of entries from `first` on are written
  i64 column_stride;      // bytes from a column to the next one, a multiple of 16
  FastDiv page;           // tokens of a page (ragged: 1)
  i32 num_kv_heads;
  i32 first, count;  // entries of kv_indices; ragged: rows
  i32 num_pages;
};

// gather_slots: entry i of request r's range of `indices` becomes the page of its token starts[r] + i * page size.
struct GatherSlotsParams {
  const i32* table;      // [requests of the pool, table_row_stride], a slot for each token
  const i32* rows;       // [batch], each request's row of the table
  const i32* starts;     // [batch], leading tokens to skip, multiples of the page size; null: none
  const i32* indptr;     // [batch + 1], where each request's pages begin in indices
  i32* indices;          // [indptr[batch]], written
  i64 table_row_stride;  // elements
  i32 batch;
  FastDiv page;              // tokens of a page
  FastDiv ctas_per_request;  // the grid is batch * ctas_per_request
};

}  // namespace flashpage
