// From cuts to the plan's bytes: work items lane by lane, then what must be merged and the counters of who has come.
//
// Lanes are counted first, then written, each for itself: any number of threads may do so side by side.
#pragma once
#include "flashpage/plan/partition.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

// What lanes put into a plan; of all lanes before one: where it begins to put its own.
struct Totals {
  i64 items;
  i64 units;         // that are cut, each counted where it begins
  i64 merges;        // of one walk of the axis
  i64 partial_rows;  // of one walk
  i64 pieces;        // of cut units

  FP_HOST_DEVICE Totals operator+(const Totals& other) const {
    return {items + other.items, units + other.units, merges + other.merges, partial_rows + other.partial_rows,
            pieces + other.pieces};
  }
};

// Of the bytes of a plan.
FP_HOST_DEVICE i64 items_offset(const Schedule& schedule) {
  return sizeof(PlanHeader) + schedule.num_ctas * static_cast<i64>(sizeof(CtaStart));
}

struct CutUnit {
  Cut at;
  i32 merge;        // its first, of one walk
  i32 partial_row;  // its first, of one walk
  i32 first_piece;  // of all pieces of the plan
  i32 pieces;
};

class Emitter {
 public:
  // `before`: [lanes.count + 1], of the lanes before each; once that is known, `units` has as many entries as the last
  // one counts, and `bytes` as many bytes as header() says.
  FP_HOST_DEVICE Emitter(const CostModel& model, const Schedule& schedule, const Division& division,
                         const Cut* early_ends, const Cut* ends, i32 num_kv_heads, const Totals* before, CutUnit* units,
                         void* bytes)
      : model_(model),
        schedule_(schedule),
        requests_(division.requests),
        lane_(division.lane),
        early_ends_(early_ends),
        ends_(ends),
        before_(before),
        units_(units),
        batch_(division.batch),
        num_lanes_(division.lanes.count),
        num_small_(division.lanes.num_small),
        last_wave_(division.axis.waves - 1),
        copies_(division.axis.copies),
        members_(num_kv_heads / division.axis.copies),
        bytes_(static_cast<char*>(bytes)) {}

  FP_HOST_DEVICE Totals count(i32 lane) const {
    Totals at{};
    for (i32 wave = 0; wave <= last_wave_; ++wave) walk<false>(wave, lane, at);
    return at;
  }

  // What begins in the lane: its items, and units that it cuts; but not what write_whole writes.
  FP_HOST_DEVICE void write_lane(i32 lane) const {
    Totals at = before_[lane];
    for (i32 wave = 0; wave <= last_wave_; ++wave) walk<true>(wave, lane, at);
  }

  // Requests that lie in the lane as a whole, where a fixed split cuts none of them: one of `parts` shares of them.
  FP_HOST_DEVICE void write_whole(i32 lane, i32 part, i32 parts) const {
    if (schedule_.fixed()) return;
    Totals before = before_[lane];
    for (i32 wave = 0; wave <= last_wave_; ++wave) {
      write_whole(wave, lane, before, part, parts);
      if (wave < last_wave_) walk<false>(wave, lane, before);
    }
  }

  // Both, for who writes alone; what lies before the next lane. Lanes of one KV head need to know the lanes before them
  // and no others.
  FP_HOST_DEVICE Totals write_all(i32 lane) const {
    Totals at = before_[lane];
    for (i32 wave = 0; wave <= last_wave_; ++wave) walk<true, true>(wave, lane, at);
    return at;
  }

  // A unit that is an item by itself, in no lane's run (whole_units.h).
  FP_HOST_DEVICE void write_unit(i64 item, const Cut& at) const {
    items()[item] = item_of(at, 0, 0, requests_[at.request].kv_len);
  }

  // Pieces of a unit that began in an earlier lane, once all lanes are written.
  FP_HOST_DEVICE void write_resumed(i32 lane) const {
    const Resumed resumed = resumed_by(lane);
    if (!resumed.exists) return;
    Totals at = before_[lane];
    for (i32 wave = 0; wave < last_wave_; ++wave) walk<false>(wave, lane, at);
    CutUnit& unit = units_[at.units - 1];
    put_pieces(lane, begin_of(last_wave_, lane), resumed.begin, resumed.end, unit, at);
    if (resumed.ends_unit) unit.pieces = static_cast<i32>(at.pieces) - unit.first_piece;
  }

  // Of the whole plan. used_bytes is counted in 64 bits by used_bytes().
  FP_HOST_DEVICE PlanHeader header() const {
    const Totals& all = before_[num_lanes_];
    return {num_ctas(),
            static_cast<i32>(all.items),
            static_cast<i32>(all.merges * members_),
            static_cast<i32>(num_partial_rows()),
            static_cast<i32>(all.merges),
            static_cast<i32>(items_offset(schedule_)),
            static_cast<i32>(merges_offset()),
            static_cast<i32>(used_bytes()),
            0,
            schedule_.merge_rows,
            {}};
  }
  FP_HOST_DEVICE i64 num_partial_rows() const { return before_[num_lanes_].partial_rows * members_; }
  FP_HOST_DEVICE i64 used_bytes() const {
    return merges_offset() + before_[num_lanes_].merges * members_ * merge_bytes;
  }

  // What the members of a lane start with, once all items are written: one of `parts` shares of it.
  FP_HOST_DEVICE void write_starts(i32 lane, i32 part, i32 parts) const {
    const Lane& mine = lane_[lane];
    CtaStart* starts = reinterpret_cast<CtaStart*>(bytes_ + sizeof(PlanHeader)) + mine.first_cta;
    const i32 begin = static_cast<i32>(before_[lane].items), end = static_cast<i32>(before_[lane + 1].items);
    const i32 rows = static_cast<i32>(before_[num_lanes_].partial_rows);
    for (i32 member = part; member < mine.members; member += parts) {
      const i32 walk = member * mine.heads;
      CtaStart start{};
      if (begin < end) {
        start.items = {begin, end, static_cast<u16>(walk * copies_), static_cast<u16>(walk), walk * rows};
        start.first = item_of_member(items()[begin], start.items);
      }
      starts[member] = start;
    }
  }

  // What merges a unit, once all lanes are written, those that resume it too: one of `parts` shares of it.
  FP_HOST_DEVICE void write_merges(i32 index, i32 part, i32 parts) const {
    const CutUnit& unit = units_[index];
    const Totals& all = before_[num_lanes_];
    const Cut& at = unit.at;
    const i32 q_begin = requests_[at.request].q_begin, rows = rows_of(at), first_row = at.tile * schedule_.tile_q;
    MergeItem* merges = reinterpret_cast<MergeItem*>(bytes_ + merges_offset());
    u32* arrivals = reinterpret_cast<u32*>(merges + all.merges * members_);
    for (i32 walk = part; walk < members_; walk += parts) {
      const i32 partial_row = unit.partial_row + walk * static_cast<i32>(all.partial_rows);
      i64 merge = unit.merge + walk * all.merges;
      for (i32 row = 0; row < rows; row += schedule_.merge_rows) {
        merges[merge] = {at.request,
                         q_begin,
                         first_row + row,
                         min_of(schedule_.merge_rows, rows - row),
                         at.copy + walk * copies_,
                         partial_row + row,
                         rows,
                         unit.pieces};
        arrivals[merge++] = 0;
      }
    }
  }

 private:
  // Of a unit that began in an earlier lane: in the last wave, as only that one cuts units.
  struct Resumed {
    bool exists;
    bool ends_unit;
    i32 begin, end;  // tokens
  };

  FP_HOST_DEVICE Cut end_of(i32 wave, i32 lane) const {
    return wave == last_wave_ ? ends_[lane] : early_ends_[wave * num_lanes_ + lane];
  }
  FP_HOST_DEVICE Cut begin_of(i32 wave, i32 lane) const {
    if (lane > 0) return end_of(wave, lane - 1);
    return wave > 0 ? end_of(wave - 1, num_lanes_ - 1) : Cut{};
  }

  FP_HOST_DEVICE Resumed resumed_by(i32 lane) const {
    const Cut begin = begin_of(last_wave_, lane), end = ends_[lane];
    if (!begin.inside()) return {false, false, 0, 0};
    const bool stays = begin.same_unit(end);
    if (stays && !end.inside()) return {false, false, 0, 0};  // an empty lane
    return {true, !stays, begin.token, stays ? end.token : visible(begin).end};
  }

  // Counts what the lane resumes and moves behind it; false where the lane has nothing else.
  FP_HOST_DEVICE bool leave_resumed(i32 lane, Cut& at, Totals& to) const {
    if (!at.inside()) return true;
    const Resumed resumed = resumed_by(lane);
    if (resumed.exists) count_pieces(lane, at, resumed.begin, resumed.end, to);
    if (resumed.ends_unit) at = unit_after(at);
    return resumed.ends_unit;
  }

  FP_HOST_DEVICE void write_whole(i32 wave, i32 lane, Totals before, i32 part, i32 parts) const {
    Cut at = begin_of(wave, lane);
    const Cut end = end_of(wave, lane);
    if (!leave_resumed(lane, at, before) || at.request >= end.request) return;
    whole_units<false>(lane, at, units_up_to(at, {at.request, copies_, 0, -1}), before);
    const i32 first = at.request + 1, number = requests_[first].number;
    for (i32 i = first + part; i < end.request; i += parts) {
      Totals to = before;
      to.items += requests_[i].number - number;
      run_of_units<true>(lane, {i, 0, 0, -1}, copies_ * requests_[i].tiles, to);
    }
  }

  // What the lane resumes is counted here, and written by write_resumed; whole requests by write_whole, or here.
  template <bool writes, bool writes_whole = false>
  FP_HOST_DEVICE void walk(i32 wave, i32 lane, Totals& to) const {
    Cut at = begin_of(wave, lane);
    const Cut end = end_of(wave, lane);
    if (!leave_resumed(lane, at, to)) return;
    if (at.request < end.request) {
      whole_units<writes>(lane, at, units_up_to(at, {at.request, copies_, 0, -1}), to);
      at = {at.request + 1, 0, 0, -1};
      if (writes_whole || schedule_.fixed()) {
        for (; at.request < end.request; ++at.request) {
          whole_units<writes>(lane, at, copies_ * requests_[at.request].tiles, to);
        }
      } else {
        to.items += requests_[end.request].number - requests_[at.request].number;
        at.request = end.request;
      }
    }
    if (at.request < batch_) whole_units<writes>(lane, at, units_up_to(at, end), to);
    if (end.inside()) cut_unit<writes>(lane, end, visible(end).begin, end.token, false, to);
  }

  FP_HOST_DEVICE Cut unit_after(const Cut& at) const { return next_unit(at, requests_[at.request].tiles, copies_); }
  FP_HOST_DEVICE i32 units_up_to(const Cut& at, const Cut& end) const {  // of one request
    return (end.copy - at.copy) * requests_[at.request].tiles + end.tile - at.tile;
  }
  FP_HOST_DEVICE TokenRange visible(const Cut& at) const { return model_.visible(requests_[at.request], at.tile); }
  FP_HOST_DEVICE i32 rows_of(const Cut& at) const {
    const i32 rows = requests_[at.request].q_len * static_cast<i32>(model_.group.divisor);
    return min_of(schedule_.tile_q, rows - at.tile * schedule_.tile_q);
  }

  // `count` units of a request: one run, but for units that a fixed split cuts.
  template <bool writes>
  FP_HOST_DEVICE void whole_units(i32 lane, const Cut& at, i32 count, Totals& to) const {
    if (schedule_.fixed() && requests_[at.request].kv_len > schedule_.fixed_piece_tokens) {
      units_of_fixed_split<writes>(lane, at, count, to);
    } else {
      run_of_units<writes>(lane, at, count, to);
    }
  }

  template <bool writes>
  FP_HOST_DEVICE void units_of_fixed_split(i32 lane, Cut at, i32 count, Totals& to) const {
    Cut run_begin = at;
    i32 run = 0;
    for (; count > 0; --count) {
      const TokenRange range = visible(at);
      const Cut next = unit_after(at);
      if (range.end <= next_cut(range.begin)) {
        ++run;
      } else {
        run_of_units<writes>(lane, run_begin, run, to);
        cut_unit<writes>(lane, at, range.begin, range.end, true, to);
        run_begin = next;
        run = 0;
      }
      at = next;
    }
    run_of_units<writes>(lane, run_begin, run, to);
  }

  template <bool writes>
  FP_HOST_DEVICE void run_of_units(i32 lane, const Cut& at, i32 count, Totals& to) const {
    if (count <= 0) return;
    const Request& request = requests_[at.request];
    const i32 heads = lane_[lane].heads;
    const bool all = count == request.tiles && at.tile == 0;  // a run goes on with the next KV head
    for (i32 head = 0; head < (all ? 1 : heads); ++head) {
      if constexpr (writes) {
        WorkItem item = item_of(at, head, 0, request.kv_len);
        item.num_units = count * (all ? heads : 1);
        items()[to.items] = item;
      }
      ++to.items;
    }
  }

  // The first pieces of a unit, or all.
  template <bool writes>
  FP_HOST_DEVICE void cut_unit(i32 lane, const Cut& at, i32 begin, i32 end, bool is_whole, Totals& to) const {
    const Totals before = to;
    ++to.units;
    to.merges += ceil_div(rows_of(at), schedule_.merge_rows);
    if constexpr (writes) {
      CutUnit unit{at, static_cast<i32>(before.merges), static_cast<i32>(before.partial_rows),
                   static_cast<i32>(before.pieces), 0};
      put_pieces(lane, at, begin, end, unit, to);
      if (is_whole) unit.pieces = static_cast<i32>(to.pieces - before.pieces);
      units_[before.units] = unit;
    } else {
      count_pieces(lane, at, begin, end, to);
    }
  }

  FP_HOST_DEVICE i32 next_cut(i32 token) const {
    return schedule_.fixed() ? (token / schedule_.fixed_piece_tokens + 1) * schedule_.fixed_piece_tokens
                             : static_cast<i32>(max_i32);
  }

  // Tokens [begin, end) of a unit: one piece, or one for each multiple of a fixed split.
  FP_HOST_DEVICE void count_pieces(i32 lane, const Cut& at, i32 begin, i32 end, Totals& to) const {
    if (begin >= end) return;
    const i32 size = schedule_.fixed() ? schedule_.fixed_piece_tokens : end;
    const i64 pieces = schedule_.fixed() ? (end - 1) / size - begin / size + 1 : 1;
    to.items += pieces * lane_[lane].heads;
    to.partial_rows += pieces * rows_of(at);
    to.pieces += pieces;
  }

  FP_HOST_DEVICE void put_pieces(i32 lane, const Cut& at, i32 begin, i32 end, const CutUnit& unit, Totals& to) const {
    const Totals& all = before_[num_lanes_];
    const i32 rows = rows_of(at);
    for (; begin < end; begin = next_cut(begin)) {
      for (i32 head = 0; head < lane_[lane].heads; ++head) {
        WorkItem item = item_of(at, head, begin, min_of(end, next_cut(begin)));
        // The partial rows of the n-th walk of the axis begin at n times those of one walk, and so do its merges.
        item.partial_row = static_cast<i32>(to.partial_rows + head * all.partial_rows);
        item.piece = static_cast<i32>(to.pieces) - unit.first_piece;
        item.merge = static_cast<i32>(unit.merge + head * all.merges);
        items()[to.items++] = item;
      }
      ++to.pieces;
      to.partial_rows += rows;
    }
  }

  FP_HOST_DEVICE WorkItem item_of(const Cut& at, i32 head, i32 kv_begin, i32 kv_end) const {
    const Request& request = requests_[at.request];
    return {request.kv_offset,
            request.mask_offset,
            at.request,
            request.q_begin,
            request.q_len,
            request.kv_len,
            at.tile * schedule_.tile_q,
            at.copy + head,
            1,
            kv_begin,
            kv_end,
            -1,
            0,
            -1};
  }

  // Smaller teams have the last CTAs, and the last of them come first.
  FP_HOST_DEVICE i32 num_ctas() const {
    for (i32 i = 0; i < num_lanes_; ++i) {
      const i32 lane = i < num_small_ ? i : num_lanes_ - 1 - (i - num_small_);
      if (before_[lane].items < before_[lane + 1].items) return lane_[lane].first_cta + lane_[lane].members;
    }
    return 0;
  }

  FP_HOST_DEVICE i64 merges_offset() const {
    return items_offset(schedule_) + before_[num_lanes_].items * static_cast<i64>(sizeof(WorkItem));
  }
  FP_HOST_DEVICE WorkItem* items() const { return reinterpret_cast<WorkItem*>(bytes_ + items_offset(schedule_)); }

  const CostModel& model_;
  const Schedule& schedule_;
  const Request* requests_;
  const Lane* lane_;
  const Cut* early_ends_;  // [waves - 1][lanes]
  const Cut* ends_;        // [lanes], of the last wave
  const Totals* before_;
  CutUnit* units_;
  i32 batch_;
  i32 num_lanes_;
  i32 num_small_;
  i32 last_wave_;
  i32 copies_;   // of a request on the axis
  i32 members_;  // that walk the axis alike, each for its own KV heads
  char* bytes_;
};

}  // namespace flashpage::plan
