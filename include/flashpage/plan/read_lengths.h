// Turns index arrays (int32 or int64, possibly strided) into checked requests, in one pass and without copies.
#pragma once
#include <vector>

#include "flashpage/plan/lengths.h"

namespace flashpage::plan {

struct IndexArray {
  const void* data;  // null: not given
  i64 stride;        // elements
  bool is_int64;
};

// Consecutive rows of a request, and the range of its tokens outside of which they see nothing.
struct RowRun {
  i32 rows;
  TokenRange tokens;
};

struct Lengths {
  i32 batch;
  i32 q_len_per_request;  // used if q_indptr is not given
  IndexArray q_indptr;
  IndexArray kv_indptr;
  IndexArray last_page_len;
  IndexArray kv_lens;
  i32 page_size;  // tokens; 0: ragged
  bool has_custom_mask;
  i32 cell_tokens;     // tokens in a cell of mask tiles (mask_cells.h) of a mask function; 0: there are none
  i32 least_rows;      // of the requests in this plan; others keep their index and have no row tiles
  i32 most_rows;       // 0: any number
  const RowRun* runs;  // of all requests with rows, one after another; null: visible.h says what rows see
  i32 num_runs;

  bool has_parts(const Visibility& visibility) const { return runs != nullptr || flashpage::has_parts(visibility); }
  bool serves_all() const { return least_rows == 0 && most_rows == 0; }
  bool serves(i64 q_len) const { return q_len >= least_rows && (most_rows == 0 || q_len <= most_rows); }
};

enum class LengthArray { none = 0, q_indptr = 1, kv_indptr = 2, last_page_len = 3, kv_lens = 4 };
enum class LengthError {
  none = 0,
  negative_first = 1,
  decreases = 2,
  outside = 3,
  too_many = 4,
  overflow = 5,
  too_many_parts = 6
};

struct LengthFault {
  LengthArray array = LengthArray::none;
  LengthError error = LengthError::none;
  i64 index = 0;
  i64 value = 0;
  i64 limit = 0;
};

struct LengthTotals {
  i64 q_rows = 0;  // q_indptr's last entry
  KvTokens kv;
  KvTokens served;     // of the requests in this plan
  i64 kv_entries = 0;  // kv_indptr's last entry: pages; ragged: tokens
  i64 mask_bytes = 0;
  i64 tile_cells = 0;
  i64 units = 0;  // row tiles over all KV heads
  i32 max_q_len = 0;
  i32 parts = 0;  // requests, or their parts, on the axis
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

inline KvTokens served_tokens(i32 most_few_rows, const Request* requests, i32 count) {
  KvTokens served;
  for (i32 i = 0; i < count; ++i) {
    const Request& request = requests[i];
    if (request.tiles == 0) continue;
    served = served + KvTokens::of(request.tokens(), request.tiles, has_few_rows(request.q_len, most_few_rows));
  }
  return served;
}

inline constexpr i32 most_parts_of_batch = 1 << 22;

// The part of a request that begins at `row`. Given runs are clipped to the request.
inline RowRun run_at(const Lengths& lengths, const Visibility& visibility, const Request& whole, i32 row, i32 part) {
  if (lengths.runs != nullptr) {
    const RowRun& given = lengths.runs[part];
    const i32 begin = max_of(0, min_of(given.tokens.begin, whole.kv_len));
    return {max_of(1, min_of(given.rows, whole.q_len - row)),
            {begin, max_of(begin, min_of(given.tokens.end, whole.kv_len))}};
  }
  const i32 shift = whole.kv_len - whole.q_len;
  const TokenRange tokens = part_at(visibility, max_of(shift + row, 0), whole.kv_len);
  return {(tokens.end == whole.kv_len ? whole.q_len : tokens.end - shift) - row, tokens};
}

// Replaces a request by its parts on the axis. Returns false if there are too many. The index of a given run is its
// number, because a mask function's rows are counted from the last token of the part (WorkItem::kv_len).
inline bool cut_to_parts(const Lengths& lengths, const Heads& heads, i32 tile_q, const Request& whole,
                         std::vector<Request>& requests, LengthTotals& totals) {
  const i32 most = lengths.runs != nullptr ? lengths.num_runs : most_parts_of_batch;
  for (i32 row = 0; row < whole.q_len;) {
    if (totals.parts >= most) return false;
    const RowRun run = run_at(lengths, heads.visibility, whole, row, totals.parts);
    if (totals.parts + 1 >= static_cast<i64>(requests.size())) requests.resize(2 * requests.size());
    Request& made = requests[totals.parts];
    made = whole;
    if (lengths.runs != nullptr) made.index = totals.parts;
    ++totals.parts;
    made.mask_offset = totals.tile_cells;
    made.q_begin += row;
    made.q_len = run.rows;
    made.kv_begin = run.tokens.begin;
    made.kv_len = run.tokens.end;
    made.tiles = whole.tiles == 0 ? 0 : ceil_div(made.q_len * heads.group(), tile_q);
    totals.units += made.tiles * static_cast<i64>(heads.num_kv_heads);
    if (lengths.cell_tokens > 0) totals.tile_cells += made.tiles * ceil_div<i64>(made.kv_len, lengths.cell_tokens);
    row += run.rows;
  }
  return true;
}

// Consecutive requests with the same number of rows. What follows from that number is computed once, since neighbours
// mostly have the same one.
struct EqualRows {
  i64 q_len = 0;
  i64 tiles = 0;  // of each request
  bool are_few = false;
  i64 first = 0;   // request
  i64 tokens = 0;  // of all of them

  void add_to(LengthTotals& totals) const {
    totals.kv.all += tokens;
    totals.kv.by_tile += tokens * tiles;
    if (are_few) totals.kv.few_rows += tokens;
    totals.max_q_len = max_of(totals.max_q_len, static_cast<i32>(q_len));
  }
};

// Where each request's packed mask, or the cells of its mask function's tiles, begin.
inline void place_masks(const Lengths& lengths, Request* requests, LengthTotals& totals) {
  for (i32 i = 0; i < totals.parts; ++i) {
    Request& request = requests[i];
    request.mask_offset = totals.mask_bytes + totals.tile_cells;  // one of the two is 0
    const i64 kv_len = request.kv_len;
    if (lengths.has_custom_mask) totals.mask_bytes += ceil_div<i64>(request.q_len * kv_len, 8);
    if (lengths.cell_tokens > 0) totals.tile_cells += request.tiles * ceil_div<i64>(kv_len, lengths.cell_tokens);
  }
}

// A difference of any two numbers. If both are 0 or more, it is exact.
inline i64 wrapped_minus(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) - static_cast<u64>(b)); }

// Reads and checks every request. `requests` grows to hold all parts and one more entry.
template <class Index, bool is_cut>
LengthFault read_lengths(const Lengths& lengths, const Heads& heads, i32 tile_q, std::vector<Request>& requests,
                         LengthTotals& totals) {
  const i32 num_kv_heads = heads.num_kv_heads, group = heads.group(), most_few = most_few_rows(group, tile_q);
  const i64 batch = lengths.batch, page_size = lengths.page_size > 0 ? lengths.page_size : 1;
  if (static_cast<i64>(requests.size()) <= batch) requests.resize(batch + 1);
  const Index q_indptr(lengths.q_indptr), kv_indptr(lengths.kv_indptr);
  const Index last_page_len(lengths.last_page_len), kv_lens(lengths.kv_lens);
  const bool has_q_indptr = lengths.q_indptr.data, has_kv_lens = lengths.kv_lens.data;
  const bool has_last_page_len = lengths.last_page_len.data && !has_kv_lens;

  i64 q_end = has_q_indptr ? q_indptr[0] : 0, kv_end = kv_indptr[0];
  using enum LengthError;
  if (q_end < 0) return {LengthArray::q_indptr, negative_first, 0, q_end, 0};
  if (kv_end < 0) return {LengthArray::kv_indptr, negative_first, 0, kv_end, 0};

  EqualRows rows;
  i64 longest = 0;
  Request* const whole_requests = requests.data();
  for (i64 i = 0; i < batch; ++i) {
    const i64 q_begin = q_end, kv_begin = kv_end;
    q_end = has_q_indptr ? q_indptr[i + 1] : q_begin + lengths.q_len_per_request;
    kv_end = kv_indptr[i + 1];
    const i64 q_len = wrapped_minus(q_end, q_begin), entries = wrapped_minus(kv_end, kv_begin);
    const i64 beyond = wrapped_minus(max_i32, q_end) | wrapped_minus(max_i32, kv_end);
    if ((q_len | entries | q_end | kv_end | beyond) < 0) {  // one branch for all requests without fault
      if (q_end < q_begin) return {LengthArray::q_indptr, decreases, i + 1, q_end, q_begin};
      if (kv_end < kv_begin) return {LengthArray::kv_indptr, decreases, i + 1, kv_end, kv_begin};
      if (q_end > max_i32) return {LengthArray::q_indptr, overflow, i + 1, q_end, max_i32};
      return {LengthArray::kv_indptr, overflow, i + 1, kv_end, max_i32};
    }

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
      kv_len += entries > 0 ? given - page_size : 0;
    }
    if (kv_len > most_kv_len) return {LengthArray::kv_indptr, overflow, i + 1, kv_len, most_kv_len};

    if (q_len != rows.q_len) {
      rows.add_to(totals);
      if constexpr (!is_cut) totals.units += (i - rows.first) * rows.tiles * num_kv_heads;
      const i64 tiles = ceil_div<i64>(q_len * group, tile_q), limit = max_i32 / max_of<i64>(group, 1);
      if (q_len > limit || tiles * num_kv_heads > max_i32)
        return {LengthArray::q_indptr, overflow, i + 1, q_len, limit};
      rows = {q_len, lengths.serves(q_len) ? tiles : 0, has_few_rows(q_len, most_few), i, 0};
    }
    rows.tokens += kv_len;
    longest = max_of(longest, kv_len);
    const Request whole{kv_begin,
                        0,
                        static_cast<i32>(i),
                        static_cast<i32>(q_begin),
                        static_cast<i32>(q_len),
                        0,
                        static_cast<i32>(kv_len),
                        static_cast<i32>(rows.tiles),
                        0,
                        0.0};
    if constexpr (is_cut) {
      if (!cut_to_parts(lengths, heads, tile_q, whole, requests, totals))
        return {LengthArray::q_indptr, too_many_parts, i + 1, q_end, most_parts_of_batch};
    } else {
      whole_requests[i] = whole;
    }
  }
  rows.add_to(totals);
  totals.kv.longest = longest;
  totals.q_rows = q_end;
  totals.kv_entries = kv_end;
  if constexpr (!is_cut) {
    totals.units += (batch - rows.first) * rows.tiles * num_kv_heads;
    totals.parts = static_cast<i32>(batch);
    if (lengths.has_custom_mask || lengths.cell_tokens > 0) place_masks(lengths, whole_requests, totals);
  }
  const bool are_all = lengths.serves_all() && !is_cut;
  totals.served = are_all ? totals.kv : served_tokens(most_few, requests.data(), totals.parts);
  return {};
}

inline LengthFault read_lengths(const Lengths& lengths, const Heads& heads, i32 tile_q, std::vector<Request>& requests,
                                LengthTotals& totals) {
  const bool plain = PlainInt32::fits(lengths.q_indptr) && PlainInt32::fits(lengths.kv_indptr) &&
                     PlainInt32::fits(lengths.last_page_len) && PlainInt32::fits(lengths.kv_lens);
  if (lengths.has_parts(heads.visibility)) {
    return plain ? read_lengths<PlainInt32, true>(lengths, heads, tile_q, requests, totals)
                 : read_lengths<AnyIndex, true>(lengths, heads, tile_q, requests, totals);
  }
  return plain ? read_lengths<PlainInt32, false>(lengths, heads, tile_q, requests, totals)
               : read_lengths<AnyIndex, false>(lengths, heads, tile_q, requests, totals);
}

}  // namespace flashpage::plan
