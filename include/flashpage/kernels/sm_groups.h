// Which SM each CTA of a cluster gets: a cluster's CTAs lie in one GPC, and flashpage/sm_groups.py unites what it sees.
#pragma once
#include "flashpage/ptx/clock.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

struct SmGroups {
  static constexpr int threads = 32;
  static constexpr int shared_bytes = 200 * 1024;  // not used: one CTA fills an SM

  // sms: [CTAs]
  FP_DEVICE static void run(u32* sms) {
    ptx::grid_dependency_wait();
    if (threadIdx.x == 0) {
      sms[blockIdx.x] = ptx::sm_index();
      stay();
    }
    ptx::grid_dependency_launch();
  }

 private:
  // Long enough for all SMs to be taken, and not equally long, so that later clusters find other SMs of a GPC free.
  FP_DEVICE static void stay() {
    u64 begin = ptx::nanoseconds(), nanoseconds = 4000 + blockIdx.x * 5 % 8 * 2000;
    while (ptx::nanoseconds() - begin < nanoseconds) {
    }
  }
};

}  // namespace flashpage
