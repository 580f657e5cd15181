// RoPE of new queries and keys in place, and the write of keys and values to their slots of a cache of rows, converted
// to fp8 if the cache is fp8. The cache gets the keys as they are after rounding, as after two launches.
#pragma once
#include "flashpage/params/block_params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

template <class Traits>
struct RotateWrite {
  using Source = typename Traits::StoredQuery;
  using Cache = typename Traits::StoredCache;
  static constexpr int threads = 128, shared_bytes = 0, ctas_per_sm = 4, cluster_rows = 0;
  static constexpr int lanes = 16, groups = threads / lanes;  // 16 lanes have one head's row of a token
  static constexpr int part = 16 / int(sizeof(Source));       // elements that a lane loads at once

  struct alignas(16) From {
    Source elements[part];
  };
  struct alignas(part * sizeof(Cache)) To {
    Cache elements[part];
  };
  struct alignas(16) Angles {
    float elements[4];
  };

  FP_DEVICE static void run(const RotateWriteParams& params) {
    ptx::grid_dependency_wait();
    const bool whole = has_whole_parts(params);
    const u32 num_heads = params.num_q_heads + 2 * params.write.num_kv_heads, num_rows = params.num_rows * num_heads;
    for (u32 row = blockIdx.x * groups + threadIdx.x / lanes; row < num_rows; row += gridDim.x * groups) {
      if (whole)
        RotateWrite(params, row / num_heads, row % num_heads).template move<true>();
      else
        RotateWrite(params, row / num_heads, row % num_heads).template move<false>();
    }
    ptx::grid_dependency_launch();
  }

 private:
  const RotateWriteParams& p;
  const i32 lane = threadIdx.x % lanes;
  bool is_value = false;
  Source* row;          // rotated in place, except values
  Cache* to = nullptr;  // null: the row is in no cache
  float scale = 1.f;
  i64 angles;  // of the token's position: the place of its first cosine

  // Heads are those of queries, then those of keys, then those of values.
  FP_DEVICE RotateWrite(const RotateWriteParams& params, i32 token, i32 head) : p(params) {
    const BlockWriteParams& w = p.write;
    angles = p.positions[token] * p.cos_sin_stride;
    if (head < p.num_q_heads) {
      row = static_cast<Source*>(p.query) + token * p.query_row_stride + head * p.query_head_stride;
      return;
    }
    head -= p.num_q_heads;
    is_value = head >= w.num_kv_heads;
    if (is_value) head -= w.num_kv_heads;
    const i64 place = is_value ? token * w.value_row_stride + head * w.value_head_stride
                               : token * w.key_row_stride + head * w.key_head_stride;
    row = const_cast<Source*>(static_cast<const Source*>(is_value ? w.value : w.key)) + place;
    const i64 slot = token < w.num_tokens ? slot_of(token) : -1;
    if (slot < 0) return;
    u32 block, offset;
    w.block_size.divmod(static_cast<u32>(slot), block, offset);
    to = is_value
             ? static_cast<Cache*>(w.v) + block * w.v_block_stride + offset * w.v_slot_stride + head * w.v_head_stride
             : static_cast<Cache*>(w.k) + block * w.k_block_stride + offset * w.k_slot_stride + head * w.k_head_stride;
    const float* given = is_value ? w.v_scale : w.k_scale;
    if (is_fp8<Cache> && given) scale = *given;
  }

  FP_DEVICE i64 slot_of(i32 token) const {
    const void* slots = p.write.slots;
    return p.write.slots_are_int64 ? static_cast<const i64*>(slots)[token] : static_cast<const i32*>(slots)[token];
  }

  // Whether every part of a row, of its cosines and of its sines can be loaded and stored as one vector.
  FP_DEVICE static bool has_whole_parts(const RotateWriteParams& p) {
    const BlockWriteParams& w = p.write;
    const u64 from = u64(p.query) | u64(w.key) | u64(w.value) | u64(p.cos_sin), cache = u64(w.k) | u64(w.v);
    const i64 strides = p.query_row_stride | p.query_head_stride | w.key_row_stride | w.key_head_stride |
                        w.value_row_stride | w.value_head_stride | p.cos_sin_stride | w.k_block_stride |
                        w.k_slot_stride | w.k_head_stride | w.v_block_stride | w.v_slot_stride | w.v_head_stride;
    const i32 sizes = w.key_dim | w.value_dim | p.rotary_dim | p.rotary_dim / 2;
    return (strides | sizes) % part == 0 && from % 16 == 0 && cache % alignof(To) == 0;
  }

  template <bool whole>
  FP_DEVICE void move() const {
    constexpr i32 step = whole ? part : 1;
    const i32 rotated = is_value ? 0 : p.rotary_dim, half = rotated / 2;
    for (i32 i = lane * step; i < half; i += lanes * step) rotate<whole>(i, half);
    if (!to) return;
    const i32 size = is_value ? p.write.value_dim : p.write.key_dim;
    for (i32 i = rotated + lane * step; i < size; i += lanes * step) {
      if constexpr (whole)
        store(i, *reinterpret_cast<const From*>(row + i));
      else
        to[i] = converted(row[i]);
    }
  }

  // Rotates the pairs from i on: as many as a part has elements, or one.
  template <bool whole>
  FP_DEVICE void rotate(i32 i, i32 half) const {
    if constexpr (whole) {
      const i32 first = p.is_neox ? i : 2 * i, second = p.is_neox ? half + i : 2 * i + part;
      From a = *reinterpret_cast<const From*>(row + first), b = *reinterpret_cast<const From*>(row + second);
      float cosines[part], sines[part];
      load_angles(cosines, angles + i);
      load_angles(sines, angles + half + i);
      if (p.is_neox) {
#pragma unroll
        for (int e = 0; e < part; ++e) rotate(a.elements[e], b.elements[e], cosines[e], sines[e]);
      } else {
#pragma unroll
        for (int e = 0; e < part; e += 2) {
          rotate(a.elements[e], a.elements[e + 1], cosines[e / 2], sines[e / 2]);
          rotate(b.elements[e], b.elements[e + 1], cosines[(part + e) / 2], sines[(part + e) / 2]);
        }
      }
      *reinterpret_cast<From*>(row + first) = a;
      *reinterpret_cast<From*>(row + second) = b;
      if (!to) return;
      store(first, a);
      store(second, b);
    } else {
      const i32 first = p.is_neox ? i : 2 * i, second = p.is_neox ? half + i : 2 * i + 1;
      Source a = row[first], b = row[second];
      rotate(a, b, angle(angles + i), angle(angles + half + i));
      row[first] = a;
      row[second] = b;
      if (!to) return;
      to[first] = converted(a);
      to[second] = converted(b);
    }
  }

  FP_DEVICE static void rotate(Source& a, Source& b, float cosine, float sine) {
    const float x = ptx::to_float(a), y = ptx::to_float(b);
    a = ptx::from_float<Source>(x * cosine - y * sine);
    b = ptx::from_float<Source>(y * cosine + x * sine);
  }

  FP_DEVICE float angle(i64 place) const {
    return p.cos_sin_is_float ? static_cast<const float*>(p.cos_sin)[place]
                              : ptx::to_float(static_cast<const Source*>(p.cos_sin)[place]);
  }

  FP_DEVICE void load_angles(float (&to_floats)[part], i64 place) const {
    if (p.cos_sin_is_float) {
      const float* from = static_cast<const float*>(p.cos_sin) + place;
#pragma unroll
      for (int e = 0; e < part; e += 4) {
        const Angles four = *reinterpret_cast<const Angles*>(from + e);
#pragma unroll
        for (int j = 0; j < 4; ++j) to_floats[e + j] = four.elements[j];
      }
    } else {
      const From from = *reinterpret_cast<const From*>(static_cast<const Source*>(p.cos_sin) + place);
#pragma unroll
      for (int e = 0; e < part; ++e) to_floats[e] = ptx::to_float(from.elements[e]);
    }
  }

  FP_DEVICE void store(i32 column, const From& from) const {
    To found;
#pragma unroll
    for (int e = 0; e < part; ++e) found.elements[e] = converted(from.elements[e]);
    *reinterpret_cast<To*>(to + column) = found;
  }

  FP_DEVICE Cache converted(Source element) const {
    if constexpr (is_same<Source, Cache>) {
      return element;
    } else {
      return ptx::narrow<Cache>(__fdiv_rn(ptx::to_float(element), scale));
    }
  }
};

}  // namespace flashpage
