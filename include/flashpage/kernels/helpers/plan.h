// Plans on the card with one CTA, from the tables that include/flashpage/plan/tables.h describes.
#pragma once
#include "flashpage/plan/tables.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

struct WarpVote {
  i32 lane;

  template <class Holds>
  FP_DEVICE i32 count(Holds&& holds) const {
    return __popc(__ballot_sync(0xffffffff, holds(lane)));
  }
  FP_DEVICE bool leads() const { return lane == 0; }
  FP_DEVICE void meet() const { __syncwarp(); }
};

struct CtaThreads {
  using Vote = WarpVote;
  static constexpr i32 searching = plan::warp;  // threads

  template <class Body>
  FP_DEVICE void phase(Body&& body) const {
    body(static_cast<i32>(threadIdx.x));
    __syncthreads();
  }
  template <class Body>
  FP_DEVICE bool any(Body&& body) const {
    return __syncthreads_or(body(static_cast<i32>(threadIdx.x))) != 0;
  }
};

struct PlanOnDevice {
  static constexpr int threads = plan::num_threads, ctas_per_sm = 1, cluster_rows = 0;
  // Enough for a thousand requests, or five hundred with waves. Larger batches use global memory.
  static constexpr int shared_bytes = 96 << 10;

  FP_DEVICE static void run(const plan::TablePlan& given) {
    extern __shared__ __align__(16) char shared[];
    ptx::grid_dependency_wait();
    const i32 batch = given.tables.batch;
    const bool fits = plan::Workspace(nullptr, batch, given.schedule).bytes <= shared_bytes;
    const plan::Workspace work(fits ? shared : given.workspace, batch, given.schedule);
    CtaThreads threads;
    plan::TablePlanner<CtaThreads>(threads, given, work).run();
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
