// Combines attention states by their base-2 log-sum-exp: computes the weights of up to 32 states at a time, one in each
// lane.
#pragma once
#include "flashpage/tile/softmax/state_weight.h"

namespace flashpage {

// Processes any number of states in groups of 32; every lane of the warp has the same totals.
struct MergeWeights {
  float maximum = ptx::negative_infinity();
  float total = 0.f;
  float mine = 0.f;     // weight of this lane's state in the group, relative to the maximum so far
  float rescale = 0.f;  // factor of the sums of earlier groups

  // `lse`: of this lane's state; -inf if it has none.
  FP_DEVICE void add_group(float lse) {
    float top = lse;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    float next = fmaxf(maximum, top);
    rescale = state_weight(maximum, next);
    mine = state_weight(lse, next);
    float sum = mine;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    total = total * rescale + sum;
    maximum = next;
  }
  FP_DEVICE float weight(int state) const { return __shfl_sync(0xffffffff, mine, state); }
  FP_DEVICE float inverse() const { return total == 0.f ? 0.f : 1.f / total; }
  FP_DEVICE float lse() const { return total == 0.f ? ptx::negative_infinity() : maximum + log2f(total); }
};

}  // namespace flashpage
