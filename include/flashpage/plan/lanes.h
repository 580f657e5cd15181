// The axis, the lanes that share it, and the segments that each lane takes.
#pragma once
#include "flashpage/plan/lengths.h"
#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

// A point on the axis: the start of a unit, or a token inside it.
struct Cut {
  i32 request = 0;
  i32 head = 0;    // among the heads on the axis
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

// A range of the axis that a lane takes as a whole.
struct Segment {
  Cut begin;
  Cut end;
};

struct Lane {
  i32 first_cta;
  i32 ctas;      // each takes the lane's segments for its own KV heads
  i32 cta_step;  // between CTAs of the lane; those of the group's other lanes lie between them
  i32 heads;     // KV heads that a CTA takes one after another over the same tokens; 1 if heads lie on the axis
  i32 first_segment;
  i32 num_segments;        // consecutive
  double weight;           // its share of the axis relative to a full lane: 1 / heads
  double per_weight_left;  // 1 / (sum of the weights of this lane and all later ones)
};

// How requests lie on the axis. The context that a wave reads should fit the L2, because every row tile reads its whole
// context.
struct Axis {
  i32 heads;  // KV heads of each request on the axis; a lane's other CTAs take the other heads in the same way
  i32 waves;
};

// Limits of the waves: each one takes time to plan, and short contexts are read again only a few times.
inline constexpr i32 max_waves = 8, tokens_a_wave = 256;

// One wave, and as few heads on the axis as the number of CTAs allows.
FP_HOST_DEVICE Axis one_wave(const Schedule& schedule, i32 num_kv_heads) {
  if (!schedule.heads_on_axis) return {1, 1};
  return {num_kv_heads / greatest_common_divisor(schedule.num_ctas, num_kv_heads), 1};
}

FP_HOST_DEVICE bool may_have_waves(const Schedule& schedule) {
  return schedule.heads_on_axis && schedule.wave_tokens > 0 && !schedule.fixed();
}

// Whether much of the batch is requests with few rows, next to requests with many. In waves all CTAs would first
// compute and then all wait for memory; on an axis of one wave some compute while others wait.
FP_HOST_DEVICE bool is_mixed(const KvTokens& kv) { return kv.few_rows < kv.by_tile && 8 * kv.few_rows >= kv.by_tile; }

FP_HOST_DEVICE Axis make_axis(const Schedule& schedule, i32 num_kv_heads, const KvTokens& kv) {
  const Axis whole = one_wave(schedule, num_kv_heads);
  if (!may_have_waves(schedule)) return whole;
  const i64 waves = is_mixed(kv) ? 1
                                 : min_of(ceil_div<i64>(kv.all * num_kv_heads, schedule.wave_tokens),
                                          ceil_div<i64>(kv.longest, tokens_a_wave));
  // A wave should take some heads of a long request, but the CTAs of a lane would take all of them at the same time.
  const bool apart = kv.longest * num_kv_heads > schedule.wave_tokens;
  return {apart ? num_kv_heads : whole.heads, static_cast<i32>(max_of<i64>(1, min_of<i64>(waves, max_waves)))};
}

// All lanes of an axis. A full lane has one CTA for each KV head that is not on the axis. The remaining CTAs form
// smaller lanes, whose number of CTAs divides the heads. Small lanes come first on the axis (though last in CTA
// numbers), so that full lanes, which have finer steps, even out what they leave.
struct Lanes {
  i32 count;      // at most one a CTA
  i32 num_small;  // these come first
  i32 ctas;       // in a full lane
  i32 waves;      // segments of each lane
  i32 fewest_heads;
  double weight;  // sum over all lanes

  FP_HOST_DEVICE i32 num_full() const { return count - num_small; }

  // Counts the lanes and writes the small ones to `lanes`. Full lanes are written one by one, by any thread.
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

  // Writes the i-th full lane.
  FP_HOST_DEVICE void write_full(i32 i, Lane* lanes) const {
    lanes[num_small + i] = {i * ctas, ctas, 1, 1, (num_small + i) * waves, waves, 1.0, 1.0 / (num_full() - i)};
  }

 private:
  // Writes lanes for the CTAs from `cta` on, which are fewer than a full lane has. Returns their number.
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

// The requests on an axis, and the lanes that share it.
struct Division {
  const Request* requests;  // [batch + 1]
  i32 batch;
  Axis axis;
  i64 units_on_axis;  // row tiles of all heads on the axis
  const Lane* lane;   // [lanes.count]
  Lanes lanes;
};

// The result of a strategy: which lane takes which segments.
struct Assignment {
  Division division;
  const Segment* segments;  // indexed by Lane::first_segment
  i32 group_ctas;           // CTAs of a group: segment p of a unit belongs to CTA p of its group; 0: no groups
  double most_ns;           // ns of the costliest CTA
  double total_ns;          // ns of all CTAs together
};

// Items of a lane in a wave in addition to whole requests: it begins and ends inside a request, and inside a unit.
inline constexpr i64 items_of_lane = 4;

// A bound for plans that are not a fixed split. If units are dealt (whole_units.h), a lane may have `items_of_lane`
// dealt units after its waves. Those waves begin and end at unit edges, so the units add one item in each wave; with a
// single wave that is one more.
inline i64 most_items(i64 batch, const Axis& axis, const Lanes& lanes, const Lane* small) {
  i64 heads = lanes.num_full();
  for (i32 l = 0; l < lanes.num_small; ++l) heads += small[l].heads;
  return batch + (items_of_lane * axis.waves + 1) * heads;
}

}  // namespace flashpage::plan
