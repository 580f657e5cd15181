// What the planner is told besides the lengths: heads, visibility, and how a tile's work may be cut and what it costs.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage::plan {

enum class Walk { teams, runs };  // csrc/flashpage.h, fp_walk

// Heads and visibility: the same for every request of a batch.
struct Heads {
  i32 num_q_heads;
  i32 num_kv_heads;
  bool causal;
  i32 window_left;  // tokens; -1: all

  FP_HOST_DEVICE i32 group() const { return num_q_heads / num_kv_heads; }
};

struct Schedule {
  i32 num_ctas;
  Walk walk;
  i32 tile_q;   // packed rows
  i32 tile_kv;  // tokens
  double ns_per_token;
  double ns_per_unit;
  double few_rows_cost;  // factor of ns_per_token, where has_few_rows (lengths.h)
  double ns_per_piece;
  double ns_per_merge;  // what merging adds to a launch, beyond the price of pieces
  i32 min_piece_tokens;
  i32 max_pieces;          // of one unit; 0: no limit
  i32 fixed_piece_tokens;  // > 0: cut every unit at its multiples; -1: never cut; 0: balance
  i32 merge_rows;          // packed rows
  i32 wave_tokens;         // of one KV head, that the cache keeps; 0: no waves

  FP_HOST_DEVICE bool balanced() const { return fixed_piece_tokens == 0; }
  FP_HOST_DEVICE bool fixed() const { return fixed_piece_tokens > 0; }
};

}  // namespace flashpage::plan
