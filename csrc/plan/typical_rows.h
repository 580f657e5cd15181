// The rows of a request by which a batch's kernel and row tile are chosen.
#pragma once
#include <algorithm>
#include <cstdint>

#include "flashpage.h"
#include "flashpage/common/math.h"

namespace flashpage::host {

// An entry of an array that is not checked yet, within 31 bits; the planner reports others.
inline int64_t entry_of(const fp_index_array& array, int64_t i) {
  const int64_t at = i * array.stride;
  const int64_t entry =
      array.is_int64 ? static_cast<const int64_t*>(array.data)[at] : static_cast<const int32_t*>(array.data)[at];
  return std::clamp<int64_t>(entry, -1, int64_t{1} << 31);
}

inline int64_t rows_of_request(const fp_problem& problem, int32_t i) {
  return std::max<int64_t>(0, entry_of(problem.q_indptr, i + 1) - entry_of(problem.q_indptr, i));
}

// Tokens of a request, those of whole pages if nothing else is given.
inline int64_t tokens_of_request(const fp_problem& problem, int32_t i) {
  if (problem.kv_lens.data != nullptr) return std::max<int64_t>(0, entry_of(problem.kv_lens, i));
  const int64_t entries = entry_of(problem.kv_indptr, i + 1) - entry_of(problem.kv_indptr, i);
  return std::max<int64_t>(0, entries) * std::max(problem.page_size, 1);
}

// Calls body(rows, tokens) for every request, with the numbers of the two functions above.
template <class Body>
void each_request(const fp_problem& problem, Body&& body) {
  const bool has_lens = problem.kv_lens.data != nullptr;
  const int64_t page_size = std::max(problem.page_size, 1);
  int64_t first_row = entry_of(problem.q_indptr, 0), first_entry = entry_of(problem.kv_indptr, 0);
  for (int32_t i = 0; i < problem.batch; ++i) {
    const int64_t row = entry_of(problem.q_indptr, i + 1), entry = entry_of(problem.kv_indptr, i + 1);
    const int64_t tokens = has_lens ? entry_of(problem.kv_lens, i) : (entry - first_entry) * page_size;
    body(std::max<int64_t>(0, row - first_row), std::max<int64_t>(0, tokens));
    first_row = row, first_entry = entry;
  }
}

// At most as many of a request's tokens as its rows see by a window.
inline int64_t visible_of_request(const fp_problem& problem, int32_t i) {
  const int64_t tokens = tokens_of_request(problem, i), left = problem.visibility.window_left;
  return left < 0 ? tokens : std::min(tokens, left + rows_of_request(problem, i));
}

// Requests with rows of a batch, or of a part of it. Usually their average decides. But each row tile reads its
// request's tokens, so one request of many rows and tokens may cost more than all others if tiles are short: then
// larger tiles are worth it, unless they save so few tokens that their units take longer.
class TypicalRows {
 public:
  explicit TypicalRows(const fp_problem& problem)
      : group_(problem.num_q_heads / problem.num_kv_heads), num_kv_heads_(problem.num_kv_heads) {}

  void add(int64_t rows, int64_t tokens) {
    ++requests_;
    rows_ += rows;
    for (int i = 0; i < sizes; ++i) {
      read_[i] += static_cast<double>((rows * group_ + size_of(i) - 1) / size_of(i)) * static_cast<double>(tokens);
    }
  }

  int64_t rows() const {
    const int64_t average = requests_ > 0 ? ceil_div(rows_, requests_) : 1;
    int size = 0;
    while (size + 1 < sizes && size_of(size) < average * group_) ++size;
    const int usual = size;
    while (size + 1 < sizes && are_worth(read_[size], read_[size + 1])) ++size;
    return size == usual ? average : size_of(size) / group_;
  }

 private:
  static constexpr int sizes = 4;        // of row tiles: 16, 32, 64 and 128 packed rows
  static constexpr double worth = 1.15;  // tokens that are read, in relation to those that tiles of twice the rows read
  static constexpr double least_saved = 16384.0;  // of them, of all KV heads: some 120 on each SM of an H200
  static constexpr int64_t size_of(int i) { return int64_t{16} << i; }

  bool are_worth(double read, double read_by_larger) const {
    return read > worth * read_by_larger && (read - read_by_larger) * num_kv_heads_ >= least_saved;
  }

  int64_t group_, num_kv_heads_, requests_ = 0, rows_ = 0;
  double read_[sizes] = {};  // tokens, by all row tiles of one KV head
};

}  // namespace flashpage::host
