// Who walks together. A lane is a group of CTAs that take the same token ranges, each for its own KV heads; a lane's
// share is what it can take of the cost axis, so that all CTAs end up with the same load.
#pragma once
#include "flashpage/plan/lengths.h"
#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

struct Lane {
  i32 first_cta;
  i32 members;            // CTAs
  i32 heads;              // KV heads a member takes one after another, each like the first (runs: 1, the axis has them)
  double share;           // 1 / heads
  double per_share_left;  // 1 / (shares of this lane and of those behind it)
};

// The cost axis. A wave is a stretch of it that all lanes share, before any goes on to the next: what they read at a
// time is then little enough for the cache to keep, although every row tile reads its whole context.
struct Axis {
  i32 copies;  // of each request: its other KV heads are walked alike by the other members of a lane
  i32 waves;
};

// Each wave takes time to plan, and short contexts are read again only a few times.
inline constexpr i32 max_waves = 8, tokens_a_wave = 256;

// One wave, and as few copies as the number of CTAs allows.
FP_HOST_DEVICE Axis one_wave(const Schedule& schedule, i32 num_kv_heads) {
  if (schedule.walk == Walk::teams) return {1, 1};
  return {num_kv_heads / greatest_common_divisor(schedule.num_ctas, num_kv_heads), 1};
}

FP_HOST_DEVICE bool may_have_waves(const Schedule& schedule) {
  return schedule.walk == Walk::runs && schedule.wave_tokens > 0 && !schedule.fixed();
}

// Requests with few rows beside others, and much of them. In waves all CTAs would first compute, then all wait for
// memory; on one stretch of the axis some do the one while others do the other.
FP_HOST_DEVICE bool is_mixed(const KvTokens& kv) { return kv.few_rows < kv.by_tile && 8 * kv.few_rows >= kv.by_tile; }

FP_HOST_DEVICE Axis make_axis(const Schedule& schedule, i32 num_kv_heads, const KvTokens& kv) {
  const Axis whole = one_wave(schedule, num_kv_heads);
  if (!may_have_waves(schedule)) return whole;
  const i64 waves = is_mixed(kv) ? 1
                                 : min_of(ceil_div<i64>(kv.all * num_kv_heads, schedule.wave_tokens),
                                          ceil_div<i64>(kv.longest, tokens_a_wave));
  // Of a long request, a wave should be some heads, which its members would not walk together.
  const bool apart = kv.longest * num_kv_heads > schedule.wave_tokens;
  return {apart ? num_kv_heads : whole.copies, static_cast<i32>(max_of<i64>(1, min_of<i64>(waves, max_waves)))};
}

// Runs: a member takes the axis' copies of a request: what is planned for one member is good for all. Teams: as many
// members as KV heads; CTAs that are left over form smaller teams of a divisor of the heads. The smaller teams come
// first on the axis (though last in CTA numbers), so that full teams, whose steps are finer, even out what they leave.
struct Lanes {
  i32 count;      // at most one a CTA
  i32 num_small;  // lanes of smaller teams: the first ones
  i32 members;    // of a full lane
  i32 fewest_heads;
  double shares;  // of all lanes

  FP_HOST_DEVICE i32 num_full() const { return count - num_small; }

  // Counts them, and writes the smaller teams to `lanes`; full lanes are written one by one, by whom ever.
  FP_HOST_DEVICE static Lanes make(const Schedule& schedule, i32 num_kv_heads, const Axis& axis, Lane* lanes) {
    Lanes made{};
    made.members = num_kv_heads / axis.copies;
    const i32 num_full = schedule.num_ctas / made.members, full_ctas = num_full * made.members;
    made.num_small = 0;
    for (i32 cta = full_ctas; cta < schedule.num_ctas; ++made.num_small) {
      Lane& lane = lanes[made.num_small];
      lane.members = schedule.num_ctas - cta;  // fewer than the KV heads
      while (num_kv_heads % lane.members != 0) --lane.members;
      lane.first_cta = cta;
      lane.heads = num_kv_heads / lane.members;
      lane.share = 1.0 / lane.heads;
      cta += lane.members;
    }
    reverse(lanes, made.num_small);
    made.count = made.num_small + num_full;
    made.shares = num_full;
    made.fewest_heads = num_full > 0 ? 1 : 0x7fffffff;
    for (i32 l = made.num_small - 1; l >= 0; --l) {
      made.shares += lanes[l].share;
      lanes[l].per_share_left = 1.0 / made.shares;
      made.fewest_heads = min_of(made.fewest_heads, lanes[l].heads);
    }
    return made;
  }

  // The i-th of the full lanes.
  FP_HOST_DEVICE void write_full(i32 i, Lane* lanes) const {
    lanes[num_small + i] = {i * members, members, 1, 1.0, 1.0 / (num_full() - i)};
  }

 private:
  FP_HOST_DEVICE static void reverse(Lane* lanes, i32 count) {
    for (i32 i = 0; i < count / 2; ++i) {
      const Lane other = lanes[i];
      lanes[i] = lanes[count - 1 - i];
      lanes[count - 1 - i] = other;
    }
  }
};

// Of a lane in a wave, beside whole requests: it begins and ends inside a request, and inside a unit of it.
inline constexpr i64 items_of_lane = 4;

// Of a plan that is not a fixed split. Where units are dealt (whole_units.h), a lane may have `items_of_lane` of them
// behind its runs, which begin and end at units and thus add one a wave: with one wave, that is one more.
inline i64 most_items(i64 batch, const Axis& axis, const Lanes& lanes, const Lane* small) {
  i64 heads = lanes.num_full();
  for (i32 l = 0; l < lanes.num_small; ++l) heads += small[l].heads;
  return batch + (items_of_lane * axis.waves + 1) * heads;
}

}  // namespace flashpage::plan
