// reshape_and_cache and reshape_and_cache_flash: write new tokens to their slots of a cache, converted to fp8 if the
// cache is fp8. A thread issues all its loads before its stores.
#pragma once
#include "flashpage/params/block_params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

// Traits::loader is the layout of the cache: Loader::blocks or Loader::rows.
template <class Traits>
struct BlockWrite {
  using Source = typename Traits::StoredQuery;
  using Cache = typename Traits::StoredCache;
  static constexpr int threads = 128, shared_bytes = 0, ctas_per_sm = 4, cluster_rows = 0;
  static constexpr int lanes = 16, groups = threads / lanes;
  static constexpr int piece = 16 / int(sizeof(Cache));  // elements
  static constexpr int part = piece < 8 ? piece : 8;     // elements that a thread copies at once

  struct alignas(part * sizeof(Source) < 16 ? 8 : 16) From {
    Source elements[part];
  };
  struct alignas(part * sizeof(Cache) < 16 ? 8 : 16) To {
    Cache elements[part];
  };

  FP_DEVICE static void run(const BlockWriteParams& params) {
    ptx::grid_dependency_wait();
    if (has_whole_parts(params)) {
      BlockWrite(params).write<true>();
    } else {
      BlockWrite(params).write<false>();
    }
    ptx::grid_dependency_launch();
  }

 private:
  // One head's row of a token: its source and its destination.
  struct Row {
    bool exists;
    const Source *key, *value;
    Cache *k, *v;
  };

  const BlockWriteParams& p;
  float k_scale, v_scale;

  FP_DEVICE explicit BlockWrite(const BlockWriteParams& params)
      : p(params), k_scale(scale_of(params.k_scale)), v_scale(scale_of(params.v_scale)) {}

  FP_DEVICE static float scale_of(const float* scale) { return is_fp8<Cache> && scale ? *scale : 1.f; }

  // Whether every part of a row can be loaded and stored as one vector.
  FP_DEVICE static bool has_whole_parts(const BlockWriteParams& p) {
    const u64 from = u64(p.key) | u64(p.value), to = u64(p.k) | u64(p.v);
    const i64 from_strides = p.key_row_stride | p.key_head_stride | p.value_row_stride | p.value_head_stride;
    const i64 k_strides = p.k_block_stride | p.k_slot_stride | p.k_head_stride;
    const i64 v_strides = p.v_block_stride | p.v_slot_stride | p.v_head_stride;
    const i64 strides = from_strides | k_strides | (Traits::loader == Loader::rows ? v_strides : 0);
    return (strides | p.key_dim | p.value_dim) % part == 0 && from % alignof(From) == 0 && to % alignof(To) == 0;
  }

  template <bool whole>
  FP_DEVICE void write() const {
    if constexpr (Traits::loader == Loader::rows) {
      write_rows<whole>();
    } else {
      const i32 tiles = ceil_div(p.num_tokens, lanes);
      for (i32 i = blockIdx.x; i < tiles * p.num_kv_heads; i += gridDim.x)
        write_tile<whole>(i % tiles * lanes, i / tiles);
    }
  }

  FP_DEVICE i64 slot_of(i32 token) const {
    return p.slots_are_int64 ? static_cast<const i64*>(p.slots)[token] : static_cast<const i32*>(p.slots)[token];
  }

  FP_DEVICE Row row_of(i32 token, i32 head, i64 slot) const {
    u32 block, offset;
    p.block_size.divmod(static_cast<u32>(slot), block, offset);
    return {true, static_cast<const Source*>(p.key) + token * p.key_row_stride + head * p.key_head_stride,
            static_cast<const Source*>(p.value) + token * p.value_row_stride + head * p.value_head_stride,
            static_cast<Cache*>(p.k) + block * p.k_block_stride + offset * p.k_slot_stride + head * p.k_head_stride,
            static_cast<Cache*>(p.v) + block * p.v_block_stride + offset * p.v_slot_stride + head * p.v_head_stride};
  }

  // Writes rows of all heads in sequence; 16 lanes copy neighbouring parts of a row, and have several rows each.
  template <bool whole>
  FP_DEVICE void write_rows() const {
    constexpr int count = whole ? 4 : 1;
    const u32 num_heads = p.num_kv_heads, num_rows = p.num_tokens * num_heads;
    for (u32 first = blockIdx.x * groups * count; first < num_rows; first += gridDim.x * groups * count) {
      Row rows[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const u32 row = first + i * groups + threadIdx.x / lanes;
        const i64 slot = row < num_rows ? slot_of(row / num_heads) : -1;
        rows[i] = row_of(row / num_heads, row % num_heads, slot);
        rows[i].exists = slot >= 0;
      }
      for (i32 column = threadIdx.x % lanes * part; column < max_of(p.key_dim, p.value_dim); column += lanes * part) {
        From keys[count], values[count];
#pragma unroll
        for (int i = 0; i < count; ++i) {
          if (!rows[i].exists) continue;
          load<whole>(keys[i], rows[i].key + column, p.key_dim - column);
          load<whole>(values[i], rows[i].value + column, p.value_dim - column);
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
          if (!rows[i].exists) continue;
          store<whole>(rows[i].k + column, converted(keys[i], k_scale), p.key_dim - column);
          store<whole>(rows[i].v + column, converted(values[i], v_scale), p.value_dim - column);
        }
      }
    }
  }

  // Writes 16 tokens of one head to blocks. Neighbouring lanes have neighbouring tokens, whose slots mostly are
  // neighbours. If they are not, a warp writes neighbouring columns of V, four of which share a line of the L2.
  template <bool whole>
  FP_DEVICE void write_tile(i32 first, i32 head) const {
    constexpr int count = 2, stride = groups * part;
    const int lane = threadIdx.x % lanes;
    const i32 token = first + lane;
    const i64 slot = token < p.num_tokens ? slot_of(token) : -1;
    const i64 before = __shfl_up_sync(0xffffffff, slot, 1, lanes);  // called by all lanes, also those without a token
    const bool follows = slot >= 0 && before + 1 == slot && lane > 0;
    const bool in_order =
        __popc(__ballot_sync(0xffffffff, follows)) >= lanes;  // both halves of the warp have the same tokens
    Row row = row_of(token, head, slot);
    row.exists = slot >= 0;
    const i32 block_size = p.block_size.divisor;
    for (i32 begin = threadIdx.x / lanes * part; row.exists && begin < p.key_dim; begin += count * stride) {
      From keys[count], values[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const i32 column = begin + i * stride;
        load<whole>(keys[i], row.key + column, p.key_dim - column);
        if (in_order) load<whole>(values[i], row.value + column, p.value_dim - column);
      }
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const i32 column = begin + i * stride, left = p.key_dim - column;
        store<whole>(row.k + column / piece * block_size * piece + column % piece, converted(keys[i], k_scale), left);
        if (!in_order) continue;
        const To new_values = converted(values[i], v_scale);
#pragma unroll
        for (int e = 0; e < part; ++e)
          if (e < left) row.v[(column + e) * block_size] = new_values.elements[e];
      }
    }
    if (!in_order) scatter_values(row);
  }

  // `row` is that of this lane's token; lanes 16 and up have the same tokens as the lower ones.
  FP_DEVICE void scatter_values(const Row& row) const {
    constexpr int warps = threads / 32, tokens = lanes / warps, count = 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
      const int token = i * warps + warp;
      const bool exists = __shfl_sync(0xffffffff, row.exists, token);
      const Source* from = reinterpret_cast<const Source*>(__shfl_sync(0xffffffff, u64(row.value), token));
      Cache* to = reinterpret_cast<Cache*>(__shfl_sync(0xffffffff, u64(row.v), token));
      for (i32 begin = lane; exists && begin < p.value_dim; begin += count * 32) {
        Source given[count];
#pragma unroll
        for (int j = 0; j < count; ++j) given[j] = from[min_of(begin + j * 32, p.value_dim - 1)];
#pragma unroll
        for (int j = 0; j < count; ++j) {
          const i32 column = begin + j * 32;
          if (column < p.value_dim) to[column * static_cast<i32>(p.block_size.divisor)] = converted(given[j], v_scale);
        }
      }
    }
  }

  // Loads or stores a part of a row of which `count` elements exist.
  template <bool whole>
  FP_DEVICE static void load(From& to, const Source* from, i32 count) {
    if (count <= 0) return;
    if constexpr (whole) {
      to = *reinterpret_cast<const From*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < part; ++i) to.elements[i] = from[min_of(i, count - 1)];
    }
  }

  template <bool whole>
  FP_DEVICE static void store(Cache* to, const To& part_of_row, i32 count) {
    if constexpr (whole) {
      if (count > 0) *reinterpret_cast<To*>(to) = part_of_row;
    } else {
#pragma unroll
      for (int i = 0; i < part; ++i)
        if (i < count) to[i] = part_of_row.elements[i];
    }
  }

  FP_DEVICE static Cache converted(Source element, float scale) {
    if constexpr (is_same<Source, Cache>) {
      return element;
    } else {
      return ptx::narrow<Cache>(__fdiv_rn(ptx::to_float(element), scale));
    }
  }

  FP_DEVICE static To converted(const From& from, float scale) {
    To to;
#pragma unroll
    for (int i = 0; i < part; ++i) to.elements[i] = converted(from.elements[i], scale);
    return to;
  }
};

}  // namespace flashpage
