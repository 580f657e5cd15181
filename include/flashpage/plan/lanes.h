// Who walks together. A lane is a group of CTAs that take the same token ranges, each for its own KV heads; a lane's
// share is what it can take of the cost axis, so that all CTAs end up with the same load.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

struct Lane {
  i32 first_cta;
  i32 members;   // CTAs
  i32 heads;     // KV heads a member takes one after another, each like the first (runs: 1, the axis has them)
  double share;  // 1 / heads
};

// How often the cost axis has each request. Its other KV heads are walked alike by the other members of a lane.
inline i32 copies_on_axis(const Schedule& schedule, i32 num_kv_heads) {
  return schedule.walk == Walk::teams ? 1 : num_kv_heads / std::gcd(schedule.num_ctas, num_kv_heads);
}

// Runs: a member takes the axis' copies of a request, as few as the number of CTAs allows: what is planned for one
// member is then good for many. Teams: as many members as KV heads; CTAs that are left over form smaller teams of a
// divisor of the heads. The smaller teams come first on the axis (though last in CTA numbers), so that full teams,
// whose steps are finer, even out what they leave.
inline void make_lanes(const Schedule& schedule, i32 num_kv_heads, std::vector<Lane>& lanes) {
  lanes.clear();
  if (schedule.walk == Walk::runs) {
    const i32 members = num_kv_heads / copies_on_axis(schedule, num_kv_heads);
    for (i32 cta = 0; cta < schedule.num_ctas; cta += members) lanes.push_back({cta, members, 1, 1.0});
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
