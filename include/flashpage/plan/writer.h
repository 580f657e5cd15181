// Turns segments into the plan's bytes: work items lane by lane, then merges and their counters of arrivals.
//
// Lanes are counted first and then written. Each lane is independent: any number of threads may write lanes at the same
// time.
#pragma once
#include "flashpage/plan/cost.h"
#include "flashpage/plan/lanes.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

// Numbers of entries that lanes add to a plan. The totals of all earlier lanes say where a lane begins to write.
struct Totals {
  i64 items;
  i64 units;         // cut units, each counted in the lane where it begins
  i64 merges;        // of the CTAs of one place
  i64 partial_rows;  // of the CTAs of one place
  i64 pieces;        // of the last cut unit, which may continue in the next lane

  // Totals of some lanes followed by others, in this order.
  FP_HOST_DEVICE Totals operator+(const Totals& next) const {
    return {items + next.items, units + next.units, merges + next.merges, partial_rows + next.partial_rows,
            next.units > 0 ? next.pieces : pieces + next.pieces};
  }
};

// Offset of the items in the bytes of a plan.
FP_HOST_DEVICE i64 items_offset(const Schedule& schedule) {
  return sizeof(PlanHeader) + schedule.num_ctas * static_cast<i64>(sizeof(CtaStart));
}

struct CutUnit {
  Cut at;
  i32 merge;        // first merge, in place 0
  i32 partial_row;  // first partial row, in place 0
  i32 pieces;
};

// Where a plan is written, and what is known while it is.
struct PlanMemory {
  Totals* before;  // [lanes + 1], totals of the lanes before each
  CutUnit* units;  // as many as the last of `before` counts
  char* bytes;     // Writer::used_bytes of them
};

// The items of a lane that a thread writes, once the lanes before it are counted. whole_requests: those of requests
// that lie in a segment as a whole, unless a fixed split may cut them; others: all other items.
enum class Items { none, whole_requests, others, all };

class Writer {
 public:
  FP_HOST_DEVICE Writer(const CostModel& model, const Schedule& schedule, const Assignment& assignment,
                        const PlanMemory& memory)
      : model_(model),
        schedule_(schedule),
        assignment_(assignment),
        memory_(memory),
        requests_(assignment.division.requests),
        lane_(assignment.division.lane),
        batch_(assignment.division.batch),
        axis_heads_(assignment.division.axis.heads),
        places_(assignment.division.lanes.ctas),
        before_(memory.before),
        all_(memory.before[assignment.division.lanes.count]),
        items_(reinterpret_cast<WorkItem*>(memory.bytes + items_offset(schedule))) {}

  // Adds a lane to the totals of the lanes before it and writes its `items`; of the whole requests, every `step`-th
  // from `first` on. To write lanes with more than one head, the totals of the whole plan must be known.
  template <Items items>
  FP_HOST_DEVICE void add_lane(i32 lane, Totals& to, i32 first = 0, i32 step = 1) const {
    const Lane& mine = lane_[lane];
    const Segment* const segments = assignment_.segments + mine.first_segment;
    for (i32 i = 0; i < mine.num_segments; ++i) take<items>(segments[i], mine.heads, first, step, to);
  }

  // Writes the starts of a lane's CTAs, every `step`-th from `first` on, once all items are written.
  FP_HOST_DEVICE void write_starts(i32 lane, i32 first = 0, i32 step = 1) const {
    const Lane mine = lane_[lane];
    CtaStart* const starts = reinterpret_cast<CtaStart*>(memory_.bytes + sizeof(PlanHeader)) + mine.first_cta;
    const i32 begin = static_cast<i32>(before_[lane].items), end = static_cast<i32>(before_[lane + 1].items);
    const i32 partial_rows = static_cast<i32>(all_.partial_rows), axis_heads = axis_heads_;
    WorkItem item{};
    if (begin < end) item = items_[begin];
    for (i32 i = first; i < mine.ctas; i += step) {
      const i32 place = i * mine.heads;
      CtaItems own{};
      if (begin < end)
        own = {begin, end, static_cast<u16>(place * axis_heads), static_cast<u16>(place), place * partial_rows};
      starts[i * mine.cta_step] = {own, item_of_cta(item, own)};
    }
  }

  // Writes the merges of a cut unit, for every `step`-th place from `first` on, once all items are written.
  FP_HOST_DEVICE void write_merges(i32 index, i32 first = 0, i32 step = 1) const {
    const CutUnit unit = memory_.units[index];
    const Cut& at = unit.at;
    const Request& request = requests_[at.request];
    const i32 rows = rows_of(at);
    const i32 first_row = at.tile * schedule_.tile_q;
    MergeItem* const merges = reinterpret_cast<MergeItem*>(memory_.bytes + merges_offset());
    u32* const arrivals = reinterpret_cast<u32*>(merges + all_.merges * places_);
    for (i32 place = first; place < places_; place += step) {
      const i32 partial_row = unit.partial_row + place * static_cast<i32>(all_.partial_rows);
      i64 merge = unit.merge + place * all_.merges;
      for (i32 row = 0; row < rows; row += schedule_.merge_rows) {
        merges[merge] = {request.index,
                         request.q_begin,
                         first_row + row,
                         min_of(schedule_.merge_rows, rows - row),
                         at.head + place * axis_heads_,
                         partial_row + row,
                         rows,
                         unit.pieces};
        arrivals[merge++] = 0;
      }
    }
  }

  // merge_rounds of a cut unit's largest merge item.
  i32 rounds_of(i32 index) const {
    const CutUnit& unit = memory_.units[index];
    return merge_rounds(unit.pieces, min_of(rows_of(unit.at), schedule_.merge_rows) * schedule_.row_jobs);
  }

  // The header of the whole plan. Numbers that may not fit its 32 bits are returned in 64 bits by the two functions
  // below.
  FP_HOST_DEVICE PlanHeader header() const {
    return {num_ctas(),
            static_cast<i32>(all_.items),
            static_cast<i32>(all_.merges * places_),
            static_cast<i32>(num_partial_rows()),
            static_cast<i32>(all_.merges),
            static_cast<i32>(items_offset(schedule_)),
            static_cast<i32>(merges_offset()),
            static_cast<i32>(used_bytes()),
            assignment_.group_ctas,
            schedule_.merge_rows,
            {}};
  }
  FP_HOST_DEVICE i64 num_partial_rows() const { return all_.partial_rows * places_; }
  FP_HOST_DEVICE i64 used_bytes() const { return merges_offset() + all_.merges * places_ * merge_bytes; }

 protected:
  // `heads`, here and below: KV heads of a CTA of the lane.
  template <Items items>
  FP_HOT void take(const Segment& segment, i32 heads, i32 first, i32 step, Totals& to) const {
    constexpr bool writes = items == Items::others || items == Items::all;
    constexpr bool writes_whole = items == Items::whole_requests || items == Items::all;
    const Cut& end = segment.end;
    Cut at = segment.begin;
    if (at.inside() && !resume<writes>(heads, at, end, to)) return;
    if (at.request < end.request) {
      whole_units<writes>(heads, at, units_up_to(at, {at.request, axis_heads_, 0, -1}), to);
      whole_requests<writes, writes_whole>(heads, {at.request + 1, end.request}, first, step, to);
      at = {end.request, 0, 0, -1};
    }
    if (at.request < batch_) whole_units<writes>(heads, at, units_up_to(at, end), to);
    if (end.inside()) cut_unit<writes>(heads, end, {visible(end).begin, end.token}, false, to);
  }

  // Writes the pieces of a unit that began in an earlier lane and moves `at` to the next unit. Returns false if the
  // segment has nothing else.
  template <bool writes>
  FP_HOST_DEVICE bool resume(i32 heads, Cut& at, const Cut& end, Totals& to) const {
    const bool stays = at.same_unit(end);
    if (stays && !end.inside()) return false;  // an empty segment
    put_pieces<writes>(heads, at, {at.token, stays ? end.token : visible(at).end}, to);
    if (stays) return false;
    if constexpr (writes) put_unit(at, to);
    at = unit_after(at);
    return true;
  }

  struct Requests {
    i32 begin;
    i32 end;
  };

  template <bool writes, bool writes_whole>
  FP_HOST_DEVICE void whole_requests(i32 heads, const Requests& range, i32 first, i32 step, Totals& to) const {
    if (schedule_.fixed()) {
      for (i32 i = range.begin; i < range.end; ++i) {
        whole_units<writes>(heads, {i, 0, 0, -1}, axis_heads_ * requests_[i].tiles, to);
      }
      return;
    }
    const i32 number = requests_[range.begin].number;
    if constexpr (writes_whole) {
      for (i32 i = range.begin + first; i < range.end; i += step) {
        const Request& request = requests_[i];
        if (request.tiles == 0) continue;
        WorkItem& item = items_[to.items + request.number - number];
        item = item_of({i, 0, 0, -1}, 0, {request.kv_begin, request.kv_len});
        item.num_units = request.tiles * axis_heads_ * heads;
      }
    }
    to.items += requests_[range.end].number - number;
  }

  FP_HOST_DEVICE Cut unit_after(const Cut& at) const { return next_unit(at, requests_[at.request].tiles, axis_heads_); }
  FP_HOST_DEVICE i32 units_up_to(const Cut& at, const Cut& end) const {  // of one request
    return (end.head - at.head) * requests_[at.request].tiles + end.tile - at.tile;
  }
  FP_HOST_DEVICE TokenRange visible(const Cut& at) const { return model_.visible(requests_[at.request], at.tile); }
  FP_HOST_DEVICE i32 rows_of(const Cut& at) const {
    const i32 rows = requests_[at.request].q_len * static_cast<i32>(model_.group.divisor);
    return min_of(schedule_.tile_q, rows - at.tile * schedule_.tile_q);
  }
  FP_HOST_DEVICE i32 merges_of(i32 rows) const {
    return rows <= schedule_.merge_rows ? 1 : ceil_div(rows, schedule_.merge_rows);
  }

  // Adds `count` units of a request: one item, except for units that a fixed split cuts.
  template <bool writes>
  FP_HOT void whole_units(i32 heads, const Cut& at, i32 count, Totals& to) const {
    if (schedule_.fixed() && requests_[at.request].kv_len > schedule_.fixed_piece_tokens) {
      units_of_fixed_split<writes>(heads, at, count, to);
    } else {
      units_in_a_row<writes>(heads, at, count, to);
    }
  }

  template <bool writes>
  FP_HOST_DEVICE void units_of_fixed_split(i32 heads, Cut at, i32 count, Totals& to) const {
    Cut row_begin = at;
    i32 uncut = 0;
    for (; count > 0; --count) {
      const TokenRange range = visible(at);
      const Cut next = unit_after(at);
      if (range.end <= next_cut(range.begin)) {
        ++uncut;
      } else {
        units_in_a_row<writes>(heads, row_begin, uncut, to);
        cut_unit<writes>(heads, at, range, true, to);
        row_begin = next;
        uncut = 0;
      }
      at = next;
    }
    units_in_a_row<writes>(heads, row_begin, uncut, to);
  }

  template <bool writes>
  FP_HOT void units_in_a_row(i32 heads, const Cut& at, i32 count, Totals& to) const {
    if (count <= 0) return;
    const Request& request = requests_[at.request];
    const bool all_tiles = count == request.tiles && at.tile == 0;  // an item continues with the next KV head
    for (i32 head = 0; head < (all_tiles ? 1 : heads); ++head) {
      if constexpr (writes) {
        WorkItem& item = items_[to.items];
        item = item_of(at, head, {request.kv_begin, request.kv_len});
        item.num_units = count * (all_tiles ? heads : 1);
      }
      ++to.items;
    }
  }

  // Begins a cut unit and adds its first pieces, or all of them.
  template <bool writes>
  FP_HOST_DEVICE void cut_unit(i32 heads, const Cut& at, const TokenRange& range, bool is_all, Totals& to) const {
    ++to.units;
    to.merges += merges_of(rows_of(at));
    to.pieces = 0;
    put_pieces<writes>(heads, at, range, to);
    if constexpr (writes) {
      if (is_all) put_unit(at, to);
    }
  }

  // Records the last cut unit, all of whose pieces are counted.
  FP_HOST_DEVICE void put_unit(const Cut& at, const Totals& to) const {
    const i32 rows = rows_of(at);
    memory_.units[to.units - 1] = {at, static_cast<i32>(to.merges - merges_of(rows)),
                                   static_cast<i32>(to.partial_rows - to.pieces * rows), static_cast<i32>(to.pieces)};
  }

  FP_HOST_DEVICE i32 next_cut(i32 token) const {
    const i64 size = schedule_.fixed_piece_tokens;
    return static_cast<i32>(schedule_.fixed() ? min_of(token / size * size + size, max_i32) : max_i32);
  }

  // Adds a range of tokens of the last cut unit: one piece, or one for each multiple of a fixed split.
  template <bool writes>
  FP_HOST_DEVICE void put_pieces(i32 heads, const Cut& at, const TokenRange& range, Totals& to) const {
    const i32 rows = rows_of(at);
    if constexpr (!writes) {
      if (range.begin >= range.end) return;
      const i32 size = schedule_.fixed_piece_tokens;
      const i64 pieces = schedule_.fixed() ? (range.end - 1) / size - range.begin / size + 1 : 1;
      to.items += pieces * heads;
      to.partial_rows += pieces * rows;
      to.pieces += pieces;
      return;
    }
    const i64 merge = to.merges - merges_of(rows);
    for (i32 begin = range.begin; begin < range.end; begin = next_cut(begin)) {
      for (i32 head = 0; head < heads; ++head) {
        WorkItem& item = items_[to.items++];
        item = item_of(at, head, {begin, min_of(range.end, next_cut(begin))});
        item.partial_row = static_cast<i32>(to.partial_rows + head * all_.partial_rows);
        item.piece = static_cast<i32>(to.pieces);
        item.merge = static_cast<i32>(merge + head * all_.merges);
      }
      ++to.pieces;
      to.partial_rows += rows;
    }
  }

  FP_HOST_DEVICE WorkItem item_of(const Cut& at, i32 head, const TokenRange& tokens) const {
    const Request& request = requests_[at.request];
    return {request.kv_offset,
            request.mask_offset,
            request.index,
            request.q_begin,
            request.q_len,
            request.kv_len,
            at.tile * schedule_.tile_q,
            at.head + head,
            1,
            tokens.begin,
            tokens.end,
            -1,
            0,
            -1};
  }

  // Small lanes have the last CTAs, and the last of those come first; full lanes are in the order of their CTAs.
  FP_HOST_DEVICE i32 num_ctas() const {
    const Lanes& lanes = assignment_.division.lanes;
    for (i32 i = 0; i < lanes.count; ++i) {
      const i32 lane = i < lanes.num_small ? i : lanes.count - 1 - (i - lanes.num_small);
      if (before_[lane].items == before_[lane + 1].items) continue;
      const Lane& last = lane_[lane];
      return round_up(last.first_cta + (last.ctas - 1) * last.cta_step + 1, max_of(assignment_.group_ctas, 1));
    }
    return 0;
  }

  FP_HOST_DEVICE i64 merges_offset() const {
    return items_offset(schedule_) + all_.items * static_cast<i64>(sizeof(WorkItem));
  }

  const CostModel& model_;
  const Schedule& schedule_;
  const Assignment& assignment_;
  const PlanMemory& memory_;
  // Copies of what every item needs: members of references would be loaded again after each store to the plan.
  const Request* const requests_;
  const Lane* const lane_;
  const i32 batch_;
  const i32 axis_heads_;
  // CTAs of a full lane. Each place has the same number of partial rows and merges, which follow those of the place
  // before; a CTA of several heads has several places.
  const i32 places_;
  const Totals* const before_;
  const Totals& all_;
  WorkItem* const items_;
};

}  // namespace flashpage::plan
