// Whole units: no unit is cut, and the last ones on the axis are dealt to the CTAs, longest first, each to the CTA with
// the least load. Loads may be less even than with cuts, but there are no pieces and no launch that merges them.
//
// If there are few units, all of them are dealt. Otherwise lanes take whole units that are adjacent on the axis, in
// waves as usual, and only a tail of a few units a lane is dealt.
#pragma once
#include <optional>
#include <vector>

#include "flashpage/plan/one_searcher.h"
#include "flashpage/plan/partition.h"

namespace flashpage::plan {

// Units that are dealt, for each lane on average.
inline constexpr i64 most_whole_units = 4;
// So few units of a CTA read their contexts at the same time, which is why they need no waves (lanes.h).
inline constexpr i64 units_side_by_side = 2;
static_assert(most_whole_units <= items_of_lane, "most_items has room for these and a segment in each wave");

// Deals KV heads as the axis has them (lanes.h): a lane's CTAs take the same units, each for its own heads.
class WholeUnits {
 public:
  // Memory kept from plan to plan.
  struct Memory {
    struct RowTile {
      double ns;
      i32 request;
      i32 tile;
      i32 first_head;  // on the axis: the first one that is dealt; all later ones are too
      i32 cost_class;
    };
    struct Load {
      double ns;
      i32 lane;
    };
    std::vector<Cut> ends;         // [lanes], of the last wave, which ends where the tail begins
    std::vector<double> waves_ns;  // [lanes], loads of the waves
    std::vector<RowTile> tiles;
    std::vector<i32> order;    // indices of tiles, the longest first
    std::vector<Load> loads;   // [lanes], a heap: the load at (i - 1) / 2 is not above the one at i
    std::vector<i32> lane_of;  // [units], in the order in which they are dealt
    std::vector<i32> counts;   // [lanes], number of units that are dealt
    std::vector<Lane> lanes;
    std::vector<Segment> segments;
  };

  // `early`: segments of all waves but the last, [lanes][waves]. `start`: start of the last wave.
  WholeUnits(const CostModel& model, const CutRules& rules, const Division& division, const Segment* early,
             const Start& start, Memory& memory)
      : model_(model),
        requests_(division.requests),
        division_(division),
        partitioner_(model, rules, division, OneSearcher{}),
        early_(early),
        start_(start),
        heads_(division.axis.heads),
        lanes_(division.lanes.count),
        memory_(memory) {}

  // Whether whole units may be faster than a plan with cuts, which loads a CTA with `mean_ns`.
  static bool may_be(const Schedule& schedule, double mean_ns) {
    return schedule.heads_on_axis && schedule.ns_per_merge > 0.0 && schedule.balanced() &&
           schedule.ns_per_merge >= least_gain * mean_ns;
  }

  // The assignment, if the costliest CTA takes less than `ns`. To be called once.
  std::optional<Assignment> better_than(double ns) {
    if (!find_tail() || !read_tiles(most_of_unit(ns))) return {};
    sort();
    fill_waves();
    if (!deal(ns)) return {};
    write_segments();
    Division division = division_;
    division.lane = memory_.lanes.data();
    const double total_ns = (tail_at_ + tail_ns_) * division.lanes.ctas;
    return Assignment{division, memory_.segments.data(), 0, most_ns_, total_ns};
  }

 private:
  using RowTile = Memory::RowTile;
  using Load = Memory::Load;
  static constexpr double least_gain = 0.002;  // of a merge, as a fraction of a CTA's load
  static constexpr double uneven_part = 12.0;
  static constexpr i32 num_classes = 256;  // of costs; a finer distinction of lengths gains nothing
  static constexpr i64 least_units = 2;    // of a lane; fewer do not even out the loads of the waves

  bool all_are_dealt() const { return tail_at_ == 0.0; }

  // Finds where the tail begins: at a KV head of a request, so that the tail has all of its row tiles, also short ones
  // that even out the others.
  bool find_tail() {
    const i64 least = least_units * lanes_, most = most_whole_units * lanes_;
    if (division_.axis.waves == 1 && division_.units_on_axis <= most) return true;
    i64 units = 0;
    for (i32 i = division_.batch - 1; i >= 0 && units < most; --i) {
      const i64 tiles = requests_[i].tiles;
      if (tiles == 0) continue;
      const i32 heads = static_cast<i32>(min_of<i64>(heads_, ceil_div(least - units, tiles)));
      units += heads * tiles;
      if (units < least) continue;
      const double head_ns = (requests_[i + 1].cost - requests_[i].cost) / heads_;
      tail_ = {i, heads_ - heads, 0, -1};
      tail_at_ = requests_[i].cost + head_ns * tail_.head;
      if (tail_at_ < start_.at) {
        tail_ = start_.cut;
        tail_at_ = start_.at;
      }
      return units <= most;
    }
    return false;
  }

  // The longest unit that the tail may have if no CTA is to take more than `most`. After waves under causal, loads of
  // CTAs differ by about a twelfth of the longest unit.
  double most_of_unit(double most) const {
    return all_are_dealt() ? most : uneven_part * (most - requests_[division_.batch].cost / lanes_);
  }

  // Reads the tail's row tiles, each request's last ones first, as they are mostly the longest.
  bool read_tiles(double most) {
    memory_.tiles.clear();
    units_ = 0;
    for (i32 i = tail_.request; i < division_.batch; ++i) {
      const Request& request = requests_[i];
      for (i32 tile = request.tiles - 1; tile >= 0; --tile) {
        const i32 first_head = i > tail_.request ? 0 : tail_.head + (tile < tail_.tile);
        if (first_head == heads_) continue;
        const double ns = model_.unit_ns(request, tile);
        if (ns >= most) return false;
        longest_ns_ = max_of(longest_ns_, ns);
        tail_ns_ += ns * (heads_ - first_head);
        units_ += heads_ - first_head;
        memory_.tiles.push_back({ns, i, tile, first_head, 0});
      }
    }
    return units_ > 0;
  }

  // Sorts the row tiles by cost class, by counting.
  void sort() {
    i32 places[num_classes] = {};
    const double classes_per_ns = longest_ns_ > 0.0 ? (num_classes - 1) / longest_ns_ : 0.0;
    for (RowTile& tile : memory_.tiles) {
      tile.cost_class = num_classes - 1 - static_cast<i32>(tile.ns * classes_per_ns);
      ++places[tile.cost_class];
    }
    i32 before = 0;
    for (i32& place : places) {
      const i32 count = place;
      place = before;
      before += count;
    }
    memory_.order.resize(memory_.tiles.size());
    for (i32 i = 0; i < before; ++i) memory_.order[places[memory_.tiles[i].cost_class]++] = i;
  }

  // Fills the lanes with whole units up to the tail. Their loads become the heap.
  void fill_waves() {
    memory_.ends.assign(lanes_, tail_);
    memory_.loads.resize(lanes_);
    if (all_are_dealt()) return;
    memory_.waves_ns.resize(lanes_);
    partitioner_.whole_wave(start_, tail_, tail_at_, memory_.ends.data(), memory_.waves_ns.data());
    for (i32 lane = 0; lane < lanes_; ++lane) {
      memory_.loads[lane] = {memory_.waves_ns[lane], lane};
      most_ns_ = max_of(most_ns_, memory_.waves_ns[lane]);
    }
    make_heap();
  }

  bool deal(double most) {
    if (most_ns_ >= most) return false;
    memory_.lane_of.resize(units_);
    memory_.counts.assign(lanes_, 0);
    Load* const loads = memory_.loads.data();
    const i32 empty_lanes = all_are_dealt() ? lanes_ : 0;
    i32 unit = 0;
    for (const i32 index : memory_.order) {
      const double ns = memory_.tiles[index].ns;
      for (i32 head = memory_.tiles[index].first_head; head < heads_; ++head, ++unit) {
        if (unit < empty_lanes) {
          memory_.lane_of[unit] = unit;
          ++memory_.counts[unit];
          loads[lanes_ - 1 - unit] = {ns, unit};
          most_ns_ = max_of(most_ns_, ns);
          continue;
        }
        if (unit == empty_lanes && unit > 0) make_heap();
        const Load least = loads[0], load{least.ns + ns, least.lane};
        if (load.ns >= most) return false;
        most_ns_ = max_of(most_ns_, load.ns);
        memory_.lane_of[unit] = least.lane;
        ++memory_.counts[least.lane];
        sink(0, load);
      }
    }
    return true;
  }

  // Writes lane by lane: the segments of its waves, then its dealt units in the order in which they were dealt.
  void write_segments() {
    const i32 waves = division_.axis.waves;
    memory_.lanes.assign(division_.lane, division_.lane + lanes_);
    memory_.segments.resize(static_cast<size_t>(lanes_) * waves + units_);
    Segment* segment = memory_.segments.data();
    Cut last = start_.cut;
    for (i32 lane = 0; lane < lanes_; ++lane) {
      memory_.lanes[lane].first_segment = static_cast<i32>(segment - memory_.segments.data());
      for (i32 wave = 0; wave + 1 < waves; ++wave) *segment++ = early_[lane * waves + wave];
      *segment++ = {last, memory_.ends[lane]};
      last = memory_.ends[lane];
      segment += memory_.counts[lane];
    }
    i32 unit = 0;
    for (const i32 index : memory_.order) {
      const RowTile& tile = memory_.tiles[index];
      for (i32 head = tile.first_head; head < heads_; ++head) {
        Lane& lane = memory_.lanes[memory_.lane_of[unit++]];
        const Cut at{tile.request, head, tile.tile, -1};
        memory_.segments[lane.first_segment + lane.num_segments++] = {
            at, next_unit(at, requests_[at.request].tiles, heads_)};
      }
    }
  }

  void make_heap() {
    for (i32 i = lanes_ / 2 - 1; i >= 0; --i) sink(i, memory_.loads[i]);
  }

  // Puts a load into the heap at `at` or below, moving smaller loads up.
  void sink(i32 at, const Load load) {
    Load* const loads = memory_.loads.data();
    for (i32 below = 2 * at + 1; below < lanes_; below = 2 * at + 1) {
      below += below + 1 < lanes_ && loads[below + 1].ns < loads[below].ns;
      if (loads[below].ns >= load.ns) break;
      loads[at] = loads[below];
      at = below;
    }
    loads[at] = load;
  }

  const CostModel& model_;
  const Request* requests_;
  const Division& division_;
  Partitioner<OneSearcher> partitioner_;
  const Segment* early_;
  Start start_;
  i32 heads_;
  i32 lanes_;
  Memory& memory_;
  Cut tail_;              // where the tail begins
  double tail_at_ = 0.0;  // position of tail_ on the axis
  i32 units_ = 0;         // in the tail
  double longest_ns_ = 0.0, tail_ns_ = 0.0, most_ns_ = 0.0;
};

}  // namespace flashpage::plan
