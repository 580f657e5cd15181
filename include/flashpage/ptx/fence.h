// Order between ordinary accesses and those of the copy engine and of wgmma, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Orders this thread's writes to shared memory before bulk copies that are issued after it has signalled.
FP_DEVICE void fence_before_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes visible to products (wgmma) what this thread wrote, or has seen written, by ordinary accesses or cp.async.
FP_DEVICE void fence_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashpage::ptx
