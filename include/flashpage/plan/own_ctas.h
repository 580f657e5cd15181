// Units with CTAs of their own: where there are few, each is cut into equal pieces for neighbouring CTAs, one cluster
// of them, which have nothing else to do. They merge the pieces among themselves, or there is one piece and nothing to
// merge. Read as any other plan: partial rows and merges are there for who merges through them.
#pragma once
#include <cstring>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/work_item.h"

namespace flashpage::plan {

inline constexpr i32 num_cluster_sizes = 5;  // 1, 2, 4, 8, 16 CTAs

struct Clusters {
  i32 resident[num_cluster_sizes];  // clusters of each size that run at once; 0: none of that size may be
  i32 max_rows;                     // packed rows of a unit that a cluster merges
  i32 min_piece_tokens;
  double full_speed_share;      // of the CTAs: with so many the memory is as busy as with all
  double ns_per_cluster_merge;  // what merging in a cluster adds to a launch

  bool any() const {
    for (const i32 count : resident) {
      if (count > 0) return true;
    }
    return false;
  }
};

class OwnCtas {
 public:
  OwnCtas(const CostModel& model, const Schedule& schedule, const Clusters& clusters, const Request* requests,
          i32 batch, i32 num_kv_heads)
      : model_(model),
        schedule_(schedule),
        clusters_(clusters),
        requests_(requests),
        batch_(batch),
        num_kv_heads_(num_kv_heads) {}

  // Whether this is better than what has been found for all CTAs: `ns` of its costliest one, `has_cuts` if it is to
  // merge. `tiles`: row tiles of all requests. Chooses the size of the clusters.
  bool is_better_than(double ns, bool has_cuts, i64 tiles) {
    double least = ns + (has_cuts ? schedule_.ns_per_merge : 0.0);
    bool found = false;
    for (i32 i = 0; i < num_cluster_sizes; ++i) {
      if (tiles == 0 || tiles * num_kv_heads_ > clusters_.resident[i]) continue;
      const i32 size = 1 << i;
      const double mine = cost(size);
      if (mine >= least) continue;
      least = mine;
      size_ = size;
      found = true;
    }
    if (found) count();
    return found;
  }

  PlanHeader header() const {
    return {.num_ctas = static_cast<i32>(units_ * num_kv_heads_ * size_),
            .num_items = items_,
            .num_merges = merges_ * num_kv_heads_,
            .num_partial_rows = partial_rows_ * num_kv_heads_,
            .merges_of_walk = merges_,
            .items_offset = items_offset(),
            .merges_offset = merges_offset(),
            .used_bytes = static_cast<i32>(merges_offset() + merges_ * num_kv_heads_ * merge_bytes),
            .cluster_size = size_,
            .merge_rows = schedule_.merge_rows,
            .unused = {}};
  }
  // Of the costliest CTA, and of all.
  double most_ns() const { return cost(size_); }
  double total_ns() const {
    double one_head = units_ * model_.ns_per_unit + (items_ - units_) * schedule_.ns_per_piece;
    each_unit([&](const Request& request, i32, i32 tile) {
      one_head += model_.price(request).ns * model_.visible(request, tile).size();
    });
    return one_head * num_kv_heads_;
  }

  // `bytes`: as many as the header says.
  void write(void* bytes) const {
    char* const to = static_cast<char*>(bytes);
    const PlanHeader made = header();
    std::memcpy(to, &made, sizeof(made));
    std::memset(to + sizeof(made), 0, schedule_.num_ctas * sizeof(CtaStart));
    const Written written{reinterpret_cast<CtaStart*>(to + sizeof(made)),
                          reinterpret_cast<WorkItem*>(to + items_offset()),
                          reinterpret_cast<MergeItem*>(to + merges_offset())};
    std::memset(static_cast<void*>(written.merges + made.num_merges), 0, made.num_merges * sizeof(u32));
    Counts at;
    each_unit([&](const Request& request, i32 index, i32 tile) { write_unit(request, index, tile, written, at); });
  }

 private:
  struct Written {
    CtaStart* starts;
    WorkItem* items;
    MergeItem* merges;
  };
  struct Counts {
    i32 units = 0, items = 0, merges = 0, partial_rows = 0;
  };

  // body(request, its index, row tile), of one KV head.
  template <class Body>
  void each_unit(Body&& body) const {
    for (i32 i = 0; i < batch_; ++i) {
      for (i32 tile = 0; tile < requests_[i].tiles; ++tile) body(requests_[i], i, tile);
    }
  }

  i32 rows_of(const Request& request, i32 tile) const {
    const i32 rows = request.q_len * static_cast<i32>(model_.group.divisor);
    return min_of(schedule_.tile_q, rows - tile * schedule_.tile_q);
  }

  // Equal pieces of a unit: whole steps of the tile.
  struct Pieces {
    TokenRange range;
    i32 step;        // tokens
    i32 first_step;  // where the range begins
    i32 steps;
    i32 count;  // a power of two

    i32 begin(i32 piece) const {
      return piece == 0 ? range.begin : (first_step + static_cast<i32>(static_cast<i64>(steps) * piece / count)) * step;
    }
    i32 end(i32 piece) const { return piece + 1 == count ? range.end : begin(piece + 1); }
  };

  Pieces pieces_of(const Request& request, i32 tile, i32 size) const {
    const TokenRange range = model_.visible(request, tile);
    const i32 step = max_of(schedule_.tile_kv, 1), first_step = range.begin / step;
    const i32 steps = range.size() > 0 ? ceil_div(range.end, step) - first_step : 0;
    const i32 least_steps = max_of(1, ceil_div(clusters_.min_piece_tokens, step));
    i32 count = 1;
    while (2 * count <= size && 2 * count * least_steps <= steps) count *= 2;
    return {range, step, first_step, steps, rows_of(request, tile) <= clusters_.max_rows ? count : 1};
  }

  // All CTAs read side by side: at the speed of memory, or at that of the CTA with the longest piece.
  double cost(i32 size) const {
    double longest = 0.0, all = 0.0;
    bool has_cuts = false;
    each_unit([&](const Request& request, i32, i32 tile) {
      const Pieces pieces = pieces_of(request, tile, size);
      const double ns = model_.price(request).ns;
      all += ns * pieces.range.size();
      has_cuts |= pieces.count > 1;
      for (i32 p = 0; p < pieces.count; ++p) longest = max_of(longest, ns * (pieces.end(p) - pieces.begin(p)));
    });
    const double by_memory = all * num_kv_heads_ / schedule_.num_ctas, by_cta = clusters_.full_speed_share * longest;
    return model_.ns_per_unit + max_of(by_memory, by_cta) + (has_cuts ? clusters_.ns_per_cluster_merge : 0.0);
  }

  void count() {
    units_ = items_ = merges_ = partial_rows_ = 0;
    each_unit([&](const Request& request, i32, i32 tile) {
      const i32 pieces = pieces_of(request, tile, size_).count, rows = rows_of(request, tile);
      units_ += 1;
      items_ += pieces;
      if (pieces == 1) return;
      merges_ += ceil_div(rows, schedule_.merge_rows);
      partial_rows_ += pieces * rows;
    });
  }

  i32 items_offset() const { return static_cast<i32>(sizeof(PlanHeader) + schedule_.num_ctas * sizeof(CtaStart)); }
  i32 merges_offset() const { return items_offset() + items_ * static_cast<i32>(sizeof(WorkItem)); }

  void write_unit(const Request& request, i32 index, i32 tile, const Written& to, Counts& at) const {
    const Pieces pieces = pieces_of(request, tile, size_);
    const i32 rows = rows_of(request, tile);
    const bool is_cut = pieces.count > 1;
    for (i32 piece = 0; piece < pieces.count; ++piece) {
      WorkItem& item = to.items[at.items + piece];
      item = {.kv_offset = request.kv_offset,
              .mask_offset = request.mask_offset,
              .request = index,
              .q_begin = request.q_begin,
              .q_len = request.q_len,
              .kv_len = request.kv_len,
              .first_packed_row = tile * schedule_.tile_q,
              .kv_head = 0,
              .num_units = 1,
              .kv_begin = is_cut ? pieces.begin(piece) : 0,
              .kv_end = is_cut ? pieces.end(piece) : request.kv_len,
              .partial_row = is_cut ? at.partial_rows + piece * rows : -1,
              .piece = piece,
              .merge = is_cut ? at.merges : -1};
      for (i32 head = 0; head < num_kv_heads_; ++head) {
        CtaStart& start = to.starts[(at.units * num_kv_heads_ + head) * size_ + piece];
        const i32 begin = at.items + piece;
        start.items = {begin, begin + 1, static_cast<u16>(head), static_cast<u16>(head), head * partial_rows_};
        start.first = item_of_member(item, start.items);
      }
    }
    at.units += 1;
    at.items += pieces.count;
    if (!is_cut) return;
    for (i32 head = 0; head < num_kv_heads_; ++head) write_merges(request, index, tile, head, pieces.count, to, at);
    at.merges += ceil_div(rows, schedule_.merge_rows);
    at.partial_rows += pieces.count * rows;
  }

  void write_merges(const Request& request, i32 index, i32 tile, i32 head, i32 pieces, const Written& to,
                    const Counts& at) const {
    const i32 rows = rows_of(request, tile), first_row = tile * schedule_.tile_q;
    MergeItem* merge = to.merges + head * merges_ + at.merges;
    for (i32 row = 0; row < rows; row += schedule_.merge_rows) {
      *merge++ = {.request = index,
                  .q_begin = request.q_begin,
                  .first_packed_row = first_row + row,
                  .num_rows = min_of(schedule_.merge_rows, rows - row),
                  .kv_head = head,
                  .partial_row = head * partial_rows_ + at.partial_rows + row,
                  .partial_stride = rows,
                  .num_partials = pieces};
    }
  }

  const CostModel& model_;
  const Schedule& schedule_;
  const Clusters& clusters_;
  const Request* requests_;
  i32 batch_;
  i32 num_kv_heads_;
  i32 size_ = 1;   // CTAs of a unit
  i32 units_ = 0;  // of one KV head, like what follows
  i32 items_ = 0;
  i32 merges_ = 0;
  i32 partial_rows_ = 0;
};

}  // namespace flashpage::plan
