// Units with CTAs of their own. If there are few units, each is cut into equal pieces for neighbouring CTAs, which form
// a group and do nothing else. The CTAs of a group merge their pieces among themselves; a unit of one piece needs no
// merge. The format is that of any other plan: partial rows and merges are there for kernels that merge through them.
#pragma once
#include <optional>
#include <vector>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

FP_HOST_DEVICE bool may_have_own_ctas(const Schedule& schedule) {
  if (!schedule.balanced()) return false;
  for (const i32 count : schedule.clusters) {
    if (count > 0) return true;
  }
  return false;
}

class OwnCtas {
 public:
  // Memory kept from plan to plan; each lane has one segment.
  struct Memory {
    std::vector<Lane> lanes;
    std::vector<Segment> segments;
  };

  OwnCtas(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 num_kv_heads)
      : model_(model),
        schedule_(schedule),
        step_(make_fast_div(max_of(schedule.tile_kv, 1))),
        least_steps_(max_of(1, ceil_div(schedule.cluster_piece_tokens, max_of(schedule.tile_kv, 1)))),
        requests_(requests),
        batch_(batch),
        num_kv_heads_(num_kv_heads) {}

  // The assignment with the group size that takes least, if the launch takes less than `ns`. `tiles`: row tiles of all
  // requests.
  std::optional<Assignment> better_than(double ns, i64 tiles, Memory& memory) const {
    i32 best = 0;
    for (i32 i = 0; i < num_group_sizes; ++i) {
      if (tiles == 0 || tiles * num_kv_heads_ > schedule_.clusters[i]) continue;
      const double mine = cost(1 << i);
      if (mine >= ns) continue;
      ns = mine;
      best = 1 << i;
    }
    if (best == 0) return {};
    return assign(best, ns, tiles, memory);
  }

 private:
  // Calls body(request, its index, row tile) for every row tile.
  template <class Body>
  void each_unit(Body&& body) const {
    for (i32 i = 0; i < batch_; ++i) {
      for (i32 tile = 0; tile < requests_[i].tiles; ++tile) body(requests_[i], i, tile);
    }
  }

  // A unit cut into equal pieces, which are whole KV tiles. Their number is a power of two, so that places of pieces
  // are shifts in place of divisions.
  struct Pieces {
    TokenRange range;
    i32 step;        // tokens
    i32 first_step;  // the step in which the range begins
    i32 steps;
    i32 log_count;

    i32 count() const { return 1 << log_count; }
    i32 begin(i32 piece) const {
      return piece == 0 ? range.begin
                        : (first_step + static_cast<i32>(static_cast<i64>(steps) * piece >> log_count)) * step;
    }
    i32 end(i32 piece) const { return piece + 1 == count() ? range.end : begin(piece + 1); }
  };

  Pieces pieces_of(const Request& request, i32 tile, i32 size) const {
    const TokenRange range = model_.visible(request, tile);
    const i32 step = static_cast<i32>(step_.divisor), first_step = static_cast<i32>(step_.div(range.begin));
    const i32 steps = range.size() > 0 ? static_cast<i32>(step_.div(range.end - 1)) + 1 - first_step : 0;
    const i32 rows = request.q_len * static_cast<i32>(model_.group.divisor) - tile * schedule_.tile_q;
    const bool may_cut = min_of(schedule_.tile_q, rows) <= schedule_.cluster_rows;
    i32 log_count = 0;
    while (may_cut && 2 << log_count <= size && static_cast<i64>(least_steps_) << (log_count + 1) <= steps) ++log_count;
    return {range, step, first_step, steps, log_count};
  }

  // A lane for each CTA of a group, whether it has a piece or not, and one lane for the CTAs that belong to no group.
  Assignment assign(i32 size, double most_ns, i64 tiles, Memory& memory) const {
    const size_t most_lanes = tiles * size + 1;
    if (memory.lanes.size() < most_lanes) {
      memory.lanes.resize(most_lanes);
      memory.segments.resize(most_lanes);
    }
    i32 first_cta = 0, count = 0;
    double head_ns = 0.0;
    each_unit([&](const Request& request, i32 index, i32 tile) {
      const Pieces pieces = pieces_of(request, tile, size);
      Cut at{index, 0, tile, -1};
      for (i32 piece = 0; piece < size; ++piece, ++count) {
        Cut end = at;
        if (piece + 1 < pieces.count()) end = {index, 0, tile, pieces.end(piece)};
        if (piece + 1 == pieces.count()) end = next_unit(at, request.tiles, 1);
        memory.lanes[count] = {first_cta + piece, num_kv_heads_, size, 1, count, 1, 1.0, 0.0};
        memory.segments[count] = {at, end};
        at = end;
      }
      first_cta += num_kv_heads_ * size;
      head_ns += pieces.count() == 1 ? model_.unit_ns(request, tile)
                                     : model_.ns_per_unit + model_.price(request).ns * pieces.range.size();
      head_ns += (pieces.count() - 1) * static_cast<double>(schedule_.ns_per_piece);
    });
    memory.lanes[count] = {first_cta, schedule_.num_ctas - first_cta, 1, 1, count, 1, 1.0, 0.0};
    memory.segments[count++] = {};
    const Lanes lanes{
        .count = count, .num_small = 0, .ctas = num_kv_heads_, .waves = 1, .fewest_heads = 1, .weight = 1.0};
    const Division division{requests_, batch_, {1, 1}, tiles, memory.lanes.data(), lanes};
    return {division, memory.segments.data(), size, most_ns, head_ns * num_kv_heads_};
  }

  // The time of the launch. All CTAs read at the same time: at the speed of memory, or at that of the CTA with the
  // longest piece.
  double cost(i32 size) const {
    double longest = 0.0, all = 0.0;
    bool has_cuts = false;
    each_unit([&](const Request& request, i32, i32 tile) {
      const Pieces pieces = pieces_of(request, tile, size);
      const double ns = model_.price(request).ns;
      all += ns * pieces.range.size();
      has_cuts |= pieces.log_count > 0;
      for (i32 p = 0; p < pieces.count(); ++p) longest = max_of(longest, ns * (pieces.end(p) - pieces.begin(p)));
    });
    const double by_memory = all * num_kv_heads_ / schedule_.num_ctas, by_cta = schedule_.full_speed_share * longest;
    const double merge_ns = has_cuts ? schedule_.ns_per_cluster_merge : 0.0;
    return schedule_.ns_per_cluster_unit + max_of(by_memory, by_cta) + merge_ns;
  }

  const CostModel& model_;
  const Schedule& schedule_;
  FastDiv step_;     // tokens
  i32 least_steps_;  // of a piece
  const Request* requests_;
  i32 batch_;
  i32 num_kv_heads_;
};

}  // namespace flashpage::plan
