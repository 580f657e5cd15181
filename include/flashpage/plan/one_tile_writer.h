// Writes the lanes of a decode batch on the host. A mispredicted branch takes longer than the writes that it skips, so
// each item that a lane may have is written, and counted only if the lane has it; the next item overwrites it
// otherwise.
#pragma once
#include "flashpage/plan/writer.h"

namespace flashpage::plan {

class OneTileWriter : public Writer {
 public:
  using Writer::Writer;

  // Adds all full lanes to the totals of the small ones and writes their items, as add_lane<Items::all> does, if no
  // request has more than one row tile, no KV head lies on the axis and each lane has one segment. `memory.units` has
  // room for one more unit.
  void add_full_lanes(Totals& totals) const {
    const i32 count = assignment_.division.lanes.count;
    Totals to = totals;
    for (i32 l = assignment_.division.lanes.num_small; l < count; ++l) {
      memory_.before[l] = to;
      const Segment& segment = assignment_.segments[lane_[l].first_segment];
      const bool resumes = segment.begin.inside();
      const bool stays = resumes & (segment.begin.request == segment.end.request);
      if (segment.begin.request < batch_) resume_unit(segment, resumes, stays, to);
      for (i32 i = segment.begin.request + (resumes & !stays); i < segment.end.request; ++i) {
        const Request& request = requests_[i];
        items_[to.items] = item_of({i, 0, 0, -1}, 0, {request.kv_begin, request.kv_len});
        to.items += request.tiles;
      }
      if (segment.end.request < batch_) begin_unit(segment.end, segment.end.inside() & !stays, to);
    }
    totals = to;
  }

 private:
  // A piece of the unit in which the lane begins, and the unit's record, if it ends here.
  FP_HOT void resume_unit(const Segment& segment, bool resumes, bool stays, Totals& to) const {
    const Cut begin = segment.begin;
    const i32 rows = rows_of(begin), end = stays ? segment.end.token : requests_[begin.request].kv_len;
    const i64 merge = to.merges - merges_of(rows);
    put_piece(begin, {begin.token, end}, to, to.pieces, merge);
    to.items += resumes;
    to.pieces += resumes;
    to.partial_rows += resumes ? rows : 0;
    memory_.units[to.units - (resumes & !stays)] = {begin, static_cast<i32>(merge),
                                                    static_cast<i32>(to.partial_rows - to.pieces * rows),
                                                    static_cast<i32>(to.pieces)};
  }

  // The first piece of the unit in which the lane ends.
  FP_HOT void begin_unit(const Cut& end, bool cuts, Totals& to) const {
    const i32 rows = rows_of(end);
    put_piece(end, {visible(end).begin, end.token}, to, 0, to.merges);
    to.items += cuts;
    to.units += cuts;
    to.merges += cuts ? merges_of(rows) : 0;
    to.pieces = cuts ? 1 : to.pieces;
    to.partial_rows += cuts ? rows : 0;
  }

  FP_HOT void put_piece(const Cut& at, const TokenRange& tokens, const Totals& to, i64 piece, i64 merge) const {
    WorkItem& item = items_[to.items];
    item = item_of(at, 0, tokens);
    item.partial_row = static_cast<i32>(to.partial_rows);
    item.piece = static_cast<i32>(piece);
    item.merge = static_cast<i32>(merge);
  }
};

}  // namespace flashpage::plan
