// What the copy engine reads boxes by.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// What the driver's cuTensorMapEncodeTiled writes (CUtensorMap); passed by value, where the copy engine reads it.
struct alignas(64) TensorMap {
  u64 words[16];
};
// Boxes of a paged or ragged cache: [columns, tokens, heads, pages]; of queries and output: [columns, heads, rows, 1].
struct KvMaps {
  TensorMap k, v;  // unset where AttentionParams::box_tokens is 0
  TensorMap q;     // unset where AttentionParams::query_box_rows is 0
  TensorMap out;   // unset where AttentionParams::out_box_rows is 0
};

}  // namespace flashpage
