// st.async: stores into the shared memory of a cluster's CTA (this one too) that an mbarrier beside them counts as
// bytes, so that who waits there sees them, sm_90. Addresses are peer_address' (ptx/cluster.h).
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
