// Writes a finished row to the output, or to the partial buffers if its unit is cut.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

FP_DEVICE float value_scale_of(const AttentionParams& params, const WorkItem& item, i32 kv_head) {
  if (!params.v_scale) return params.value_scale;
  return params.value_scale *
         params.v_scale[params.v_scale_stride * kv_head + params.v_scale_request_stride * item.request];
}

// The factor of an output before it is divided by the row's sum. Partials have it too, so that merges only round.
template <class Traits>
FP_DEVICE float out_factor_of(const AttentionParams& params, const WorkItem& item, i32 kv_head) {
  const float value_scale = value_scale_of(params, item, kv_head);
  if constexpr (is_fp8<typename Traits::Out>) {
    if (params.out_scale) return value_scale * ptx::reciprocal_approx(*params.out_scale);
  }
  return value_scale;
}

// The element offset of a unit's row in out, or in the partial buffer if the unit is cut.
template <class Traits>
FP_DEVICE i64 out_offset(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 row) {
  if (item.partial_row >= 0) return static_cast<i64>(item.partial_row + row) * Traits::head_dim_vo;
  PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + min_of(row, unit.num_rows - 1));
  return (item.q_begin + at.row) * params.out_row_stride + at.head * params.out_head_stride;
}

// The address of a row's LSE; null if it is not wanted.
FP_DEVICE float* lse_target(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 row) {
  if (item.partial_row >= 0) return params.partial_lse + item.partial_row + row;
  if (!params.lse) return nullptr;
  PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + row);
  return params.lse + static_cast<i64>(item.q_begin + at.row) * params.num_q_heads + at.head;
}

// Stores two neighbouring columns of a row at `offset`; `partial`: as fp32 to the partial buffer.
template <class Traits>
FP_DEVICE void store_pair(const AttentionParams& params, bool partial, i64 offset, float first, float second) {
  using Out = typename Traits::Out;
  if (partial) {
    *reinterpret_cast<float2*>(params.partial_out + offset) = make_float2(first, second);
  } else if constexpr (is_same<Out, float>) {
    *reinterpret_cast<float2*>(static_cast<float*>(params.out) + offset) = make_float2(first, second);
  } else if constexpr (is_fp8<Out>) {
    *reinterpret_cast<u16*>(static_cast<Out*>(params.out) + offset) = ptx::narrow2<Out>(first, second);
  } else {
    *reinterpret_cast<u32*>(static_cast<Out*>(params.out) + offset) = ptx::pack2<Out>(first, second);
  }
}

// Stores `count` tiles of eight columns, of which a lane has pairs as products give them, times a factor, as fp32:
// neighbouring lanes exchange a pair of two tiles, so that each has four columns in sequence. All lanes of the warp
// call it.
template <int first_tile, int count, int tiles>
FP_DEVICE void store_fp32_tiles(const float (&values)[tiles][4], int half, int lane, float factor, float* row,
                                bool exists) {
  static_assert(count % 2 == 0);
  const bool is_odd = lane % 2 != 0;
  float* const mine = row + (is_odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
  for (int n = first_tile; n < first_tile + count; n += 2) {
    float kept[2], given[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float here = values[n][half * 2 + i] * factor, there = values[n + 1][half * 2 + i] * factor;
      kept[i] = is_odd ? there : here;
      given[i] = __shfl_xor_sync(0xffffffff, is_odd ? here : there, 1);
    }
    if (exists)
      *reinterpret_cast<float4*>(mine + n * 8) = is_odd ? make_float4(given[0], given[1], kept[0], kept[1])
                                                        : make_float4(kept[0], kept[1], given[0], given[1]);
  }
}

// Whether a unit's rows are written in fp32.
template <class Traits>
FP_DEVICE bool writes_fp32(const WorkItem& item) {
  return is_same<typename Traits::Out, float> || item.partial_row >= 0;
}
// Where such rows are: in the partial buffer if the unit is cut, and else in out.
template <class Traits>
FP_DEVICE float* fp32_rows(const AttentionParams& params, const WorkItem& item) {
  if constexpr (is_same<typename Traits::Out, float>)
    return item.partial_row >= 0 ? params.partial_out : static_cast<float*>(params.out);
  return params.partial_out;
}

// The lower lane of two gives its second word, and takes the other lane's first one. Words stay in the lanes' order.
FP_DEVICE void swap_words(int distance, bool is_upper, int lane, u32& first, u32& second) {
  const u32 given = is_upper ? first : second;
  const u32 taken = __shfl_sync(0xffffffff, given, lane ^ distance);
  (is_upper ? first : second) = taken;
}

// The four lanes of a row have a pair of columns in each of four tiles of eight columns. Afterwards a lane has the
// eight columns of tile lane % 4, in sequence.
FP_DEVICE void exchange_tiles(u32 (&pair)[4], int lane) {
  const bool is_odd = lane % 2 != 0, is_second = lane % 4 / 2 != 0;
  // Then pair[0] and pair[1] are of the lane's tile of the first two, pair[2] and pair[3] of the last two.
#pragma unroll
  for (int i = 0; i < 4; i += 2) swap_words(1, is_odd, lane, pair[i], pair[i + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) swap_words(2, is_second, lane, pair[i], pair[i + 2]);
}

// Stores `count` tiles of eight 16-bit columns, of which a lane has pairs as products give them, times a factor: 16
// bytes at a time. All lanes of the warp call it.
template <class Out, int first_tile, int count, int tiles>
FP_DEVICE void store_tiles(const float (&values)[tiles][4], int half, int lane, float factor, Out* row, bool exists) {
  static_assert(count % 4 == 0 && sizeof(Out) == 2);
  Out* const mine = row + lane % 4 * 8;
#pragma unroll
  for (int n = first_tile; n < first_tile + count; n += 4) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pair[i] = ptx::pack2<Out>(values[n + i][half * 2] * factor, values[n + i][half * 2 + 1] * factor);
    exchange_tiles(pair, lane);
    if (exists) *reinterpret_cast<uint4*>(mine + n * 8) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

// As store_tiles, for columns of 8 bits: 8 bytes at a time, and 32 neighbouring bytes by the four lanes of a row.
template <int first_tile, int count, class Out, int tiles>
FP_DEVICE void store_fp8_tiles(const float (&values)[tiles][4], int half, int lane, float factor, Out* row,
                               bool exists) {
  static_assert(count % 8 == 0 && is_fp8<Out>);
  Out* const mine = row + lane % 4 * 8;
#pragma unroll
  for (int n = first_tile; n < first_tile + count; n += 8) {
    u32 pairs[4];  // of a tile, and of the fourth tile after it
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *low = values[n + i] + half * 2, *high = values[n + i + 4] + half * 2;
      pairs[i] = ptx::narrow4<Out>(low[0] * factor, low[1] * factor, high[0] * factor, high[1] * factor);
    }
    exchange_tiles(pairs, lane);
    if (!exists) continue;
    *reinterpret_cast<uint2*>(mine + n * 8) =
        make_uint2(ptx::byte_permute(pairs[0], pairs[1], 0x5410), ptx::byte_permute(pairs[2], pairs[3], 0x5410));
    *reinterpret_cast<uint2*>(mine + n * 8 + 32) =
        make_uint2(ptx::byte_permute(pairs[0], pairs[1], 0x7632), ptx::byte_permute(pairs[2], pairs[3], 0x7632));
  }
}

}  // namespace flashpage
