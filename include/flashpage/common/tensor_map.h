// Tensor maps: the descriptors by which the copy engine (TMA) reads and writes boxes of a tensor.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// A CUtensorMap, as the driver's cuTensorMapEncodeTiled writes it. Kernels take it by value: the copy engine reads it
// from the parameter space.
struct alignas(64) TensorMap {
  u64 words[16];
};
// Dimensions of the boxes. Paged or ragged K and V: [columns, tokens, heads, pages]; queries and output: [columns,
// heads, rows, 1].
struct KvMaps {
  TensorMap k, v;  // unset where AttentionParams::box_tokens is 0
  TensorMap q;     // unset where AttentionParams::query_box_rows is 0
  TensorMap out;   // unset where AttentionParams::out_box_rows is 0
};

}  // namespace flashpage
