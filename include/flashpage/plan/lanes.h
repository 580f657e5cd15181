// Who walks together. A lane is a group of CTAs of one speed that take the same token ranges, each for its own KV
// heads; a lane's share is what it can take of the cost axis, so that all CTAs end at the same time.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

struct Lane {
  i32 first;         // member: Lanes::cta
  i32 members;       // CTAs
  i32 heads;         // KV heads a member takes one after another, each like the first (runs: 1, the axis has them)
  double share;      // speed / heads; the mean speed is 1
  double per_share;  // heads / speed: a member's time for what costs 1 on the axis
};

struct Lanes {
  std::vector<Lane> lanes;
  std::vector<i32> by_speed;  // numbers of the CTAs, class by class; empty where all are alike

  i32 cta(i32 member) const { return by_speed.empty() ? member : by_speed[member]; }
};

// How often the cost axis has each request. Its other KV heads are walked alike by the other members of a lane.
inline i32 copies_on_axis(const Schedule& schedule, i32 num_kv_heads) {
  return schedule.walk == Walk::teams ? 1 : num_kv_heads / std::gcd(schedule.num_ctas, num_kv_heads);
}

inline Lane make_lane(i32 first, i32 members, i32 heads, double speed) {
  return {first, members, heads, speed / heads, heads / speed};
}

// Lanes of as many members as `lane` has, from its first one up to `end`.
inline void add_lanes(Lane lane, i32 end, std::vector<Lane>& lanes) {
  for (; lane.first < end; lane.first += lane.members) lanes.push_back(lane);
}

// Members [begin, end) have one speed.
struct SpeedClass {
  i32 begin, end;
  double speed;

  i32 full_end(i32 num_kv_heads) const { return begin + (end - begin) / num_kv_heads * num_kv_heads; }
};

// The class that begins at `begin`: of the CTAs faster than those before it, the slowest.
inline SpeedClass next_class(const Schedule& schedule, i32 begin, double slower, std::vector<i32>& by_speed) {
  if (!schedule.by_sm()) return {0, schedule.num_ctas, 1.0};
  const float* speeds = schedule.cta_speeds;
  float speed = 0.0f;
  for (i32 cta = 0; cta < schedule.num_ctas; ++cta) {
    if (speeds[cta] > slower && (speed == 0.0f || speeds[cta] < speed)) speed = speeds[cta];
  }
  i32 end = begin;
  for (i32 cta = 0; cta < schedule.num_ctas; ++cta) {
    if (speeds[cta] == speed) by_speed[end++] = cta;
  }
  return {begin, end, speed};
}

// As many members as KV heads; CTAs that are left over form smaller teams of a divisor of the heads. The smaller teams
// come first on the axis (though last in their class), so that full teams, whose steps are finer, even out what they
// leave.
inline void make_teams(const Schedule& schedule, i32 num_kv_heads, Lanes& made) {
  static thread_local std::vector<SpeedClass> classes;
  std::vector<Lane>& lanes = made.lanes;
  classes.clear();
  made.by_speed.resize(schedule.by_sm() ? schedule.num_ctas : 0);
  double speed = 0.0, speeds = 0.0;
  for (i32 begin = 0; begin < schedule.num_ctas; begin = classes.back().end) {
    classes.push_back(next_class(schedule, begin, speed, made.by_speed));
    speed = classes.back().speed;
    speeds += speed * (classes.back().end - begin);
  }
  for (SpeedClass& alike : classes) alike.speed *= schedule.num_ctas / speeds;
  for (const SpeedClass& alike : classes) {
    for (i32 first = alike.full_end(num_kv_heads); first < alike.end; first += lanes.back().members) {
      i32 members = min_of(alike.end - first, num_kv_heads);
      while (num_kv_heads % members != 0) --members;
      lanes.push_back(make_lane(first, members, num_kv_heads / members, alike.speed));
    }
  }
  std::reverse(lanes.begin(), lanes.end());
  for (const SpeedClass& alike : classes) {
    add_lanes(make_lane(alike.begin, num_kv_heads, 1, alike.speed), alike.full_end(num_kv_heads), lanes);
  }
}

// Runs: a member takes the axis' copies of a request, as few as the number of CTAs allows: what is planned for one
// member is then good for many.
inline void make_lanes(const Schedule& schedule, i32 num_kv_heads, Lanes& made) {
  made.lanes.clear();
  if (schedule.walk == Walk::teams) return make_teams(schedule, num_kv_heads, made);
  made.by_speed.clear();
  const i32 members = num_kv_heads / copies_on_axis(schedule, num_kv_heads);
  add_lanes(make_lane(0, members, 1, 1.0), schedule.num_ctas, made.lanes);
}

}  // namespace flashpage::plan
