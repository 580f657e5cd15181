// cp.async.bulk.tensor: the copy engine copies a box of a tensor map to or from shared memory, sm_90.
#pragma once
#include "flashpage/common/tensor_map.h"

namespace flashpage::ptx {

FP_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box that starts at these coordinates; elements outside the tensor become zero. `barrier` counts its bytes.
// Called by one thread; `shared` is a multiple of 128 bytes.
FP_DEVICE void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page)
      : "memory");
}
// As above, with a policy of cache_policy.h.
FP_DEVICE void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page,
                           u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page), "l"(policy)
      : "memory");
}

// Brings the box to the L2.
FP_DEVICE void tensor_prefetch(const TensorMap& map, i32 column, i32 token, i32 head, i32 page) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
               "r"(token), "r"(head), "r"(page)
               : "memory");
}

// Copies the box to both CTAs of a cluster of two: to the same address, counted by the barrier with the same address.
FP_DEVICE void tensor_copy_to_pair(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head,
                                   i32 page) {
  constexpr u16 both = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page), "h"(both)
      : "memory");
}

// Copies the box that starts at these coordinates from shared memory; elements outside the tensor are left out. Called
// by one thread, after the writing threads have called fence_before_bulk_copies.
FP_DEVICE void tensor_store(const TensorMap& map, u32 shared, i32 column, i32 token, i32 head, i32 page) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(column), "r"(token), "r"(head), "r"(page)
               : "memory");
}
// Waits for this thread's stores: until they have read shared memory, or until they have written.
FP_DEVICE void wait_stores_have_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
FP_DEVICE void wait_stores() { asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flashpage::ptx
