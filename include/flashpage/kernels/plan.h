// A plan made on the card, by one CTA: include/flashpage/plan/tables.h says what of.
#pragma once
#include "flashpage/plan/tables.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

// A warp looks for a request, 32 at a time; all its threads know what one of them would.
struct WarpSearcher {
  static constexpr i32 count = plan::warp;
  i32 lane;

  FP_DEVICE i32 request_at(const plan::Request* requests, i32 batch, i32 from, double cost) const {
    const i32 near = advance(requests, batch, from, 1, cost);
    if (near < from + count) return near;
    i32 low = near;  // the next ones in strides
    while (true) {
      const i32 next = advance(requests, batch, low, count, cost);
      if (next < low + count * count) return advance(requests, batch, next, 1, cost);
      low = next;
    }
  }
  FP_DEVICE bool writes() const { return lane == 0; }

 private:
  // The last of `from` and 32 others, `stride` apart, that begins at or before `cost`.
  FP_DEVICE i32 advance(const plan::Request* requests, i32 batch, i32 from, i32 stride, double cost) const {
    const i32 mine = from + (lane + 1) * stride;
    const bool begins = mine < batch && requests[mine].cost <= cost;
    return from + stride * __popc(__ballot_sync(0xffffffff, begins));
  }
};

struct CtaThreads {
  using Searcher = WarpSearcher;

  template <class Body>
  FP_DEVICE void phase(Body&& body) const {
    body(static_cast<i32>(threadIdx.x));
    __syncthreads();
  }
};

struct PlanOnDevice {
  static constexpr int threads = plan::num_threads;
  static constexpr int shared_bytes = 96 << 10;  // over a thousand requests; larger batches use global memory

  FP_DEVICE static void run(const plan::TablePlan& given) {
    extern __shared__ __align__(16) char shared[];
    ptx::grid_dependency_wait();
    const i32 batch = given.tables.batch, num_ctas = given.schedule.num_ctas;
    const bool fits = plan::Workspace(nullptr, batch, num_ctas).bytes <= shared_bytes;
    const plan::Workspace work(fits ? shared : given.workspace, batch, num_ctas);
    CtaThreads threads;
    plan::TablePlanner<CtaThreads>(threads, given, work).run();
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
