// Units with CTAs of their own. If there are few units, each is cut into equal pieces for neighbouring CTAs, which form
// a group and do nothing else. The CTAs of a group merge their pieces among themselves; a unit of one piece needs no
// merge. The format is that of any other plan: partial rows and merges are there for kernels that merge through them.
#pragma once
#include <optional>
#include <vector>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/filling.h"
#include "flashpage/plan/lanes.h"

namespace flashpage::plan {

// `units`: of the batch, over all KV heads.
inline bool may_have_own_ctas(const Schedule& schedule, i64 units) {
  if (!schedule.balanced() || units == 0) return false;
  for (const i32 count : schedule.clusters) {
    if (units <= count) return true;
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

  // A size of groups, and the time of its launch.
  struct Groups {
    i32 size;  // CTAs; 0: no size is fast enough
    double ns;
  };

  // To be made only if may_have_own_ctas.
  OwnCtas(const CostModel& model, const Schedule& schedule, const Request* requests, i32 batch, i32 num_kv_heads)
      : model_(model),
        schedule_(schedule),
        step_(make_fast_div(max_of(schedule.tile_kv, 1))),
        least_steps_(max_of(1, ceil_div(schedule.cluster_piece_tokens, max_of(schedule.tile_kv, 1)))),
        requests_(requests),
        batch_(batch),
        num_kv_heads_(num_kv_heads) {
    read_units();
  }

  // The size that takes least, if its launch takes less than `ns`.
  Groups better_than(double ns) const {
    Groups best{0, ns};
    for (i32 i = 0; i < num_group_sizes; ++i) {
      if (!fits(i) || least_cost(1 << i) >= best.ns) continue;
      const double mine = cost(1 << i);
      if (mine < best.ns) best = {1 << i, mine};
    }
    return best;
  }

  // No size of groups takes less.
  double least_cost() const {
    double least = 1e300;
    for (i32 i = 0; i < num_group_sizes; ++i) {
      if (fits(i)) least = min_of(least, least_cost(1 << i));
    }
    return least;
  }

  // No plan in waves or of whole units takes less, if its CTAs take `mean` ns on average: the CTA that begins the
  // longest unit takes a piece of it, or all of it. `rounding` allows for sums in another order.
  double least_of_others(const CutRules& rules, double mean) const {
    const i32 tokens = model_.visible(requests_[longest_.request], longest_.tile).size();
    const double ns = model_.price(requests_[longest_.request]).ns;
    const double begun = model_.ns_per_unit + ns * min_of(rules.min_piece, tokens);
    constexpr double rounding = 1.0 - 1e-9;
    const double whole = model_.ns_per_unit + ns * tokens;
    return rounding * min_of(max_of(mean, begun) + schedule_.ns_per_merge, max_of(mean, whole));
  }

  // A lane for each CTA of a group, whether it has a piece or not, and one lane for the CTAs that belong to no group.
  Assignment assign(const Groups& groups, Memory& memory) const {
    const i32 size = groups.size;
    const size_t most_lanes = tiles_ * size + 1;
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
    const Division division{requests_, batch_, {1, 1}, tiles_, memory.lanes.data(), lanes};
    return {division, memory.segments.data(), size, groups.ns, head_ns * num_kv_heads_};
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

  static i32 longest_piece(const Pieces& pieces) {  // tokens
    i32 longest = 0;
    for (i32 p = 0; p < pieces.count(); ++p) longest = max_of(longest, pieces.end(p) - pieces.begin(p));
    return longest;
  }

  // Whether the card runs as many groups of 2^i CTAs at once as there are units.
  bool fits(i32 i) const { return tiles_ * num_kv_heads_ <= schedule_.clusters[i]; }

  // Adds the costs of all units' tokens and finds the longest unit.
  void read_units() {
    double longest = -1.0, ns = 0.0;
    const Request* last = nullptr;  // neighbours often have the same lengths
    each_unit([&](const Request& request, i32 index, i32 tile) {
      const bool is_known = last != nullptr && request.tiles == 1 && request.costs_like(*last);
      if (!is_known) ns = model_.price(request).ns * model_.visible(request, tile).size();
      last = &request;
      all_ns_ += ns;
      ++tiles_;
      if (ns > longest) {
        longest = ns;
        longest_ = {index, 0, tile, -1};
      }
    });
  }

  // The time of the launch. All CTAs read at the same time: at the speed of memory, or at that of the CTA with the
  // longest piece.
  double cost(double longest, bool has_cuts) const {
    const double by_memory = all_ns_ * num_kv_heads_ / schedule_.num_ctas,
                 by_cta = schedule_.full_speed_share * longest;
    const double merge_ns = has_cuts ? schedule_.ns_per_cluster_merge : 0.0;
    return schedule_.ns_per_cluster_unit + max_of(by_memory, by_cta) + merge_ns;
  }

  // A bound of cost(size), by the longest unit alone.
  double least_cost(i32 size) const {
    const Request& request = requests_[longest_.request];
    const Pieces pieces = pieces_of(request, longest_.tile, size);
    return cost(model_.price(request).ns * longest_piece(pieces), pieces.log_count > 0);
  }

  double cost(i32 size) const {
    double longest = 0.0;
    bool has_cuts = false;
    const Request* last = nullptr;  // neighbours often have the same lengths
    for (i32 i = 0; i < batch_; ++i) {
      const Request& request = requests_[i];
      if (last != nullptr && request.costs_like(*last)) continue;
      last = &request;
      const double ns = model_.price(request).ns;
      for (i32 tile = 0; tile < request.tiles; ++tile) {
        const Pieces pieces = pieces_of(request, tile, size);
        has_cuts |= pieces.log_count > 0;
        const i64 most = i64{ceil_div(pieces.steps, pieces.count())} * pieces.step;
        if (ns * most > longest) longest = max_of(longest, ns * longest_piece(pieces));
      }
    }
    return cost(longest, has_cuts);
  }

  const CostModel& model_;
  const Schedule& schedule_;
  FastDiv step_;     // tokens
  i32 least_steps_;  // of a piece
  const Request* requests_;
  i32 batch_;
  i32 num_kv_heads_;
  i64 tiles_ = 0;        // row tiles of all requests
  double all_ns_ = 0.0;  // of all units' tokens, for one KV head
  Cut longest_;          // the start of the longest unit
};

}  // namespace flashpage::plan
