// Requests in the planner's form, on the host and on a card.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/plan/visible.h"

namespace flashpage::plan {

inline constexpr i64 max_i32 = 0x7fffffff;
inline constexpr i64 most_kv_len = max_i32 - 1024;  // kernels count on to the end of a tile after the last token

// Options that are the same for every request of a batch.
struct Heads {
  i32 num_q_heads;
  i32 num_kv_heads;
  Visibility visibility;

  FP_HOST_DEVICE i32 group() const { return num_q_heads / num_kv_heads; }
};

// A request on the axis, or one of its parts (visible.h) with the rows of that part.
struct Request {
  i64 kv_offset;    // page index or KV row
  i64 mask_offset;  // bytes of packed bits, or cells of mask tiles
  i32 index;        // in the batch
  i32 q_begin;      // rows
  i32 q_len;        // rows
  i32 kv_begin;     // tokens: the first one that any row sees
  i32 kv_len;       // tokens: the last row's position + 1
  i32 tiles;        // row tiles; 0: no rows, or not in this plan
  i32 number;       // requests before this one that have row tiles
  double cost;      // ns on the cost axis before this request

  FP_HOST_DEVICE i32 tokens() const { return kv_len - kv_begin; }
  FP_HOST_DEVICE bool costs_like(const Request& other) const {
    return kv_len == other.kv_len && q_len == other.q_len && kv_begin == other.kv_begin;
  }
};

// A request with few rows fills at most half a row tile: it waits for memory, not for the tensor cores.
FP_HOST_DEVICE i32 most_few_rows(i32 group, i32 tile_q) { return tile_q / 2 / group; }
FP_HOST_DEVICE bool has_few_rows(i64 q_len, i32 most_few_rows) { return q_len > 0 && q_len <= most_few_rows; }

// Sums and extremes of KV tokens over requests.
struct KvTokens {
  i64 all = 0;
  i64 longest = 0;
  i64 by_tile = 0;   // sum with each request's tokens counted once for each row tile
  i64 few_rows = 0;  // sum over requests with few rows

  FP_HOST_DEVICE static KvTokens of(i64 kv_len, i32 tiles, bool few_rows) {
    return {kv_len, kv_len, kv_len * tiles, few_rows ? kv_len : 0};
  }
  FP_HOST_DEVICE KvTokens operator+(const KvTokens& other) const {
    return {all + other.all, max_of(longest, other.longest), by_tile + other.by_tile, few_rows + other.few_rows};
  }
};

}  // namespace flashpage::plan
