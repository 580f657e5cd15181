// The class of a batch by what its rows see (flashpage/kernels/context_classes.py).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "flashpage/common/math.h"
#include "plan_call.h"

namespace flashpage::host {

// What row tiles of some sizes compute, in rows by tokens: a request's last tile computes as much as a full one. One
// pass over the lengths sums up all sizes of a table's rows, because reading them takes as long as the sums.
class ComputedByTiles {
 public:
  void add(const fp_context_row& row) { add(row.usual_tile), add(row.tile); }

  template <class Lengths>
  void sum_up(double hidden, const Lengths& batch) {
    int64_t rows_before = 0;
    double requests = 0.0, tokens = 0.0;  // of neighbours with equally many rows
    const auto add_neighbours = [&] {
      const int64_t packed = rows_before * batch.group();
      const double hidden_tokens = hidden * static_cast<double>(rows_before) * requests;
      const double full = static_cast<double>(packed) * (tokens - hidden_tokens);
      for (int32_t i = 0; i < count_; ++i) computed_[i] += full + static_cast<double>(padding_of(packed, i)) * tokens;
    };
    batch.each([&](int64_t rows, int64_t of_request) {
      if (rows != rows_before) {
        add_neighbours();
        rows_before = rows, requests = tokens = 0.0;
      }
      requests += 1.0, tokens += static_cast<double>(of_request);
    });
    add_neighbours();
  }

  // How many times as much the row's tiles compute as usual ones.
  double ratio(const fp_context_row& row) const {
    const double usual = computed_[place_of(row.usual_tile)];
    return usual > 0.0 ? computed_[place_of(row.tile)] / usual : 1.0;
  }

 private:
  static constexpr int32_t most_tiles = 2 * (sizeof(fp_context_table::rows) / sizeof(fp_context_row));

  // The rows that are missing in a request's last tile.
  int64_t padding_of(int64_t packed, int32_t i) const { return round_up<int64_t>(packed, tiles_[i]) - packed; }
  int32_t place_of(int32_t tile) const {
    return static_cast<int32_t>(std::find(tiles_, tiles_ + count_, tile) - tiles_);
  }
  void add(int32_t tile) {
    if (place_of(tile) != count_) return;
    tiles_[count_] = tile, computed_[count_++] = 0.0;
  }

  int32_t count_ = 0;
  int32_t tiles_[most_tiles];
  double computed_[most_tiles];
};

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
  const auto fits = [&](const fp_context_row& row) {  // but for its padding
    return rows <= row.most_rows && rows_of_request >= row.least_rows_of_request && seen >= row.least_tokens &&
           seen <= row.most_tokens && (least == most || !row.has_equal_rows);
  };
  std::optional<ComputedByTiles> computed;
  for (int32_t i = 0; i < table.count; ++i) {
    const fp_context_row& row = table.rows[i];
    if (!fits(row)) continue;
    if (row.tile == 0) return row.contexts;
    if (!computed) {
      computed.emplace();
      for (int32_t j = i; j < table.count; ++j)
        if (table.rows[j].tile != 0 && fits(table.rows[j])) computed->add(table.rows[j]);
      computed->sum_up(table.hidden, batch);
    }
    if (computed->ratio(row) <= row.most_padding) return row.contexts;
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
