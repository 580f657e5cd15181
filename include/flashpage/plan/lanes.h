// The axis, the lanes that take it, and the segments of it that each of them takes.
#pragma once
#include "flashpage/plan/lengths.h"
#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

// A place on the axis: the start of a unit, or a token inside it.
struct Cut {
  i32 request = 0;
  i32 head = 0;    // of those on the axis
  i32 tile = 0;    // row tile
  i32 token = -1;  // first token after the cut; -1: the unit's start

  FP_HOST_DEVICE bool inside() const { return token >= 0; }
  FP_HOST_DEVICE bool same_unit(const Cut& other) const {
    return request == other.request && head == other.head && tile == other.tile;
  }
};

// The start of the unit after the one that `cut` is in.
FP_HOST_DEVICE Cut next_unit(const Cut& cut, i32 tiles, i32 heads) {
  if (cut.tile + 1 < tiles) return {cut.request, cut.head, cut.tile + 1, -1};
  if (cut.head + 1 < heads) return {cut.request, cut.head + 1, 0, -1};
  return {cut.request + 1, 0, 0, -1};
}

// What a lane takes in one go.
struct Segment {
  Cut begin;
  Cut end;
};

struct Lane {
  i32 first_cta;
  i32 ctas;      // each takes the segments for its own KV heads
  i32 cta_step;  // from one to the next: CTAs of other lanes of the group lie between them
  i32 heads;     // KV heads that a CTA takes one after another, each like the first; 1 where heads are on the axis
  i32 first_segment;
  i32 num_segments;        // they lie side by side
  double weight;           // of the axis, next to a full lane: 1 / heads
  double per_weight_left;  // 1 / (weights of this lane and of those behind it)
};

// A wave should be little enough for the cache to keep, although every row tile reads its whole context.
struct Axis {
  i32 heads;  // KV heads of each request that lie on it: a lane's other CTAs take the others in the same way
  i32 waves;
};

// Each wave takes time to plan, and short contexts are read again only a few times.
inline constexpr i32 max_waves = 8, tokens_a_wave = 256;

// One wave, and as few heads as the number of CTAs allows.
FP_HOST_DEVICE Axis one_wave(const Schedule& schedule, i32 num_kv_heads) {
  if (!schedule.heads_on_axis) return {1, 1};
  return {num_kv_heads / greatest_common_divisor(schedule.num_ctas, num_kv_heads), 1};
}

FP_HOST_DEVICE bool may_have_waves(const Schedule& schedule) {
  return schedule.heads_on_axis && schedule.wave_tokens > 0 && !schedule.fixed();
}

// Requests with few rows beside others, and much of them. In waves all CTAs would first compute, then all wait for
// memory; on an axis of one wave some do the one while others do the other.
FP_HOST_DEVICE bool is_mixed(const KvTokens& kv) { return kv.few_rows < kv.by_tile && 8 * kv.few_rows >= kv.by_tile; }

FP_HOST_DEVICE Axis make_axis(const Schedule& schedule, i32 num_kv_heads, const KvTokens& kv) {
  const Axis whole = one_wave(schedule, num_kv_heads);
  if (!may_have_waves(schedule)) return whole;
  const i64 waves = is_mixed(kv) ? 1
                                 : min_of(ceil_div<i64>(kv.all * num_kv_heads, schedule.wave_tokens),
                                          ceil_div<i64>(kv.longest, tokens_a_wave));
  // Of a long request, a wave should be some heads, which a lane's CTAs would not take at the same time.
  const bool apart = kv.longest * num_kv_heads > schedule.wave_tokens;
  return {apart ? num_kv_heads : whole.heads, static_cast<i32>(max_of<i64>(1, min_of<i64>(waves, max_waves)))};
}

// A full lane has a CTA for each KV head that is not on the axis; CTAs that are left over form smaller lanes of a
// divisor of the heads. The smaller lanes come first on the axis (though last in CTA numbers), so that full lanes,
// whose steps are finer, even out what they leave.
struct Lanes {
  i32 count;      // at most one a CTA
  i32 num_small;  // the first ones
  i32 ctas;       // of a full lane
  i32 waves;      // segments of a lane
  i32 fewest_heads;
  double weight;  // of all lanes

  FP_HOST_DEVICE i32 num_full() const { return count - num_small; }

  // Counts them, and writes the smaller ones to `lanes`; full lanes are written one by one, by any thread.
  FP_HOST_DEVICE static Lanes make(const Schedule& schedule, i32 num_kv_heads, const Axis& axis, Lane* lanes) {
    Lanes made{};
    made.waves = axis.waves;
    made.ctas = num_kv_heads / axis.heads;
    const i32 num_full = schedule.num_ctas / made.ctas;
    made.num_small = write_small(num_full * made.ctas, schedule.num_ctas, num_kv_heads, axis.waves, lanes);
    made.count = made.num_small + num_full;
    made.weight = num_full;
    made.fewest_heads = num_full > 0 ? 1 : 0x7fffffff;
    for (i32 l = made.num_small - 1; l >= 0; --l) {
      made.weight += lanes[l].weight;
      lanes[l].per_weight_left = 1.0 / made.weight;
      made.fewest_heads = min_of(made.fewest_heads, lanes[l].heads);
    }
    return made;
  }

  // The i-th of the full lanes.
  FP_HOST_DEVICE void write_full(i32 i, Lane* lanes) const {
    lanes[num_small + i] = {i * ctas, ctas, 1, 1, (num_small + i) * waves, waves, 1.0, 1.0 / (num_full() - i)};
  }

 private:
  // Lanes of the CTAs from `cta` on, fewer than a full lane's; how many there are.
  FP_HOST_DEVICE static i32 write_small(i32 cta, i32 num_ctas, i32 num_kv_heads, i32 waves, Lane* lanes) {
    i32 count = 0;
    for (; cta < num_ctas; ++count) {
      i32 ctas = num_ctas - cta;
      while (num_kv_heads % ctas != 0) --ctas;
      const i32 heads = num_kv_heads / ctas;
      lanes[count] = {cta, ctas, 1, heads, 0, waves, 1.0 / heads, 0.0};
      cta += ctas;
    }
    for (i32 i = 0; i < count / 2; ++i) {
      const Lane other = lanes[i];
      lanes[i] = lanes[count - 1 - i];
      lanes[count - 1 - i] = other;
    }
    for (i32 i = 0; i < count; ++i) lanes[i].first_segment = i * waves;
    return count;
  }
};

// Requests that lie on an axis, and the lanes that take it.
struct Division {
  const Request* requests;  // [batch + 1]
  i32 batch;
  Axis axis;
  i64 units_on_axis;  // row tiles of all its heads
  const Lane* lane;   // [lanes.count]
  Lanes lanes;
};

// What a strategy returns: which lane takes which segments.
struct Assignment {
  Division division;
  const Segment* segments;  // Lane::first_segment says whose
  i32 group_ctas;           // CTAs of a group: segment p of a unit is that of its group's CTA p; 0: there are no groups
  double most_ns;           // of the costliest CTA
  double total_ns;          // of all CTAs
};

// Of a lane in a wave, beside whole requests: it begins and ends inside a request, and inside a unit of it.
inline constexpr i64 items_of_lane = 4;

// Of a plan that is not a fixed split. Where units are dealt (whole_units.h), a lane may have `items_of_lane` of them
// behind its waves, which begin and end at units and thus add one each: with one wave, that is one more.
inline i64 most_items(i64 batch, const Axis& axis, const Lanes& lanes, const Lane* small) {
  i64 heads = lanes.num_full();
  for (i32 l = 0; l < lanes.num_small; ++l) heads += small[l].heads;
  return batch + (items_of_lane * axis.waves + 1) * heads;
}

}  // namespace flashpage::plan
