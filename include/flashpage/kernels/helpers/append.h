// append_paged_kv_cache: copies new tokens to their slots, without conversion. One warp for each token and head, K and
// V.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

template <class Traits>
struct Append {
  using Element = typename Traits::StoredCache;
  static constexpr int warps = 8;
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;

  FP_DEVICE static void run(const AppendParams& params) {
    ptx::grid_dependency_wait();
    u32 rows = static_cast<u32>(params.nnz) * params.num_kv_heads;
    for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < rows; i += gridDim.x * warps)
      append_one(params, static_cast<i32>(i / params.num_kv_heads), static_cast<i32>(i % params.num_kv_heads));
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static void append_one(const AppendParams& p, i32 token, i32 head) {
    i32 request = p.batch_indices[token];
    if (request < 0) return;  // get_batch_indices_positions fills unused entries with -1
    u32 page_of_request, in_page;
    p.page.divmod(p.positions[token], page_of_request, in_page);
    i64 page = p.kv_indices[p.kv_indptr[request] + page_of_request];
    auto slot = [&](const KvView& view) {
      return static_cast<Element*>(const_cast<void*>(view.data)) + page * view.page_stride +
             in_page * view.token_stride + head * view.head_stride;
    };
    copy_row(static_cast<const Element*>(p.append_key) + token * p.key_row_stride + head * p.key_head_stride, slot(p.k),
             p.head_dim_qk);
    copy_row(static_cast<const Element*>(p.append_value) + token * p.value_row_stride + head * p.value_head_stride,
             slot(p.v), p.head_dim_vo);
  }

  // Head dims are multiples of 8; rows may start anywhere.
  FP_DEVICE static void copy_row(const Element* from, Element* to, i32 count) {
    i32 lane = threadIdx.x % 32;
    bool aligned = ((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | count * sizeof(Element)) & 7) == 0;
    if (aligned) {
      for (i32 i = lane; i < static_cast<i32>(count * sizeof(Element) / 8); i += 32)
        reinterpret_cast<u64*>(to)[i] = reinterpret_cast<const u64*>(from)[i];
    } else {
      for (i32 i = lane; i < count; i += 32) to[i] = from[i];
    }
  }
};

}  // namespace flashpage
