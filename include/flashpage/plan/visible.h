// The tokens that a query sees by causal and window: the one place of this arithmetic for the planner, the kernels and
// the CPU.
#pragma once
#include "flashpage/plan/work_item.h"

namespace flashpage {

// Tokens [begin, end) of a request.
struct TokenRange {
  i32 begin;
  i32 end;
  FP_HOST_DEVICE i32 size() const { return end - begin; }
};

// The token position of a request's row. Rows are aligned to the right end of the tokens.
FP_HOST_DEVICE i32 query_position(const WorkItem& item, i32 row) { return item.kv_len - item.q_len + row; }

// What rows see of their request, for all requests of a batch: the options of these names
// (flashpage/kernels/options.py).
struct Visibility {
  i32 causal;       // 1: no token after the row's own
  i32 window_left;  // tokens before the row's own; -1: all
  i32 chunk;        // tokens: rows see those of their own chunk of so many alone; 0: of all
};

// A batch is planned in parts of requests: rows that all see nothing before the part's first token, and nothing at or
// after its end. Here the part that a row at `position` is in.
FP_HOST_DEVICE TokenRange part_at(const Visibility& visibility, i32 position, i32 kv_len) {
  if (visibility.chunk == 0) return {0, kv_len};
  const i32 begin = position / visibility.chunk * visibility.chunk;  // a chunk is less than 2^30, as a window is
  return {min_of(begin, kv_len), kv_len - begin < visibility.chunk ? kv_len : begin + visibility.chunk};
}
// Whether requests may have several parts.
FP_HOST_DEVICE bool has_parts(const Visibility& visibility) { return visibility.chunk > 0; }
// Of so many requests with so many rows in all.
inline i64 most_parts(const Visibility& visibility, i64 requests, i64 rows) {
  return has_parts(visibility) ? 2 * requests + rows / visibility.chunk : requests;
}

// The first token that a query at `position` sees, and the end of what it sees, of tokens from `begin` on or before
// `end`. Both grow with the position. Options have `causal` and `window_left`; a window is less than 2^30 (check_window
// in flashpage/kernels/options.py), so that no difference overflows.
template <class Options>
FP_HOST_DEVICE i32 first_visible(const Options& options, i32 position, i32 begin) {
  return options.window_left >= 0 ? max_of(begin, position - options.window_left) : begin;
}
template <class Options>
FP_HOST_DEVICE i32 visible_end(const Options& options, i32 position, i32 end) {
  return options.causal ? min_of(end, position + 1) : end;
}

}  // namespace flashpage
