// The class of a batch by what its rows see (flashpage/kernels/context_classes.py).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "flashpage/common/math.h"
#include "plan_call.h"

namespace flashpage::host {

// How many times as much row tiles of row.tile packed rows compute as usual ones. A request's last tile computes as
// much as a full one. Row tiles are counted once for neighbours with equally many rows: each count takes a division.
template <class Lengths>
double padding_of(const fp_context_row& row, double hidden, const Lengths& batch) {
  double usual = 0.0, other = 0.0;  // rows by tokens
  int64_t rows_before = -1;
  double packed = 0.0, hidden_tokens = 0.0, usual_padding = 0.0, other_padding = 0.0;
  batch.each([&](int64_t rows, int64_t of_request) {
    if (rows != rows_before) {
      rows_before = rows;
      const int64_t exact = rows * batch.group();
      packed = static_cast<double>(exact);
      hidden_tokens = hidden * static_cast<double>(rows);
      usual_padding = static_cast<double>(round_up<int64_t>(exact, row.usual_tile) - exact);
      other_padding = static_cast<double>(round_up<int64_t>(exact, row.tile) - exact);
    }
    const double tokens = static_cast<double>(of_request), full = packed * (tokens - hidden_tokens);
    usual += full + usual_padding * tokens;
    other += full + other_padding * tokens;
  });
  return usual > 0.0 ? other / usual : 1.0;
}

// `Lengths` has group(), and each(body), which calls body(rows, tokens) for every request. What a row sees is the
// geometric mean of the mean over all rows and that over requests: one long prompt has most of the rows, and many short
// ones most of the units.
template <class Lengths>
int32_t contexts_of(const fp_context_table& table, const Lengths& batch) {
  if (table.count == 0) return 0;
  int64_t rows = 0, requests = 0, least = INT64_MAX, most = 0;
  double by_rows = 0.0, by_requests = 0.0, rows_of_request = 0.0;  // sums
  batch.each([&](int64_t of_request, int64_t tokens) {
    if (of_request <= 0) return;
    rows += of_request, ++requests, least = std::min(least, of_request), most = std::max(most, of_request);
    const double count = static_cast<double>(of_request);
    const double seen = std::max(0.0, static_cast<double>(tokens) - table.hidden * count);
    rows_of_request += count * count, by_rows += count * seen, by_requests += seen;
  });
  if (rows == 0) return 0;
  const double seen = std::sqrt(by_rows / static_cast<double>(rows) * (by_requests / static_cast<double>(requests)));
  rows_of_request /= static_cast<double>(rows);
  for (int32_t i = 0; i < table.count; ++i) {
    const fp_context_row& row = table.rows[i];
    if (rows <= row.most_rows && rows_of_request >= row.least_rows_of_request && seen >= row.least_tokens &&
        seen <= row.most_tokens && (least == most || !row.has_equal_rows) &&
        (row.tile == 0 || padding_of(row, table.hidden, batch) <= row.most_padding)) {
      return row.contexts;
    }
  }
  return 0;
}

// Lengths in two arrays, [requests].
struct GivenLengths {
  const fp_context_table& table;
  int32_t count;
  const int32_t *q_lens, *kv_lens;

  int64_t group() const { return table.group; }
  template <class Body>
  void each(Body&& body) const {
    for (int32_t i = 0; i < count; ++i) body(q_lens[i], kv_lens[i]);
  }
};

}  // namespace flashpage::host
