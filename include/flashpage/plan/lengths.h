// From index arrays (int32 or int64, maybe strided) to checked requests, in one pass and without copies.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage::plan {

inline constexpr i64 max_i32 = 0x7fffffff;

// Heads and visibility: the same for every request of a batch.
struct Heads {
  i32 num_q_heads;
  i32 num_kv_heads;
  bool causal;
  i32 window_left;  // tokens; -1: all

  FP_HOST_DEVICE i32 group() const { return num_q_heads / num_kv_heads; }
};

struct IndexArray {
  const void* data;  // null: not given
  i64 stride;        // elements
  bool is_int64;
};

struct Lengths {
  i32 batch;
  i32 q_len_per_request;  // where q_indptr is not given
  IndexArray q_indptr;
  IndexArray kv_indptr;
  IndexArray last_page_len;
  IndexArray kv_lens;
  i32 page_size;  // tokens; 0: ragged
  bool has_custom_mask;
  i32 cell_tokens;  // of a cell of mask tiles (mask_cells.h), where a mask function has them; 0: none has
  i32 least_rows;   // of a request that the plan serves; others keep their place and have no row tiles
  i32 most_rows;    // 0: any number

  bool serves_all() const { return least_rows == 0 && most_rows == 0; }
  bool serves(i64 q_len) const { return q_len >= least_rows && (most_rows == 0 || q_len <= most_rows); }
};

struct Request {
  i64 kv_offset;    // page index or KV row
  i64 mask_offset;  // bytes of packed bits, or cells
  i32 q_begin;      // rows
  i32 q_len;        // rows
  i32 kv_len;       // tokens
  i32 tiles;        // row tiles; 0: no rows, or not served
  i32 number;       // how many before this request have any
  double cost;      // of everything before this request on the cost axis, ns
};

enum class LengthArray { none = 0, q_indptr = 1, kv_indptr = 2, last_page_len = 3, kv_lens = 4 };
enum class LengthError { none = 0, negative_first = 1, decreases = 2, outside = 3, too_many = 4, overflow = 5 };

struct LengthFault {
  LengthArray array = LengthArray::none;
  LengthError error = LengthError::none;
  i64 index = 0;
  i64 value = 0;
  i64 limit = 0;
};

// A request has few rows where they fill at most half a row tile: it waits for memory, not for the tensor cores.
FP_HOST_DEVICE bool has_few_rows(i64 q_len, i32 group, i32 tile_q) { return q_len > 0 && q_len * group <= tile_q / 2; }

// Of all requests.
struct KvTokens {
  i64 all = 0;
  i64 longest = 0;
  i64 by_tile = 0;   // once each row tile
  i64 few_rows = 0;  // of requests with few rows

  FP_HOST_DEVICE static KvTokens of(i64 kv_len, i32 tiles, bool few_rows) {
    return {kv_len, kv_len, kv_len * tiles, few_rows ? kv_len : 0};
  }
  FP_HOST_DEVICE KvTokens operator+(const KvTokens& other) const {
    return {all + other.all, max_of(longest, other.longest), by_tile + other.by_tile, few_rows + other.few_rows};
  }
};

struct LengthTotals {
  i64 q_rows = 0;  // q_indptr's last entry
  KvTokens kv;
  KvTokens served;     // of the requests that the plan serves
  i64 kv_entries = 0;  // kv_indptr's last entry: pages, ragged: tokens
  i64 mask_bytes = 0;
  i64 tile_cells = 0;
  i64 units = 0;  // row tiles over all KV heads
  i32 max_q_len = 0;
};

struct AnyIndex {
  explicit AnyIndex(const IndexArray& array) : array(array) {}
  i64 operator[](i64 i) const {
    i64 at = i * array.stride;
    return array.is_int64 ? static_cast<const i64*>(array.data)[at] : static_cast<const i32*>(array.data)[at];
  }
  const IndexArray array;
};

struct PlainInt32 {
  explicit PlainInt32(const IndexArray& array) : data(static_cast<const i32*>(array.data)) {}
  static bool fits(const IndexArray& array) { return !array.data || (!array.is_int64 && array.stride == 1); }
  i64 operator[](i64 i) const { return data[i]; }
  const i32* data;
};

inline KvTokens served_tokens(const Lengths& lengths, i32 group, i32 tile_q, const Request* requests) {
  KvTokens served;
  for (i32 i = 0; i < lengths.batch; ++i) {
    const Request& request = requests[i];
    if (request.tiles == 0) continue;
    served = served + KvTokens::of(request.kv_len, request.tiles, has_few_rows(request.q_len, group, tile_q));
  }
  return served;
}

// Reads and checks every request. `group` and `tile_q` give the row tiles.
template <class Index>
LengthFault read_lengths(const Lengths& lengths, i32 num_kv_heads, i32 group, i32 tile_q, Request* requests,
                         LengthTotals& totals) {
  const Index q_indptr(lengths.q_indptr), kv_indptr(lengths.kv_indptr);
  const Index last_page_len(lengths.last_page_len), kv_lens(lengths.kv_lens);
  const bool has_q_indptr = lengths.q_indptr.data, has_kv_lens = lengths.kv_lens.data;
  const bool has_last_page_len = lengths.last_page_len.data && !has_kv_lens;
  const i64 page_size = lengths.page_size > 0 ? lengths.page_size : 1;

  i64 q_end = has_q_indptr ? q_indptr[0] : 0, kv_end = kv_indptr[0];
  using enum LengthError;
  if (q_end < 0) return {LengthArray::q_indptr, negative_first, 0, q_end, 0};
  if (kv_end < 0) return {LengthArray::kv_indptr, negative_first, 0, kv_end, 0};

  i64 known_q_len = 0, tiles = 0;  // neighbours mostly have the same number of rows: divide once
  bool few_rows = false;
  for (i64 i = 0; i < lengths.batch; ++i) {
    const i64 q_begin = q_end, kv_begin = kv_end;
    q_end = has_q_indptr ? q_indptr[i + 1] : q_begin + lengths.q_len_per_request;
    kv_end = kv_indptr[i + 1];
    const i64 q_len = q_end - q_begin, entries = kv_end - kv_begin;
    if (q_len < 0) return {LengthArray::q_indptr, decreases, i + 1, q_end, q_begin};
    if (entries < 0) return {LengthArray::kv_indptr, decreases, i + 1, kv_end, kv_begin};
    if (q_end > max_i32) return {LengthArray::q_indptr, overflow, i + 1, q_end, max_i32};
    if (kv_end > max_i32) return {LengthArray::kv_indptr, overflow, i + 1, kv_end, max_i32};

    i64 kv_len = entries * page_size;
    if (has_kv_lens) {
      const i64 given = kv_lens[i];
      if (given < 0) return {LengthArray::kv_lens, outside, i, given, kv_len};
      if (given > kv_len) return {LengthArray::kv_lens, too_many, i, given, kv_len};
      kv_len = given;
    } else if (has_last_page_len) {
      const i64 given = last_page_len[i];
      // Engines pad batches with requests that have no pages and any last_page_len that a page could have.
      if (given < (entries > 0) || given > page_size) return {LengthArray::last_page_len, outside, i, given, page_size};
      if (entries > 0) kv_len += given - page_size;
    }
    if (kv_len > max_i32) return {LengthArray::kv_indptr, overflow, i + 1, kv_len, max_i32};

    if (q_len != known_q_len) {
      known_q_len = q_len;
      tiles = ceil_div<i64>(q_len * group, tile_q);
      few_rows = has_few_rows(q_len, group, tile_q);
      const i64 limit = max_i32 / max_of<i64>(group, 1);
      if (q_len > limit || tiles * num_kv_heads > max_i32)
        return {LengthArray::q_indptr, overflow, i + 1, q_len, limit};
      if (!lengths.serves(q_len)) tiles = 0;
    }
    requests[i] = {kv_begin,
                   totals.mask_bytes + totals.tile_cells,  // one of them
                   static_cast<i32>(q_begin),
                   static_cast<i32>(q_len),
                   static_cast<i32>(kv_len),
                   static_cast<i32>(tiles),
                   0,
                   0.0};
    totals.kv = totals.kv + KvTokens::of(kv_len, static_cast<i32>(tiles), few_rows);
    totals.units += tiles * num_kv_heads;
    totals.max_q_len = max_of(totals.max_q_len, static_cast<i32>(q_len));
    if (lengths.has_custom_mask) totals.mask_bytes += ceil_div<i64>(q_len * kv_len, 8);
    if (lengths.cell_tokens > 0) totals.tile_cells += tiles * ceil_div<i64>(kv_len, lengths.cell_tokens);
  }
  totals.q_rows = q_end;
  totals.kv_entries = kv_end;
  totals.served = lengths.serves_all() ? totals.kv : served_tokens(lengths, group, tile_q, requests);
  return {};
}

inline LengthFault read_lengths(const Lengths& lengths, i32 num_kv_heads, i32 group, i32 tile_q, Request* requests,
                                LengthTotals& totals) {
  const bool plain = PlainInt32::fits(lengths.q_indptr) && PlainInt32::fits(lengths.kv_indptr) &&
                     PlainInt32::fits(lengths.last_page_len) && PlainInt32::fits(lengths.kv_lens);
  return plain ? read_lengths<PlainInt32>(lengths, num_kv_heads, group, tile_q, requests, totals)
               : read_lengths<AnyIndex>(lengths, num_kv_heads, group, tile_q, requests, totals);
}

}  // namespace flashpage::plan
