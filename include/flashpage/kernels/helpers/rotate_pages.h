// rotate_pages: rotates q, and K of each request's tokens, once for all tiles of an attention kernel that then needs no
// RoPE. Pages become consecutive pages with new numbers, and V goes with K.
//
// A job is up to eight heads of neighbouring tokens or rows of q. A thread rotates eight columns of each half of a row,
// and uses their sines for all heads.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/plan/visible.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/st_global.h"
#include "flashpage/tile/rope/rotation.h"

namespace flashpage {

template <class Traits>
struct RotatePages {
  using Element = typename Traits::StoredQuery;
  static constexpr int threads = 256;
  static constexpr int columns = Traits::head_dim_qk, half = columns / 2;
  static constexpr int row_threads = half / 8;
  static constexpr int rows = threads / row_threads;       // of a job: rows of q, or tokens
  static constexpr int heads = 8;                          // of a job
  static constexpr int at_once = 4;                        // heads whose loads a thread has in flight
  static constexpr int vectors = Traits::head_dim_vo / 8;  // of 16 bytes, in a row of V
  static_assert(sizeof(Element) == 2 && half % 8 == 0 && Traits::head_dim_vo % 8 == 0 && row_threads <= threads);

  struct Shared {
    Frequency frequencies[half];
    i32 found[threads];  // items that begin a request
    i32 num_found;
  };
  static constexpr int shared_bytes = sizeof(Shared), ctas_per_sm = 2, cluster_rows = 0;
  // The rotations of a thread's eight columns at one position.
  struct Rotations {
    RotationPair of[4];
  };

  Shared& shared;
  const RotatePagesParams& p;
  const WorkItem* items = plan_items(p.plan);
  i32 num_items = p.plan->num_items;
  int row = threadIdx.x / row_threads, vector = threadIdx.x % row_threads;

  FP_DEVICE static void run(const RotatePagesParams& params) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    for (int i = threadIdx.x; i < half; i += threads)
      shared.frequencies[i] = Frequency::of(revolutions_a_token(params, i, half));
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const RotatePages kernel(shared, params);
    kernel.number_pages();
    kernel.rotate_all();
  }

 private:
  FP_DEVICE RotatePages(Shared& shared, const RotatePagesParams& params) : shared(shared), p(params) {}

  FP_DEVICE void number_pages() const {
    if (p.numbers == nullptr) return;
    for (u32 i = blockIdx.x * threads + threadIdx.x; i < static_cast<u32>(p.count); i += gridDim.x * threads)
      p.numbers[p.first + i] = p.first + i;
  }

  // Rotates each request once, at the first piece of its first unit. Items of a lane are in the plan once for all its
  // heads.
  FP_DEVICE void rotate_all() const {
    for (i32 begin = 0; begin < num_items; begin += threads) {
      if (threadIdx.x == 0) shared.num_found = 0;
      __syncthreads();
      const i32 i = begin + threadIdx.x;
      if (i < num_items && items[i].first_packed_row == 0 && items[i].kv_head == 0 && items[i].piece == 0)
        shared.found[atomicAdd(&shared.num_found, 1)] = i;
      __syncthreads();
      for (i32 k = 0; k < shared.num_found; ++k) {
        const WorkItem item = items[shared.found[k]];  // in registers
        rotate(item);
      }
      __syncthreads();
    }
  }

  // A request's jobs are spread from the CTA on at which its tokens, or rows, would begin if requests followed each
  // other.
  FP_DEVICE void rotate(const WorkItem& item) const {
    const i32 begin = item.kv_begin;  // no row of the request, or of its part, sees an earlier token
    const u32 tokens_before = static_cast<u32>(item.kv_offset - p.first) * p.page.divisor + begin;
    for_each_job(tokens_before, item.kv_len - begin, p.num_kv_heads,
                 [&](i32 first, i32 head, i32 count) { rotate_tokens(item, begin + first + row, head, count); });
    for_each_job(static_cast<u32>(item.q_begin), item.q_len, p.num_q_heads,
                 [&](i32 first, i32 head, i32 count) { rotate_query(item, first + row, head, count); });
  }
  template <class Body>
  FP_DEVICE void for_each_job(u32 rows_before, i32 num_rows, i32 num_heads, Body&& body) const {
    const u32 chunks = ceil_div(num_heads, heads), all = ceil_div(num_rows, rows) * chunks, ctas = gridDim.x;
    const u32 begin = rows_before / rows * chunks % ctas;
    for (u32 job = (blockIdx.x + ctas - begin) % ctas; job < all; job += ctas) {
      const i32 head = static_cast<i32>(job % chunks) * heads;
      body(static_cast<i32>(job / chunks) * rows, head, min_of(heads, num_heads - head));
    }
  }

  FP_DEVICE void rotate_tokens(const WorkItem& item, i32 token, i32 head, i32 count) const {
    bool exists = row < rows && token < item.kv_len;
    i64 from_page = 0, from_token = item.kv_offset + token;
    if (p.kv_indices != nullptr) {
      u32 entry, in_page;
      p.page.divmod(exists ? token : 0, entry, in_page);
      const i32 page = exists ? __ldg(p.kv_indices + item.kv_offset + entry) : -1;
      exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);
      from_page = page;
      from_token = in_page;
    }
    const i64 to_row = (item.kv_offset * p.page.divisor + token) * p.num_kv_heads + head;
    const auto first_of = [&](const KvView& view) {
      return static_cast<const u8*>(view.data) +
             2 * (from_page * view.page_stride + from_token * view.token_stride + head * view.head_stride);
    };
    rotate_heads(first_of(p.k), 2 * p.k.head_stride, static_cast<u8*>(p.k_pages) + to_row * columns * 2, token, count,
                 exists);
    if (p.v_pages != nullptr)
      copy_heads(first_of(p.v), 2 * p.v.head_stride, static_cast<u8*>(p.v_pages) + to_row * vectors * 16, count,
                 exists);
  }
  FP_DEVICE void rotate_query(const WorkItem& item, i32 its_row, i32 head, i32 count) const {
    const i64 at = i64{item.q_begin} + its_row;
    rotate_heads(static_cast<const u8*>(p.q) + 2 * (at * p.q_row_stride + head * p.q_head_stride), 2 * p.q_head_stride,
                 static_cast<u8*>(p.q_rows) + (at * p.num_q_heads + head) * columns * 2, query_position(item, its_row),
                 count, row < rows && its_row < item.q_len);
  }

  FP_DEVICE Rotations rotations_at(i32 position) const {
    const auto at = [&](int i) {
      return shared.frequencies[vector * 8 + i].approximately_at(static_cast<float>(position));
    };
    Rotations rotations;
#pragma unroll
    for (int i = 0; i < 4; ++i) rotations.of[i] = {at(2 * i), at(2 * i + 1)};
    return rotations;
  }

  // Rotates the row of `count` heads, which lie `head_bytes` apart, and one after the other at `to`.
  FP_DEVICE void rotate_heads(const u8* from, i64 head_bytes, u8* to, i32 position, i32 count, bool exists) const {
    const Rotations rotations = rotations_at(position);
    from += vector * 16;
    to += vector * 16;
#pragma unroll 1
    for (i32 head = 0; head < count; head += at_once) {
      u32 low[at_once][4], high[at_once][4];
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        const bool is_wanted = exists && head + n < count;
        ptx::load_once(low[n], from + (head + n) * head_bytes, is_wanted);
        ptx::load_once(high[n], from + (head + n) * head_bytes + 2 * half, is_wanted);
      }
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        const bool is_wanted = exists && head + n < count;
#pragma unroll
        for (int i = 0; i < 4; ++i) rotate_pairs<Element, Element>(low[n][i], high[n][i], rotations.of[i]);
        u8* const its = to + (head + n) * 2 * columns;
        ptx::store_global(its, make_uint4(low[n][0], low[n][1], low[n][2], low[n][3]), is_wanted);
        ptx::store_global(its + 2 * half, make_uint4(high[n][0], high[n][1], high[n][2], high[n][3]), is_wanted);
      }
    }
  }

  // Copies V of a token in the same way; neighbouring vectors of all heads belong to neighbouring threads.
  FP_DEVICE void copy_heads(const u8* from, i64 head_bytes, u8* to, i32 count, bool exists) const {
    constexpr int together = 2 * at_once;
    const i32 all = count * vectors;
#pragma unroll 1
    for (i32 first = vector; first < all; first += together * row_threads) {
      u32 words[together][4];
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const i32 at = first + n * row_threads;
        ptx::load_once(words[n], from + at / vectors * head_bytes + at % vectors * 16, exists && at < all);
      }
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const i32 at = first + n * row_threads;
        ptx::store_global(to + 16 * at, make_uint4(words[n][0], words[n][1], words[n][2], words[n][3]),
                          exists && at < all);
      }
    }
  }
};

}  // namespace flashpage
