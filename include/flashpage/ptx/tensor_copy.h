// cp.async.bulk.tensor: a box of a tensor map into shared memory or out of it, by the copy engine, sm_90.
#pragma once
#include "flashpage/common/tensor_map.h"

namespace flashpage::ptx {

FP_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box that starts at these coordinates, zeros where it lies outside the tensor; its bytes count on `barrier`. One
// thread; `shared` starts on 128 bytes.
FP_DEVICE void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page)
      : "memory");
}
// The same with a policy of cache_policy.h.
FP_DEVICE void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page,
                           u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page), "l"(policy)
      : "memory");
}

// The same into every CTA of a cluster of two, at the same place and on the barrier at the same place.
FP_DEVICE void tensor_copy_to_pair(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head,
                                   i32 page) {
  constexpr u16 both = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(page), "h"(both)
      : "memory");
}

// The box that starts at these coordinates, from shared memory: what of it lies outside the tensor is left out. By one
// thread, behind fence_before_bulk_copies of those who wrote it.
FP_DEVICE void tensor_store(const TensorMap& map, u32 shared, i32 column, i32 token, i32 head, i32 page) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(column), "r"(token), "r"(head), "r"(page)
               : "memory");
}
// This thread's stores so far: until shared memory is free again, or until all is written.
FP_DEVICE void await_stores_have_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
FP_DEVICE void await_stores() { asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flashpage::ptx
