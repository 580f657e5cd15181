// st.async: stores to the shared memory of a CTA of the cluster (this one included), sm_90. An mbarrier of that CTA
// counts their bytes, so that threads that wait at it see them. Addresses come from peer_address (ptx/cluster.h).
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void store_async(u32 address, const float4& value, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

FP_DEVICE void store_async(u32 address, const float2& value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(value.x), "f"(value.y), "r"(barrier)
               : "memory");
}

}  // namespace flashpage::ptx
