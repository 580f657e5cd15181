// value_columns: copies V of e4m3 so that the tokens of a column follow each other, once for all tiles of a prefill
// whose loading warps then transpose nothing (tile/load/column_boxes.h).
//
// A CTA transposes 128 tokens of a head at a time.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/st_global.h"
#include "flashpage/tile/load/transposed_values.h"

namespace flashpage {

template <class Traits>
struct ValueColumnsCopy {
  static constexpr int threads = 128, columns = Traits::head_dim_vo, tokens = 128;
  using Transposed = TransposedValues<typename Traits::StoredCache, columns, tokens, threads / 32>;
  using From = typename Transposed::From;
  using To = typename Transposed::To;
  struct Shared {
    alignas(1024) u8 rows[From::tile_bytes];
    alignas(1024) u8 columns[To::tile_bytes];
  };
  static constexpr int shared_bytes = sizeof(Shared), ctas_per_sm = 6, cluster_rows = 0;
  static constexpr int row_vectors = columns / 16;  // of 16 bytes
  static constexpr int column_vectors = tokens / 16;

  FP_DEVICE static void run(const ValueColumnsParams& p) {
    Shared& shared = ptx::cta_memory<Shared>();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const i32 page = static_cast<i32>(p.page.divisor), begin = p.first * page, end = (p.first + p.count) * page;
    const i32 first = begin / tokens * tokens;
    const u32 heads = p.num_kv_heads, jobs = ceil_div(end - first, tokens) * heads;
    for (u32 job = blockIdx.x; job < jobs; job += gridDim.x) {
      const i32 position = first + static_cast<i32>(job / heads) * tokens, head = static_cast<i32>(job % heads);
      load(p, shared, position, head, begin, end);
      __syncthreads();
      Transposed::transpose(ptx::shared_address(shared.rows), ptx::shared_address(shared.columns), threadIdx.x / 32,
                            threadIdx.x % 32);
      __syncthreads();
      store(p, shared, position, head, end);
    }
  }

 private:
  FP_DEVICE static void load(const ValueColumnsParams& p, Shared& shared, i32 position, i32 head, i32 begin, i32 end) {
    u32 words[row_vectors][4];
#pragma unroll
    for (int n = 0; n < row_vectors; ++n) {
      const int i = n * threads + static_cast<int>(threadIdx.x);
      const i32 its = position + i / row_vectors;
      bool exists = its >= begin && its < end;
      i64 offset = its * p.v.token_stride;
      if (p.kv_indices != nullptr) {
        u32 entry, in_page;
        p.page.divmod(exists ? its : 0, entry, in_page);
        const i32 page = exists ? __ldg(p.kv_indices + entry) : -1;
        exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);
        offset = page * p.v.page_stride + in_page * p.v.token_stride;
      }
      const u8* from = static_cast<const u8*>(p.v.data) + offset + head * p.v.head_stride;
      ptx::load_once(words[n], from + i % row_vectors * 16, exists);
    }
#pragma unroll
    for (int n = 0; n < row_vectors; ++n) {
      const int i = n * threads + static_cast<int>(threadIdx.x);
      *reinterpret_cast<uint4*>(shared.rows + From::chunk_offset(i / row_vectors, i % row_vectors)) =
          make_uint4(words[n][0], words[n][1], words[n][2], words[n][3]);
    }
  }
  FP_DEVICE static void store(const ValueColumnsParams& p, const Shared& shared, i32 position, i32 head, i32 end) {
    u8* const to = static_cast<u8*>(p.columns) + i64{head} * columns * p.column_stride + position;
#pragma unroll
    for (int n = 0; n < columns * column_vectors / threads; ++n) {
      const int i = n * threads + static_cast<int>(threadIdx.x), row = i / column_vectors, vector = i % column_vectors;
      const uint4 bytes = *reinterpret_cast<const uint4*>(shared.columns + To::chunk_offset(row, vector));
      ptx::store_global(to + row * p.column_stride + vector * 16, bytes, position + vector * 16 < end);
    }
  }
};

}  // namespace flashpage
