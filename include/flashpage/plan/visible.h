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
