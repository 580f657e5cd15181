// gather_rows: copies K and V of pages of one token to consecutive rows, for an attention kernel that loads boxes.
//
// A thread copies one vector of 16 bytes for each of a few neighbouring tokens, whose page numbers are consecutive; the
// vectors of a token, over all heads, belong to neighbouring threads.
// token's vectors, of all heads, are neighbouring threads'.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/st_global.h"

namespace flashpage {

struct GatherRows {
  static constexpr int threads = 256;
  static constexpr int shared_bytes = 0, ctas_per_sm = 4, cluster_rows = 0;
  static constexpr int tokens = 4;  // whose vectors of K and V a thread has in flight at once

  FP_DEVICE static void run(const GatherRowsParams& p) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const u32 all = ceil_div(p.count, tokens) * p.token_vectors.divisor;
    for (u32 i = blockIdx.x * threads + threadIdx.x; i < all; i += gridDim.x * threads) {
      u32 group, vector;
      p.token_vectors.divmod(i, group, vector);
      copy(p, static_cast<i32>(group) * tokens, vector);
    }
  }

 private:
  // One vector of K or V: its address in the cache's page 0, and in row 0.
  struct Source {
    const u8* from;
    i64 page_bytes;
    u8* to;
    i64 row_bytes;
    bool exists;  // either K or V may have more vectors

    FP_DEVICE Source(const KvView& view, void* rows, const FastDiv& row_vectors, i32 token_vectors, u32 vector)
        : page_bytes(2 * view.page_stride),
          to(static_cast<u8*>(rows) + 16 * i64{vector}),
          row_bytes(16 * i64{token_vectors}),
          exists(static_cast<i32>(vector) < token_vectors) {
      u32 head, in_row;
      row_vectors.divmod(exists ? vector : 0, head, in_row);
      from = static_cast<const u8*>(view.data) + 2 * view.head_stride * head + 16 * in_row;
    }
    FP_DEVICE void load(u32 (&words)[4], i32 page) const { ptx::load_once(words, from + page * page_bytes); }
    FP_DEVICE void store(const u32 (&words)[4], i64 row, bool is_wanted) const {
      ptx::store_global(to + row * row_bytes, make_uint4(words[0], words[1], words[2], words[3]), is_wanted && exists);
    }
  };

  // Copies tokens [first, first + tokens) of those that are gathered. After the last one, it is loaded again and not
  // stored.
  FP_DEVICE static void copy(const GatherRowsParams& p, i32 first, u32 vector) {
    const Source k(p.k, p.k_rows, p.k_row_vectors, p.k_token_vectors, vector);
    const Source v(p.v, p.v_rows, p.v_row_vectors, p.v_token_vectors, vector);
    i32 pages[tokens];
    u32 keys[tokens][4], values[tokens][4];
#pragma unroll
    for (int i = 0; i < tokens; ++i) pages[i] = __ldg(p.kv_indices + p.first + min_of(first + i, p.count - 1));
#pragma unroll
    for (int i = 0; i < tokens; ++i) k.load(keys[i], pages[i]);
#pragma unroll
    for (int i = 0; i < tokens; ++i) v.load(values[i], pages[i]);
#pragma unroll
    for (int i = 0; i < tokens; ++i) k.store(keys[i], i64{p.first} + first + i, first + i < p.count);
#pragma unroll
    for (int i = 0; i < tokens; ++i) v.store(values[i], i64{p.first} + first + i, first + i < p.count);
  }
};

}  // namespace flashpage
