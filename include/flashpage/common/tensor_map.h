// What the copy engine reads boxes by.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// What the driver's cuTensorMapEncodeTiled writes (CUtensorMap); passed by value, where the copy engine reads it.
struct alignas(64) TensorMap {
  u64 words[16];
};
// Boxes of a paged or ragged cache: [columns, tokens, heads, pages].
struct KvMaps {
  TensorMap k, v;
};

}  // namespace flashpage
