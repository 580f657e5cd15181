// Many rows of e4m3 queries over e4m3 keys and values: the loop of attention_sm80 with fp8 factors in both products.
// Tensor cores of sm_89 and sm_12x multiply them; for sm_90 and sm_10x ptxas widens the factors to fp16.
#pragma once
#include "flashpage/kernels/attention_sm80/kernel.h"

namespace flashpage {

template <class Traits>
struct PrefillSm89 : AttentionSm80<Traits> {
  static_assert(Shape<Traits>::fp8_products && Traits::warps_kv == 1 && Traits::tile_kv % 32 == 0);
  static_assert(Traits::head_dim_qk % 32 == 0 && Shape<Traits>::value_columns % 32 == 0);
};

}  // namespace flashpage
