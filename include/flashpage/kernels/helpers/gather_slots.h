// gather_slots: turns a table of each request's slots (one for each token) into one list of page numbers, request after
// request. CTAs [r * ctas_per_request, (r + 1) * ctas_per_request) share request r.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

struct GatherSlots {
  static constexpr int threads = 256;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;

  FP_DEVICE static void run(const GatherSlotsParams& p) {
    ptx::grid_dependency_wait();
    u32 request, part;
    p.ctas_per_request.divmod(blockIdx.x, request, part);
    i64 first = p.starts == nullptr ? 0 : p.starts[request];
    const i32* slots = p.table + p.rows[request] * p.table_row_stride + first;
    i32 begin = p.indptr[request], count = p.indptr[request + 1] - begin;
    i32 step = static_cast<i32>(p.ctas_per_request.divisor) * threads;
    for (i32 i = static_cast<i32>(part) * threads + static_cast<i32>(threadIdx.x); i < count; i += step)
      p.indices[begin + i] = static_cast<i32>(p.page.div(slots[static_cast<i64>(i) * p.page.divisor]));
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
