// Few units, none of them cut: dealt to the CTAs longest first, each to the one that has the least so far. Loads are
// then less even than cuts would make them, but there are no pieces, and no launch that merges them.
#pragma once
#include <cstring>
#include <vector>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/lanes.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

// Of a CTA. Of more, cuts cost little beside the units themselves.
inline constexpr i64 most_whole_units = 4;
static_assert(most_whole_units <= items_of_lane, "workspaces are sized by most_items");

// KV heads are dealt like the axis' copies (lanes.h): the members of a lane share one list, each for its own heads.
class WholeUnits {
 public:
  // Kept from plan to plan.
  struct Memory {
    struct RowTile {
      double ns;
      i32 request;
      i32 tile;
      i32 cost_class;
    };
    struct Load {
      double ns;
      i32 lane;
    };
    std::vector<RowTile> tiles;
    std::vector<i32> order;      // of tiles, the longest first
    std::vector<Load> loads;     // [lanes], a heap: none is below the one at (i - 1) / 2
    std::vector<i32> lane_of;    // [units of a member], in the order in which they are dealt
    std::vector<i32> item_ends;  // [lanes]
  };

  WholeUnits(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 num_kv_heads,
             Memory& memory)
      : model_(model),
        schedule_(schedule),
        requests_(requests),
        batch_(batch),
        copies_(one_wave(schedule, num_kv_heads).copies),
        members_(num_kv_heads / copies_),
        lanes_(schedule.num_ctas / members_),
        memory_(memory) {}

  // Whether this is worth a look beside a plan with cuts. `units`: row tiles over all KV heads. Where contexts are read
  // in waves the CTAs would lose what the cache keeps for them.
  static bool may_be(const Schedule& schedule, const Axis& axis, i64 units) {
    return schedule.walk == Walk::runs && schedule.ns_per_merge > 0.0 && schedule.balanced() && axis.waves == 1 &&
           units <= most_whole_units * schedule.num_ctas;
  }

  // Whether the costliest CTA takes less than `ns`. Deals the units.
  bool is_better_than(double ns) {
    if (!read_tiles(ns)) return false;
    sort();
    return deal(ns);
  }

  PlanHeader header() const {
    return {.num_ctas = min_of(units_, lanes_) * members_,
            .num_items = units_,
            .num_merges = 0,
            .num_partial_rows = 0,
            .merges_of_walk = 0,
            .items_offset = items_offset(),
            .merges_offset = items_offset() + units_ * static_cast<i32>(sizeof(WorkItem)),
            .used_bytes = items_offset() + units_ * static_cast<i32>(sizeof(WorkItem)),
            .cluster_size = 0,
            .merge_rows = schedule_.merge_rows,
            .unused = {}};
  }
  // Of the costliest CTA, and of all.
  double most_ns() const { return most_ns_; }
  double total_ns() const { return all_tiles_ns_ * copies_ * members_; }

  // `bytes`: as many as the header says.
  void write(void* bytes) const {
    char* const to = static_cast<char*>(bytes);
    const PlanHeader made = header();
    std::memcpy(to, &made, sizeof(made));
    WorkItem* const items = reinterpret_cast<WorkItem*>(to + items_offset());
    write_items(items);
    CtaStart* starts = reinterpret_cast<CtaStart*>(to + sizeof(made));
    i32 begin = 0;
    for (i32 lane = 0; lane < min_of(units_, lanes_); ++lane) {
      const i32 end = memory_.item_ends[lane];
      for (i32 member = 0; member < members_; ++member) {
        CtaStart& start = *starts++;
        start.items = {begin, end, static_cast<u16>(member * copies_), static_cast<u16>(member), 0};
        start.first = item_of_member(items[begin], start.items);
      }
      begin = end;
    }
    std::memset(static_cast<void*>(starts), 0, (schedule_.num_ctas - made.num_ctas) * sizeof(CtaStart));
  }

 private:
  using RowTile = Memory::RowTile;
  using Load = Memory::Load;
  static constexpr i32 num_classes = 256;  // of costs: lengths need not be told apart more finely

  bool read_tiles(double most) {
    memory_.tiles.clear();
    longest_ns_ = all_tiles_ns_ = 0.0;
    for (i32 i = 0; i < batch_; ++i) {
      const Request& request = requests_[i];
      const double ns_per_token = model_.price(request).ns;
      for (i32 tile = 0; tile < request.tiles; ++tile) {
        const double ns = model_.ns_per_unit + ns_per_token * model_.visible(request, tile).size();
        if (ns >= most) return false;
        longest_ns_ = max_of(longest_ns_, ns);
        all_tiles_ns_ += ns;
        memory_.tiles.push_back({ns, i, tile, 0});
      }
    }
    units_ = static_cast<i32>(memory_.tiles.size()) * copies_;
    return units_ > 0;
  }

  // By counting.
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

  bool deal(double most) {
    memory_.lane_of.resize(units_);
    memory_.loads.resize(lanes_);
    Load* const loads = memory_.loads.data();
    most_ns_ = longest_ns_;
    i32 unit = 0;
    for (const i32 index : memory_.order) {
      const double ns = memory_.tiles[index].ns;
      for (i32 copy = 0; copy < copies_; ++copy, ++unit) {
        if (unit < lanes_) {
          memory_.lane_of[unit] = unit;
          loads[lanes_ - 1 - unit] = {ns, unit};
          continue;
        }
        if (unit == lanes_) {
          for (i32 i = lanes_ / 2 - 1; i >= 0; --i) sink(loads, i, loads[i]);
        }
        const Load least = loads[0], load{least.ns + ns, least.lane};
        if (load.ns >= most) return false;
        most_ns_ = max_of(most_ns_, load.ns);
        memory_.lane_of[unit] = least.lane;
        sink(loads, 0, load);
      }
    }
    return true;
  }

  // Puts a load into the heap, at `at` or below; what is there gives way.
  void sink(Load* loads, i32 at, const Load load) const {
    for (i32 below = 2 * at + 1; below < lanes_; below = 2 * at + 1) {
      below += below + 1 < lanes_ && loads[below + 1].ns < loads[below].ns;
      if (loads[below].ns >= load.ns) break;
      loads[at] = loads[below];
      at = below;
    }
    loads[at] = load;
  }

  // Each lane's in the order in which they were dealt.
  void write_items(WorkItem* items) const {
    std::vector<i32>& ends = memory_.item_ends;
    ends.assign(lanes_ + 1, 0);
    for (i32 unit = 0; unit < units_; ++unit) ++ends[memory_.lane_of[unit] + 1];
    for (i32 lane = 0; lane < lanes_; ++lane) ends[lane + 1] += ends[lane];  // so far, where the next one begins
    i32 unit = 0;
    for (const i32 index : memory_.order) {
      const RowTile& tile = memory_.tiles[index];
      const Request& request = requests_[tile.request];
      for (i32 copy = 0; copy < copies_; ++copy, ++unit) {
        items[ends[memory_.lane_of[unit]]++] = {.kv_offset = request.kv_offset,
                                                .mask_offset = request.mask_offset,
                                                .request = tile.request,
                                                .q_begin = request.q_begin,
                                                .q_len = request.q_len,
                                                .kv_len = request.kv_len,
                                                .first_packed_row = tile.tile * schedule_.tile_q,
                                                .kv_head = copy,
                                                .num_units = 1,
                                                .kv_begin = 0,
                                                .kv_end = request.kv_len,
                                                .partial_row = -1,
                                                .piece = 0,
                                                .merge = -1};
      }
    }
  }

  i32 items_offset() const { return static_cast<i32>(sizeof(PlanHeader) + schedule_.num_ctas * sizeof(CtaStart)); }

  const CostModel& model_;
  const Schedule& schedule_;
  const Request* requests_;
  i32 batch_;
  i32 copies_;
  i32 members_;
  i32 lanes_;
  Memory& memory_;
  i32 units_ = 0;  // of a member
  double longest_ns_ = 0.0, all_tiles_ns_ = 0.0, most_ns_ = 0.0;
};

}  // namespace flashpage::plan
