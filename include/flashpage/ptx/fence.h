// Order between ordinary accesses and the copy engine's, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// This thread's writes to shared memory come before bulk copies that are issued once it has signalled.
FP_DEVICE void fence_before_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What this thread wrote, or has seen written, by ordinary accesses or cp.async, products (wgmma) see too.
FP_DEVICE void fence_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashpage::ptx
