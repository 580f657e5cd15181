// reshape_and_cache and reshape_and_cache_flash: new tokens to their slots of a cache, in fp8 where the cache is. A CTA
// has 16 tokens of one head. In blocks neighbouring lanes have neighbouring tokens, which mostly have neighbouring
// slots; in rows they have neighbouring parts of a row.
#pragma once
#include "flashpage/block_params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

enum class SlotLayout { blocks, rows };  // K in pieces of 16 bytes and V by column, or both by row

template <class Traits>
struct BlockWrite {
  using Source = typename Traits::Source;
  using Cache = typename Traits::Cache;
  static constexpr bool blocks = Traits::layout == SlotLayout::blocks;
  static constexpr int threads = 128, tokens = 16;
  static constexpr int piece = 16 / int(sizeof(Cache));   // elements
  static constexpr int part = piece < 8 ? piece : 8;      // elements that a thread takes at once
  static constexpr int parts_at_once = threads / tokens;  // blocks: by the threads of a token

  struct alignas(part * sizeof(Source) < 16 ? 8 : 16) From {
    Source elements[part];
  };
  struct alignas(part * sizeof(Cache) < 16 ? 8 : 16) To {
    Cache elements[part];
  };

  FP_DEVICE static void run(const BlockWriteParams& params) {
    ptx::grid_dependency_wait();
    const i32 tiles = ceil_div(params.num_tokens, tokens);
    for (i32 i = blockIdx.x; i < tiles * params.num_kv_heads; i += gridDim.x)
      write_tile(params, i / params.num_kv_heads * tokens, i % params.num_kv_heads);
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static void write_tile(const BlockWriteParams& p, i32 first, i32 head) {
    constexpr int lanes = 16;
    const int near = threadIdx.x % lanes, far = threadIdx.x / lanes;
    for (int step = 0; step < (blocks ? 1 : tokens); step += threads / lanes) {
      const i32 token = first + (blocks ? near : step + far);
      if (token >= p.num_tokens) return;
      const i64 slot =
          p.slots_are_int64 ? static_cast<const i64*>(p.slots)[token] : static_cast<const i32*>(p.slots)[token];
      if (slot < 0) continue;
      u32 block, offset;
      p.block_size.divmod(static_cast<u32>(slot), block, offset);
      const Source* key = static_cast<const Source*>(p.key) + token * p.key_row_stride + head * p.key_head_stride;
      const Source* value =
          static_cast<const Source*>(p.value) + token * p.value_row_stride + head * p.value_head_stride;
      Cache* k =
          static_cast<Cache*>(p.k) + block * p.k_block_stride + offset * p.k_slot_stride + head * p.k_head_stride;
      Cache* v =
          static_cast<Cache*>(p.v) + block * p.v_block_stride + offset * p.v_slot_stride + head * p.v_head_stride;
      const int begin = (blocks ? far : near) * part, stride = (blocks ? parts_at_once : lanes) * part;
      const i32 block_size = p.block_size.divisor;
      const float k_scale = scale_of(p.k_scale), v_scale = scale_of(p.v_scale);
      for (int column = begin; column < p.key_dim; column += stride) {
        const i32 at = blocks ? column / piece * block_size * piece + column % piece : column;
        store(k + at, 1, converted(key + column, p.key_dim - column, k_scale), p.key_dim - column);
      }
      for (int column = begin; column < p.value_dim; column += stride) {
        const i32 count = p.value_dim - column;
        store(v + column * (blocks ? block_size : 1), blocks ? block_size : 1,
              converted(value + column, count, v_scale), count);
      }
    }
  }

  FP_DEVICE static float scale_of(const float* scale) { return is_fp8<Cache> && scale ? *scale : 1.f; }

  // The first `count` of a part, or all of it.
  FP_DEVICE static To converted(const Source* from, i32 count, float scale) {
    From given;
    if (count >= part && reinterpret_cast<u64>(from) % alignof(From) == 0) {
      given = *reinterpret_cast<const From*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < part; ++i) given.elements[i] = from[min_of(i, count - 1)];
    }
    To to;
#pragma unroll
    for (int i = 0; i < part; ++i) {
      if constexpr (is_same<Source, Cache>) {
        to.elements[i] = given.elements[i];
      } else {
        to.elements[i] = ptx::narrow<Cache>(__fdiv_rn(ptx::to_float(given.elements[i]), scale));
      }
    }
    return to;
  }

  FP_DEVICE static void store(Cache* to, i32 stride, const To& part_of_row, i32 count) {
    if (stride == 1 && count >= part && reinterpret_cast<u64>(to) % alignof(To) == 0) {
      *reinterpret_cast<To*>(to) = part_of_row;
    } else {
#pragma unroll
      for (int i = 0; i < part; ++i)
        if (i < count) to[i * stride] = part_of_row.elements[i];
    }
  }
};

}  // namespace flashpage
