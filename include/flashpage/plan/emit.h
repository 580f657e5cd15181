// From cuts to the plan's bytes: work items lane by lane, then what must be merged.
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
        num_kv_heads_(num_kv_heads),
        teams_(schedule.walk == Walk::teams),
        bytes_(static_cast<char*>(buffer)),
        capacity_(capacity),
        items_offset_(sizeof(PlanHeader) + schedule.num_ctas * static_cast<i64>(sizeof(CtaItems))),
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
      for (i32 member = 0; member < lanes[l].members; ++member) {
        CtaItems& range = ranges()[lanes[l].first_cta + member];
        range.begin = static_cast<i32>(first);
        range.end = static_cast<i32>(items_.count());
        range.kv_head = member * lanes[l].heads;
      }
      num_ctas = max_of(num_ctas, lanes[l].first_cta + lanes[l].members);
    }
    const i64 merges_offset = items_offset_ + items_.count() * static_cast<i64>(sizeof(WorkItem));
    const i64 num_merges = count_merges(), copies = teams_ ? num_kv_heads_ : 1;
    const i64 used = merges_offset + num_merges * static_cast<i64>(sizeof(MergeItem));
    num_partial_rows_ = rows_of_one_copy_ * copies;
    header = {num_ctas,
              static_cast<i32>(items_.count()),
              static_cast<i32>(num_merges),
              static_cast<i32>(num_partial_rows_),
              static_cast<i32>(sizeof(PlanHeader)),
              static_cast<i32>(items_offset_),
              static_cast<i32>(merges_offset),
              static_cast<i32>(used)};
    if (used > capacity_ || used > max_i32 || num_partial_rows_ > max_i32) return used;
    if (teams_) shift_partials(lanes);
    std::memcpy(bytes_, &header, sizeof(header));
    std::memcpy(bytes_ + sizeof(header), ranges().data(), ranges().size() * sizeof(CtaItems));
    write_merges(reinterpret_cast<MergeItem*>(bytes_ + merges_offset));
    return used;
  }

  i64 num_partial_rows() const { return num_partial_rows_; }

 private:
  struct CutUnit {
    i32 request;
    i32 unit;
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

  void walk(const Lane& lane, Cut at, const Cut& end) {
    if (at.inside()) {
      const i32 unit_end = visible(at).end;
      const bool stays = at.same_unit(end);
      if (stays && !end.inside()) return;  // an empty lane
      pieces(lane, at, at.token, stays ? end.token : unit_end);
      if (stays) return;
      ++at.unit;
    }
    for (; at.request < end.request; ++at.request, at.unit = 0) whole_units(lane, at, units_of(at.request));
    if (at.request < batch_) whole_units(lane, at, end.unit);
    if (end.inside()) {
      open_unit(end);
      pieces(lane, end, visible(end).begin, end.token);
    }
  }

  i32 units_of(i32 request) const { return requests_[request].tiles * (teams_ ? 1 : num_kv_heads_); }
  i32 tile_of(const Cut& at) const { return at.unit % requests_[at.request].tiles; }
  TokenRange visible(const Cut& at) const { return model_.visible(requests_[at.request], tile_of(at)); }
  i32 rows_of(const Cut& at) const {
    const i32 first_row = tile_of(at) * schedule_.tile_q;
    return min_of(schedule_.tile_q, requests_[at.request].q_len * model_.group - first_row);
  }

  // Units [at.unit, end) of a request: one run, but for units that a fixed split cuts.
  void whole_units(const Lane& lane, Cut at, i32 end) {
    if (schedule_.fixed() && requests_[at.request].kv_len > schedule_.fixed_piece_tokens) {
      i32 run_begin = at.unit;
      for (; at.unit < end; ++at.unit) {
        const TokenRange range = visible(at);
        if (range.end <= next_cut(range.begin)) continue;
        run_of_units(lane, {at.request, run_begin, -1}, at.unit);
        open_unit(at);
        pieces(lane, at, range.begin, range.end);
        run_begin = at.unit + 1;
      }
      at.unit = run_begin;
    }
    run_of_units(lane, at, end);
  }

  void run_of_units(const Lane& lane, const Cut& at, i32 end) {
    if (at.unit >= end) return;
    const Request& request = requests_[at.request];
    const bool all = at.unit == 0 && end == request.tiles;  // a run goes on with the next KV head
    for (i32 head = 0; head < (all ? 1 : lane.heads); ++head) {
      WorkItem& item = put(at, head, 0, request.kv_len);
      item.num_units = (end - at.unit) * (all ? lane.heads : 1);
    }
  }

  void open_unit(const Cut& at) {
    cut_units().push_back({at.request, at.unit, static_cast<i32>(rows_of_one_copy_), 0});
  }

  i32 next_cut(i32 token) const {
    return schedule_.fixed() ? (token / schedule_.fixed_piece_tokens + 1) * schedule_.fixed_piece_tokens
                             : static_cast<i32>(max_i32);
  }

  // Tokens [begin, end) of the unit that was opened last: one piece, or one for each multiple of a fixed split.
  void pieces(const Lane& lane, const Cut& at, i32 begin, i32 end) {
    CutUnit& unit = cut_units().back();
    for (; begin < end; begin = next_cut(begin)) {
      for (i32 head = 0; head < lane.heads; ++head) {
        WorkItem& item = put(at, head, begin, min_of(end, next_cut(begin)));
        item.partial_row = static_cast<i32>(rows_of_one_copy_);
        item.piece = unit.pieces;
      }
      ++unit.pieces;
      rows_of_one_copy_ += rows_of(at);
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
    item.first_packed_row = at.unit == 0 ? 0 : tile_of(at) * schedule_.tile_q;
    item.kv_head = at.unit < request.tiles ? head : at.unit / request.tiles;
    item.num_units = 1;
    item.kv_begin = kv_begin;
    item.kv_end = kv_end;
    item.partial_row = -1;
    item.piece = 0;
    item.tile_class = 0;
    return item;
  }

  // Teams: the partial rows of KV head h begin at h times those of one head.
  void shift_partials(const std::vector<Lane>& lanes) {
    const i32 stride = static_cast<i32>(rows_of_one_copy_);
    for (CtaItems& range : ranges()) range.partial_row = range.kv_head * stride;
    for (const Lane& lane : lanes) {
      if (lane.heads == 1) continue;
      const CtaItems& range = ranges()[lane.first_cta];
      for (i32 i = range.begin; i < range.end; ++i) {
        if (items_[i].partial_row >= 0) items_[i].partial_row += items_[i].kv_head * stride;
      }
    }
  }

  i64 count_merges() const {
    i64 count = 0;
    for (const CutUnit& unit : cut_units())
      count += ceil_div(rows_of({unit.request, unit.unit, 0}), schedule_.merge_rows);
    return count * (teams_ ? num_kv_heads_ : 1);
  }

  void write_merges(MergeItem* merge) const {
    for (const CutUnit& unit : cut_units()) {
      const Cut at{unit.request, unit.unit, 0};
      const Request& request = requests_[unit.request];
      const i32 rows = rows_of(at), first_row = tile_of(at) * schedule_.tile_q;
      for (i32 copy = 0; copy < (teams_ ? num_kv_heads_ : 1); ++copy) {
        const i32 partial_row = unit.partial_row + copy * static_cast<i32>(rows_of_one_copy_);
        for (i32 row = 0; row < rows; row += schedule_.merge_rows) {
          *merge++ = {unit.request,
                      request.q_begin,
                      first_row + row,
                      min_of(schedule_.merge_rows, rows - row),
                      teams_ ? copy : unit.unit / request.tiles,
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
  i32 num_kv_heads_;
  bool teams_;
  char* bytes_;
  i64 capacity_;
  i64 items_offset_;
  Output<WorkItem> items_;
  i64 rows_of_one_copy_ = 0;  // partial rows so far (teams: of one KV head)
  i64 num_partial_rows_ = 0;
};

}  // namespace flashpage::plan
