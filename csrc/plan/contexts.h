// The class of a batch by what its rows see (flashpage/kernels/context_classes.py).
#pragma once
#include "plan_call.h"

namespace flashpage::host {

inline int32_t contexts_of(const fp_context_table& table, int64_t requests, int64_t rows, int64_t tokens,
                           bool has_equal_rows) {
  if (requests == 0) return 0;
  const double seen = (static_cast<double>(tokens) - table.hidden * static_cast<double>(rows)) / requests;
  for (int32_t i = 0; i < table.count; ++i) {
    const fp_context_row& row = table.rows[i];
    if (rows <= row.most_rows && static_cast<double>(rows) >= row.least_rows_of_request * requests &&
        seen >= row.least_tokens && seen <= row.most_tokens && (has_equal_rows || !row.has_equal_rows)) {
      return row.contexts;
    }
  }
  return 0;
}

}  // namespace flashpage::host
