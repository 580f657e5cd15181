// The tokens that a query sees under causal and window. The planner, the kernels and the CPU all use this arithmetic.
#pragma once
#include "flashpage/plan/work_item.h"

namespace flashpage {

// Tokens [begin, end) of a request.
struct TokenRange {
  i32 begin;
  i32 end;
  FP_HOST_DEVICE i32 size() const { return end - begin; }
};

// The token position of a request's row. The last row is at the request's last token.
FP_HOST_DEVICE i32 query_position(const WorkItem& item, i32 row) { return item.kv_len - item.q_len + row; }

// The options that hide whole ranges of tokens, the same for all requests of a batch (flashpage/kernels/options.py has
// options of these names).
struct Visibility {
  i32 causal;       // 1: no token after the row's own
  i32 window_left;  // tokens before the row's own; -1: all
  i32 chunk;        // rows see only tokens of their own chunk of so many; 0: no chunks
};

// The part of the request that a row at `position` is in. A batch is planned in parts of requests: the rows of a part
// see nothing before its first token and nothing at or after its end.
FP_HOST_DEVICE TokenRange part_at(const Visibility& visibility, i32 position, i32 kv_len) {
  if (visibility.chunk == 0) return {0, kv_len};
  const i32 begin = position / visibility.chunk * visibility.chunk;  // a chunk is less than 2^30, as a window is
  return {min_of(begin, kv_len), kv_len - begin < visibility.chunk ? kv_len : begin + visibility.chunk};
}
// Whether requests may have several parts.
FP_HOST_DEVICE bool has_parts(const Visibility& visibility) { return visibility.chunk > 0; }
// An upper bound of the parts of so many requests with so many rows in all.
inline i64 most_parts(const Visibility& visibility, i64 requests, i64 rows) {
  return has_parts(visibility) ? 2 * requests + rows / visibility.chunk : requests;
}

// The first token that a query at `position` sees among those from `begin` on, and the end of what it sees among those
// before `end`. Both grow with the position. Options have `causal` and `window_left`; a window is less than 2^30
// (check_window in flashpage/kernels/options.py), so that no difference overflows.
template <class Options>
FP_HOST_DEVICE i32 first_visible(const Options& options, i32 position, i32 begin) {
  return options.window_left >= 0 ? max_of(begin, position - options.window_left) : begin;
}
template <class Options>
FP_HOST_DEVICE i32 visible_end(const Options& options, i32 position, i32 end) {
  return options.causal ? min_of(end, position + 1) : end;
}

}  // namespace flashpage
