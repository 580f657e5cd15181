// A finished row to where it belongs: the output, or the partial buffers of a unit whose KV range was cut.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/shape.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// The attention sink in base 2, or -inf: only the first piece of a unit takes it.
FP_DEVICE float sink_of_row(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 packed_row) {
  if (!params.sinks || item.piece != 0) return __int_as_float(0xff800000);
  return params.sinks[unpack_row(params, unit.kv_head, packed_row).head] * log2_e;
}

FP_DEVICE float value_scale_of(const AttentionParams& params, i32 kv_head) {
  return params.v_scale ? params.value_scale * params.v_scale[params.v_scale_stride * kv_head] : params.value_scale;
}

// Where one packed row of a unit is written.
template <class Traits>
struct RowTarget {
  using Out = typename Traits::Out;
  Out* out;
  float* partial_out;  // null: written to out
  float* lse;          // null: not wanted

  // `row` counts from the unit's first row.
  FP_DEVICE RowTarget(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 row) {
    if (item.partial_row >= 0) {
      i64 partial = static_cast<i64>(item.partial_row) + row;
      out = nullptr;
      partial_out = params.partial_out + partial * Traits::head_dim_vo;
      lse = params.partial_lse + partial;
    } else {
      PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + row);
      i64 q_row = item.q_begin + at.row;
      out = static_cast<Out*>(params.out) + q_row * params.out_row_stride + at.head * params.out_head_stride;
      partial_out = nullptr;
      lse = params.lse ? params.lse + q_row * params.num_q_heads + at.head : nullptr;
    }
  }

  FP_DEVICE void store(int column, float first, float second) const {
    if (partial_out) {
      *reinterpret_cast<float2*>(partial_out + column) = make_float2(first, second);
    } else {
      *reinterpret_cast<u32*>(out + column) = ptx::pack2<Out>(first, second);
    }
  }
};

}  // namespace flashpage
