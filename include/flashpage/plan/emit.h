// From cuts to the plan's bytes: work items lane by lane, then what must be merged and the counters of who has come.
#pragma once
#include <cstring>
#include <vector>

#include "flashpage/plan/partition.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

// Counts what it is given and keeps what fits, so that a buffer too small yields the size it should have.
template <class T>
class Output {
 public:
  Output(void* bytes, i64 capacity) : records_(static_cast<T*>(bytes)), capacity_(capacity) {}
  T& next() {
    const i64 at = count_++;
    return at < capacity_ ? records_[at] : spill_;
  }
  i64 count() const { return count_; }
  i64 kept() const { return min_of(count_, capacity_); }
  T& operator[](i64 i) { return records_[i]; }

 private:
  T* records_;
  i64 capacity_;
  i64 count_ = 0;
  T spill_;
};

class Emitter {
 public:
  Emitter(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 num_kv_heads,
          void* buffer, i64 capacity)
      : model_(model),
        schedule_(schedule),
        requests_(requests),
        batch_(batch),
        copies_(copies_on_axis(schedule, num_kv_heads)),
        members_(num_kv_heads / copies_),
        merge_rows_(make_fast_div(schedule.merge_rows)),
        bytes_(static_cast<char*>(buffer)),
        capacity_(capacity),
        items_offset_(sizeof(PlanHeader) + schedule.num_ctas * static_cast<i64>(sizeof(CtaStart))),
        items_(bytes_ + items_offset_, max_of<i64>(0, capacity - items_offset_) / static_cast<i64>(sizeof(WorkItem))) {}

  // Bytes of the plan; beyond `capacity`, nothing that was written is of use.
  i64 run(const std::vector<Lane>& lanes, const Partition& partition, PlanHeader& header) {
    cut_units().clear();
    ranges().assign(schedule_.num_ctas, CtaItems{});
    Cut begin;
    i32 num_ctas = 0;
    for (size_t l = 0; l < lanes.size(); ++l) {
      const i64 first = items_.count();
      walk(lanes[l], begin, partition.ends[l]);
      begin = partition.ends[l];
      if (items_.count() == first) continue;
      set_ranges(lanes[l], first);
      num_ctas = max_of(num_ctas, lanes[l].first_cta + lanes[l].members);
    }
    const i64 merges_offset = items_offset_ + items_.count() * static_cast<i64>(sizeof(WorkItem));
    const i64 num_merges = merges_of_walk_ * members_;
    const i64 used = merges_offset + num_merges * merge_bytes;
    num_partial_rows_ = rows_of_walk_ * members_;
    header = {num_ctas,
              static_cast<i32>(items_.count()),
              static_cast<i32>(num_merges),
              static_cast<i32>(num_partial_rows_),
              static_cast<i32>(merges_of_walk_),
              static_cast<i32>(items_offset_),
              static_cast<i32>(merges_offset),
              static_cast<i32>(used)};
    if (used > capacity_ || used > max_i32 || num_partial_rows_ > max_i32) return used;
    shift_merges(lanes);
    std::memcpy(bytes_, &header, sizeof(header));
    write_starts(reinterpret_cast<CtaStart*>(bytes_ + sizeof(header)));
    write_merges(reinterpret_cast<MergeItem*>(bytes_ + merges_offset));
    std::memset(bytes_ + used - num_merges * sizeof(u32), 0, num_merges * sizeof(u32));
    return used;
  }

  i64 num_partial_rows() const { return num_partial_rows_; }

 private:
  struct CutUnit {
    Cut at;
    i32 merge;
    i32 partial_row;
    i32 pieces;
  };
  static std::vector<CutUnit>& cut_units() {
    static thread_local std::vector<CutUnit> units;
    return units;
  }
  static std::vector<CtaItems>& ranges() {
    static thread_local std::vector<CtaItems> ranges;
    return ranges;
  }

  // The lane's members take what was put since item `first`.
  void set_ranges(const Lane& lane, i64 first) {
    CtaItems* members = ranges().data() + lane.first_cta;
    const i32 begin = static_cast<i32>(first), end = static_cast<i32>(items_.count());
    for (i32 member = 0; member < lane.members; ++member) {
      const i32 walk = member * lane.heads;
      members[member] = {begin, end, static_cast<u16>(walk * copies_), static_cast<u16>(walk), 0};
    }
  }

  void walk(const Lane& lane, Cut at, const Cut& end) {
    if (at.inside()) {
      const i32 unit_end = visible(at).end;
      const bool stays = at.same_unit(end);
      if (stays && !end.inside()) return;  // an empty lane
      pieces(lane, at, at.token, stays ? end.token : unit_end);
      if (stays) return;
      at = unit_after(at);
    }
    if (at.request < end.request) {
      whole_units(lane, at, units_up_to(at, {at.request, copies_, 0, -1}));
      for (at = {at.request + 1, 0, 0, -1}; at.request < end.request; ++at.request) {
        whole_units(lane, at, copies_ * requests_[at.request].tiles);
      }
    }
    if (at.request < batch_) whole_units(lane, at, units_up_to(at, end));
    if (end.inside()) {
      open_unit(end);
      pieces(lane, end, visible(end).begin, end.token);
    }
  }

  Cut unit_after(const Cut& at) const { return next_unit(at, requests_[at.request].tiles, copies_); }
  i32 units_up_to(const Cut& at, const Cut& end) const {  // of one request
    return (end.copy - at.copy) * requests_[at.request].tiles + end.tile - at.tile;
  }
  TokenRange visible(const Cut& at) const { return model_.visible(requests_[at.request], at.tile); }
  i32 rows_of(const Cut& at) const {
    const i32 rows = requests_[at.request].q_len * static_cast<i32>(model_.group.divisor);
    return min_of(schedule_.tile_q, rows - at.tile * schedule_.tile_q);
  }

  // `count` units of a request: one run, but for units that a fixed split cuts.
  void whole_units(const Lane& lane, const Cut& at, i32 count) {
    if (schedule_.fixed() && requests_[at.request].kv_len > schedule_.fixed_piece_tokens) {
      units_of_fixed_split(lane, at, count);
    } else {
      run_of_units(lane, at, count);
    }
  }

  void units_of_fixed_split(const Lane& lane, Cut at, i32 count) {
    Cut run_begin = at;
    i32 run = 0;
    for (; count > 0; --count) {
      const TokenRange range = visible(at);
      const Cut next = unit_after(at);
      if (range.end <= next_cut(range.begin)) {
        ++run;
      } else {
        run_of_units(lane, run_begin, run);
        open_unit(at);
        pieces(lane, at, range.begin, range.end);
        run_begin = next;
        run = 0;
      }
      at = next;
    }
    run_of_units(lane, run_begin, run);
  }

  void run_of_units(const Lane& lane, const Cut& at, i32 count) {
    if (count <= 0) return;
    const Request& request = requests_[at.request];
    const bool all = count == request.tiles && at.tile == 0;  // a run goes on with the next KV head
    for (i32 head = 0; head < (all ? 1 : lane.heads); ++head) {
      WorkItem& item = put(at, head, 0, request.kv_len);
      item.num_units = count * (all ? lane.heads : 1);
    }
  }

  void open_unit(const Cut& at) {
    cut_units().push_back({at, static_cast<i32>(merges_of_walk_), static_cast<i32>(rows_of_walk_), 0});
    merges_of_walk_ += merge_rows_.div(rows_of(at) + schedule_.merge_rows - 1);
  }

  i32 next_cut(i32 token) const {
    return schedule_.fixed() ? (token / schedule_.fixed_piece_tokens + 1) * schedule_.fixed_piece_tokens
                             : static_cast<i32>(max_i32);
  }

  // Tokens [begin, end) of the unit that was opened last: one piece, or one for each multiple of a fixed split.
  void pieces(const Lane& lane, const Cut& at, i32 begin, i32 end) {
    CutUnit& unit = cut_units().back();
    const i32 rows = rows_of(at);
    for (; begin < end; begin = next_cut(begin)) {
      for (i32 head = 0; head < lane.heads; ++head) {
        WorkItem& item = put(at, head, begin, min_of(end, next_cut(begin)));
        item.partial_row = static_cast<i32>(rows_of_walk_);
        item.piece = unit.pieces;
        item.merge = unit.merge;
      }
      ++unit.pieces;
      rows_of_walk_ += rows;
    }
  }

  WorkItem& put(const Cut& at, i32 head, i32 kv_begin, i32 kv_end) {
    const Request& request = requests_[at.request];
    WorkItem& item = items_.next();
    item.kv_offset = request.kv_offset;
    item.mask_offset = request.mask_offset;
    item.request = at.request;
    item.q_begin = request.q_begin;
    item.q_len = request.q_len;
    item.kv_len = request.kv_len;
    item.first_packed_row = at.tile * schedule_.tile_q;
    item.kv_head = at.copy + head;
    item.num_units = 1;
    item.kv_begin = kv_begin;
    item.kv_end = kv_end;
    item.partial_row = -1;
    item.piece = 0;
    item.merge = -1;
    return item;
  }

  // The partial rows of the n-th walk of the axis begin at n times those of one walk, and so do its merges.
  void shift_merges(const std::vector<Lane>& lanes) {
    const i32 rows = static_cast<i32>(rows_of_walk_), merges = static_cast<i32>(merges_of_walk_);
    for (CtaItems& range : ranges()) range.partial_row = range.walk * rows;
    for (const Lane& lane : lanes) {
      if (lane.heads == 1) continue;
      const CtaItems& range = ranges()[lane.first_cta];
      for (i32 i = range.begin; i < range.end; ++i) {
        WorkItem& item = items_[i];
        if (item.partial_row < 0) continue;
        item.partial_row += item.kv_head * rows;
        item.merge += item.kv_head * merges;
      }
    }
  }

  void write_starts(CtaStart* starts) {
    for (const CtaItems& range : ranges()) {
      CtaStart& start = *starts++;
      start.items = range;
      start.first = range.begin < range.end ? item_of_member(items_[range.begin], range) : WorkItem{};
    }
  }

  void write_merges(MergeItem* merges) const {
    for (const CutUnit& unit : cut_units()) {
      const Cut& at = unit.at;
      const i32 q_begin = requests_[at.request].q_begin, rows = rows_of(at), first_row = at.tile * schedule_.tile_q;
      for (i32 walk = 0; walk < members_; ++walk) {
        const i32 partial_row = unit.partial_row + walk * static_cast<i32>(rows_of_walk_);
        MergeItem* merge = merges + unit.merge + walk * merges_of_walk_;
        for (i32 row = 0; row < rows; row += schedule_.merge_rows) {
          *merge++ = {at.request,
                      q_begin,
                      first_row + row,
                      min_of(schedule_.merge_rows, rows - row),
                      at.copy + walk * copies_,
                      partial_row + row,
                      rows,
                      unit.pieces};
        }
      }
    }
  }

  const CostModel& model_;
  const Schedule& schedule_;
  const Request* requests_;
  i32 batch_;
  i32 copies_;   // of a request on the axis
  i32 members_;  // that walk the axis alike, each for its own KV heads
  FastDiv merge_rows_;
  char* bytes_;
  i64 capacity_;
  i64 items_offset_;
  Output<WorkItem> items_;
  i64 rows_of_walk_ = 0;    // partial rows so far, of one walk of the axis
  i64 merges_of_walk_ = 0;  // so far
  i64 num_partial_rows_ = 0;
};

}  // namespace flashpage::plan
