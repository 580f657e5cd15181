// Who walks together. A lane is a group of CTAs that take the same token ranges, each for its own KV heads; a lane's
// share is what it can take of the cost axis, so that all CTAs end up with the same load.
#pragma once
#include <algorithm>
#include <vector>

#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

struct Lane {
  i32 first_cta;
  i32 members;   // CTAs
  i32 heads;     // KV heads a member takes one after another
  double share;  // 1 / heads
};

// Runs: every CTA is a lane of its own, and the axis has every KV head. Teams: as many members as KV heads; CTAs that
// are left over form smaller teams of a divisor of the heads. The smaller teams come first on the axis (though last in
// CTA numbers), so that full teams, whose steps are finer, even out what they leave.
inline void make_lanes(const Schedule& schedule, i32 num_kv_heads, std::vector<Lane>& lanes) {
  lanes.clear();
  if (schedule.walk == Walk::runs) {
    for (i32 cta = 0; cta < schedule.num_ctas; ++cta) lanes.push_back({cta, 1, 1, 1.0});
    return;
  }
  const i32 full = schedule.num_ctas / num_kv_heads * num_kv_heads;
  for (i32 cta = full; cta < schedule.num_ctas;) {
    i32 members = min_of(schedule.num_ctas - cta, num_kv_heads);
    while (num_kv_heads % members != 0) --members;
    const i32 heads = num_kv_heads / members;
    lanes.push_back({cta, members, heads, 1.0 / heads});
    cta += members;
  }
  std::reverse(lanes.begin(), lanes.end());
  for (i32 cta = 0; cta < full; cta += num_kv_heads) lanes.push_back({cta, num_kv_heads, 1, 1.0});
}

}  // namespace flashpage::plan
