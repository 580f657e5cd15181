// Writes a finished row to the output, or to the partial buffers if its unit is cut.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

FP_DEVICE float value_scale_of(const AttentionParams& params, const WorkItem& item, i32 kv_head) {
  if (!params.v_scale) return params.value_scale;
  return params.value_scale *
         params.v_scale[params.v_scale_stride * kv_head + params.v_scale_request_stride * item.request];
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
  } else {
    *reinterpret_cast<u32*>(static_cast<Out*>(params.out) + offset) = ptx::pack2<Out>(first, second);
  }
}

}  // namespace flashpage
