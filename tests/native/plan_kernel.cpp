// The kernel that plans, with its 256 threads as fibers: fp_tables_plan with a launch that runs it on the host, for
// tests/planner/test_table_plans.py.
#include "card.h"
#undef __shared__
#define __shared__  // dynamic shared memory: `shared` below
#define __align__(bytes) __attribute__((aligned(bytes)))

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline void __syncwarp() { card::meet(card::warps[threadIdx.x / 32].meeting); }

#include "../../csrc/errors.cpp"
#include "../../csrc/plan/planner.cpp"
#include "../../csrc/plan/table_planner.cpp"
#include "flashpage/kernels/helpers/plan.h"

namespace flashpage {
alignas(16) char shared[PlanOnDevice::shared_bytes];
}

int32_t fp_launch(const fp_kernel*, const void* params, int32_t grid, void*, int32_t) {
  std::memset(shared, 0xA5, sizeof(shared));
  card::launch(grid, PlanOnDevice::threads, [&] { PlanOnDevice::run(*static_cast<const plan::TablePlan*>(params)); });
  return FP_OK;
}
