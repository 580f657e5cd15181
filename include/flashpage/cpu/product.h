// The one matrix product of the backend, for scores (queries x keys) and outputs (weights x values). A strip of rows
// stays in registers; one operand is broadcast word by word, the other is read from packed panels.
#pragma once
#include "flashpage/cpu/convert.h"

namespace flashpage::cpu {

// Registers hold strip_rows x panel_vectors sums, one panel step and one broadcast word: 24 + 4 + 1 of 32 (AVX-512) or
// 12 + 2 + 1 of 16 (AVX2).
inline constexpr int strip_rows = 6;
inline constexpr int panel_vectors = num_lanes == 16 ? 4 : 2;
inline constexpr int panel_width = panel_vectors * num_lanes;

// A panel holds `panel_width` columns. Word (step, column) of panel p is at p * panel_words + step * panel_width +
// column.
struct Product {
  const u32* rows;  // [row][step], words
  i64 row_stride;   // words
  const u32* panels;
  i64 panel_words;
  int step_begin, step_end;
  float* sums;  // [row][column]
  i64 sums_stride;
  const float* carry;  // sums = carry[row] * sums + product; null: sums = product
};

template <class Operand, int num_rows, int num_vectors>
inline void multiply_columns(const Product& p, int vector) {
  const int column = vector * num_lanes;
  const u32* panel = p.panels + (column / panel_width) * p.panel_words + column % panel_width;
  FloatLanes sums[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; ++v)
      sums[r][v] = p.carry ? p.carry[r] * load_bits(p.sums + r * p.sums_stride + column + v * num_lanes) : FloatLanes{};
  for (int step = p.step_begin; step < p.step_end; ++step) {
    FloatLanes words[num_vectors];
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; ++v) words[v] = load_bits(panel + i64{step} * panel_width + v * num_lanes);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
      const FloatLanes word = splat_bits(p.rows[r * p.row_stride + step]);
#pragma GCC unroll 8
      for (int v = 0; v < num_vectors; ++v) sums[r][v] = multiply_add<Operand>(sums[r][v], word, words[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; ++v) store_bits(p.sums + r * p.sums_stride + column + v * num_lanes, sums[r][v]);
}

// Multiplies the columns of vectors [vector_begin, vector_end): whole panels, and single vectors at both ends.
template <class Operand, int num_rows>
inline void multiply_rows(const Product& p, int vector_begin, int vector_end) {
  for (int vector = vector_begin; vector < vector_end;) {
    if (vector % panel_vectors == 0 && vector + panel_vectors <= vector_end) {
      multiply_columns<Operand, num_rows, panel_vectors>(p, vector);
      vector += panel_vectors;
    } else {
      multiply_columns<Operand, num_rows, 1>(p, vector++);
    }
  }
}

template <class Operand, int num_rows = strip_rows>
inline void multiply(const Product& p, int rows, int vector_begin, int vector_end) {
  if (rows == num_rows) return multiply_rows<Operand, num_rows>(p, vector_begin, vector_end);
  if constexpr (num_rows > 1) multiply<Operand, num_rows - 1>(p, rows, vector_begin, vector_end);
}

}  // namespace flashpage::cpu
