// Division of an axis of one wave without heads: each lane ends near its share of the axis. Where one lane ends does
// not depend on where another does, so that any number of threads find all ends at the same time.
//
// There are two candidates. In one, lanes end at the nearest edges of units. In the other, they end inside units unless
// an edge is near, and the lanes between two such edges share what lies between them evenly. The one whose costliest
// CTA takes less is the result, with the cost of merging if units are cut.
#pragma once
#include "flashpage/plan/partition.h"
#include "flashpage/plan/threads.h"

namespace flashpage::plan {

FP_HOST_DEVICE bool has_even_cuts(const Schedule& schedule) { return !schedule.heads_on_axis; }

// A bit for each of 32 lanes that end at a unit's edge.
FP_HOST_DEVICE i32 words_of_lanes(i32 lanes) { return ceil_div(lanes, 32); }

class EvenCuts {
 public:
  static constexpr i32 parts = 16;  // of the lanes, for the search of the costliest CTA

  // Where the lanes end, and how far from the axis' beginning that is in ns.
  struct Ends {
    Cut* cut;    // [lanes]
    double* at;  // [lanes]

    FP_HOST_DEVICE double begin_at(i32 lane) const { return lane == 0 ? 0.0 : at[lane - 1]; }
    FP_HOST_DEVICE void put(i32 lane, const Cut& end, double ns) const {
      cut[lane] = end;
      at[lane] = ns;
    }
    FP_HOST_DEVICE bool begins_inside(i32 lane) const { return lane > 0 && cut[lane - 1].inside(); }
  };
  struct Memory {
    Ends whole;     // ends at the nearest edges
    Ends cut;       // ends that may be inside units
    u32* edges;     // [words_of_lanes], which of `cut` are edges
    double* loads;  // [2 * parts], costliest CTAs of some lanes for either candidate
  };

  FP_HOST_DEVICE EvenCuts(const CostModel& model, const CutRules& rules, double ns_per_merge, const Division& division)
      : model_(model),
        rules_(rules),
        requests_(division.requests),
        batch_(division.batch),
        lane_(division.lane),
        lanes_(division.lanes),
        ns_per_merge_(ns_per_merge),
        per_piece_(rules.ns_per_piece),
        total_(division.requests[division.batch].cost) {
    // A CTA of several heads takes each piece several times, and has none if its share is near a shortest piece.
    const double cheapest = per_piece_ + product(rules.min_piece, model.many_rows.ns);
    const double least = per_piece_ + product(2.0 * rules.min_piece, model.many_rows.ns);
    FP_ROLLED
    while (first_ < lanes_.num_small && product(full_level(), lane_[first_].weight) < least) ++first_;
    least_weight_ = first_ < lanes_.num_small ? lane_[first_].weight : 1.0;
    level_ = product(total_, lane_[first_].per_weight_left);
    // Few units have lanes of their own: two ends to a unit of mean cost.
    const double units = static_cast<double>(max_of<i64>(division.units_on_axis, 1));
    has_few_units_ = 2.0 * units < lanes_.weight;
    whole_level_ = has_few_units_ ? 0.5 * total_ / units : product(total_, lane_[0].per_weight_left);
    if (level_ < cheapest) {  // most ends will be inside units
      level_ = max_of(full_level(), cheapest);
      per_end_ = per_piece_;
    }
  }

  // All of it. `Threads` as in threads.h.
  template <class Threads>
  FP_HOST_DEVICE Partition run(const Threads& threads, const Memory& memory) const {
    const i32 count = lanes_.count;
    // Where a search begins: one thread alone knows the end before.
    const auto from = [](const Ends& ends, i32 lane) {
      return Threads::count > 1 || lane == 0 ? 0 : max_of(0, ends.cut[lane - 1].request - 1);
    };
    const Ends whole_ends = memory.whole, cut_ends = memory.cut;
    u32* const edges = memory.edges;
    double* const loads = memory.loads;
    for_both(
        threads, [&](i32 lane) { end_near_share(lane, cut_ends, from(cut_ends, lane)); },
        [&](i32 lane) { end_whole(lane, whole_ends, from(whole_ends, lane)); });
    each(threads, words_of_lanes(count), [&](i32 word) { edges[word] = edges_of(word, cut_ends); });
    for_both(
        threads, [&](i32 lane) { even_out(lane, memory); },
        [&](i32 lane) { even_whole(lane, whole_ends, from(whole_ends, lane)); });
    each(threads, 2 * parts, [&](i32 i) { loads[i] = most_of(i % parts, i < parts ? whole_ends : cut_ends); });
    Partition found{cut_ends.cut, Cut{}};
    double whole = 0.0;
    for (i32 part = 0; part < parts; ++part) {
      whole = max_of(whole, loads[part]);
      found.max = max_of(found.max, loads[parts + part]);
    }
    if (whole > found.max + ns_per_merge_) return found;
    found.ends = whole_ends.cut;
    found.max = whole;
    return found;
  }

  // The mean load of a CTA, and the cuts inside a unit.
  FP_HOST_DEVICE void count(Partition& partition) const {
    for (i32 lane = 0; lane < lanes_.count; ++lane) partition.inside += partition.ends[lane].inside();
    partition.mean = product(total_ + product(partition.inside, per_piece_), 1.0 / lanes_.weight);
  }

 private:
  static constexpr double tolerance = 0.005;  // fraction of a load that is not worth a cut

  struct End {
    Cut cut;
    double at;
  };
  struct Unit {
    Cut cut;
    double begin, end;  // ns
  };

  // The load of a full lane if all lanes but the first one begin inside units.
  FP_HOST_DEVICE double full_level() const {
    return product(total_ + product(per_piece_, lanes_.count - 1 - first_), lane_[first_].per_weight_left);
  }
  FP_HOST_DEVICE End axis_end() const { return {{batch_, 0, 0, -1}, total_}; }
  // Sums of the weights of a lane and all later ones, without lanes that have no share.
  FP_HOST_DEVICE double weight_from(i32 lane) const {
    return lane >= lanes_.count ? 0.0 : lane_[max_of(lane, first_)].weight_left;
  }
  // Calls one body or the other for every lane, each with half of the threads; ends with a barrier.
  template <class Threads, class One, class Other>
  FP_HOST_DEVICE void for_both(const Threads& threads, One&& one, Other&& other) const {
    constexpr i32 half = Threads::count / 2;
    threads.phase([&](i32 thread) {
      if constexpr (half == 0) {
        for (i32 lane = 0; lane < lanes_.count; ++lane) one(lane), other(lane);
      } else if (thread < half) {
        FP_ROLLED
        for (i32 lane = thread; lane < lanes_.count; lane += half) one(lane);
      } else {
        FP_ROLLED
        for (i32 lane = thread - half; lane < lanes_.count; lane += half) other(lane);
      }
    });
  }

  FP_HOST_DEVICE void end_near_share(i32 lane, const Ends& ends, i32 from) const {
    End end{{}, 0.0};
    if (lane + 1 == lanes_.count) {
      end = axis_end();
    } else if (lane >= first_) {
      const double weight = weight_from(first_) - weight_from(lane + 1);
      const double goal = product(level_, weight) - product(per_end_, lane - first_);
      end = near(goal, product(level_, least_weight_) - per_end_, 0.5 * per_piece_, from);
    }
    ends.put(lane, end.cut, end.at);
  }

  // Lanes of several heads end at the edge before their share, or have none if there are few units. Full lanes then
  // wait for even_whole.
  FP_HOST_DEVICE void end_whole(i32 lane, const Ends& ends, i32 from) const {
    const i32 small = lanes_.num_small;
    End end{{}, 0.0};
    if (lane + 1 == lanes_.count) {
      end = axis_end();
    } else if (lane < small && !has_few_units_) {
      const Unit unit = unit_at(product(whole_level_, lane_[0].weight_left - lane_[lane + 1].weight_left), from);
      end = {unit.cut, unit.begin};
    } else if (lane >= small && (small == 0 || has_few_units_)) {
      end = edge_near(product(whole_level_, lane + 1 - small), from);
    }
    ends.put(lane, end.cut, end.at);
  }

  // The full lanes share evenly what those of several heads leave.
  FP_HOST_DEVICE void even_whole(i32 lane, const Ends& ends, i32 from) const {
    const i32 small = lanes_.num_small;
    if (small == 0 || has_few_units_ || lane < small || lane + 1 == lanes_.count) return;
    const double begin = ends.at[small - 1];
    const double share = product(total_ - begin, lane_[small].per_weight_left);
    const End end = edge_near(begin + product(share, lane + 1 - small), from);
    ends.put(lane, end.cut, end.at);
  }

  FP_HOST_DEVICE u32 edges_of(i32 word, const Ends& ends) const {
    const i32 left = min_of(32, lanes_.count - 32 * word);
    u32 inside = 0;
    for (i32 bit = 0; bit < left; ++bit) inside |= static_cast<u32>(ends.cut[32 * word + bit].inside()) << bit;
    return ~inside;
  }

  // Moves an end inside a unit, so that the lanes between the nearest edges before and after it have equal loads, with
  // the costs of their pieces.
  FP_HOST_DEVICE void even_out(i32 lane, const Memory& memory) const {
    const Ends& ends = memory.cut;
    if (!ends.cut[lane].inside()) return;
    const i32 first = edge_before(memory.edges, lane) + 1, last = edge_after(memory.edges, lane);
    const double begin = ends.begin_at(first), end = ends.at[last];
    const double weight = weight_from(first) - weight_from(last + 1);
    const double level = (end - begin + product(per_piece_, last - first)) / weight;
    const double spacing = product(level, least_weight_) - per_piece_;
    if (spacing <= 0.0) return;
    const double goal =
        begin + product(level, weight_from(first) - weight_from(lane + 1)) - product(per_piece_, lane - first);
    const End found = near(max_of(begin, min_of(end, goal)), spacing, product(tolerance, level),
                           max_of(0, ends.cut[lane].request - 1));
    ends.put(lane, found.cut, found.at);
  }

  // The last lane before `lane`, or the first one after it, that ends at an edge. -1: none before; the last lane of all
  // ends at one.
  FP_HOST_DEVICE static i32 edge_before(const u32* edges, i32 lane) {
    i32 word = lane / 32;
    u32 bits = edges[word] & ((1u << lane % 32) - 1);
    while (bits == 0 && word > 0) bits = edges[--word];
    return bits == 0 ? -1 : 32 * word + highest_bit(bits);
  }
  FP_HOST_DEVICE static i32 edge_after(const u32* edges, i32 lane) {
    i32 word = lane / 32;
    u32 bits = edges[word] & ~((2u << lane % 32) - 1);
    while (bits == 0) bits = edges[++word];
    return 32 * word + lowest_bit(bits);
  }

  // The load of the costliest CTA among every 16th lane.
  FP_HOST_DEVICE double most_of(i32 part, const Ends& ends) const {
    double most = 0.0;
    for (i32 lane = part; lane < lanes_.count; lane += parts) {
      const double taken = ends.at[lane] - ends.begin_at(lane);
      const double load = taken + (ends.begins_inside(lane) ? per_piece_ : 0.0);
      if (taken > 0.0) most = max_of(most, product(load, lane_[lane].heads));
    }
    return most;
  }

  FP_ONCE Unit unit_at(double goal, i32 from) const {
    if (requests_[from].cost > goal) from = 0;
    const i32 index = OneSearcher{}.request_at(requests_, batch_, from, goal);
    const Request request = requests_[index];  // one copy, so that nothing below waits for memory
    const double end = requests_[index + 1].cost;
    if (request.tiles <= 1) return {{index, 0, 0, -1}, request.cost, end};
    const TileCosts::Found found = TileCosts(model_, request).tile_at(goal - request.cost, 0);
    const bool is_last = found.tile + 1 == request.tiles;
    return {{index, 0, found.tile, -1}, request.cost + found.begin, is_last ? end : request.cost + found.end};
  }

  // Halfway through a unit it is the end.
  FP_ONCE End edge_near(double goal, i32 from) const {
    if (goal >= total_) return axis_end();
    const Unit unit = unit_at(goal, from);
    if (unit.end - goal > goal - unit.begin) return {unit.cut, unit.begin};
    return {next_unit(unit.cut, requests_[unit.cut.request].tiles, 1), unit.end};
  }

  // The end that is nearest to `goal`: at an edge that is not farther than `enough`, or if no piece may end near it.
  // `spacing`: ns from one end to the next, at least. `from`: the request with which the search begins.
  FP_ONCE End near(double goal, double spacing, double enough, i32 from) const {
    if (goal >= total_) return axis_end();
    const Unit unit = unit_at(goal, from);
    const Request& request = requests_[unit.cut.request];
    const End before{unit.cut, unit.begin}, after{next_unit(unit.cut, request.tiles, 1), unit.end};
    const double below = goal - before.at, above = after.at - goal;
    const End& edge = above < below ? after : before;
    if (!rules_.cuttable || min_of(below, above) <= enough) return edge;
    const TokenRange range = model_.visible(request, unit.cut.tile);
    const i32 size = range.size(), shortest = rules_.shortest(size), step = rules_.step.divisor;
    if (size / 2 < shortest) return edge;
    const i32 first = rules_.down_to_step(range.begin + shortest + step - 1),
              last = rules_.down_to_step(range.end - shortest);
    if (first > last) return edge;

    const TokenPrice& price = model_.price(request);
    const double token_0 = unit.begin + model_.ns_per_unit - product(range.begin, price.ns);
    const double wanted = min_of<double>(max_of<double>((goal - token_0) * price.per_ns, range.begin), range.end);
    const double from_begin = wanted - range.begin, to_end = range.end - wanted;
    const double apart = spacing * price.per_ns, most_rounded = 1.5 * step;
    i32 token = rules_.down_to_step(static_cast<i32>(wanted) + step / 2);
    const bool may_move = apart >= shortest + most_rounded && (last - first >= shortest || apart >= size);
    if (shortest <= step || may_move) {
      // The end after one that moves from an edge to the shortest piece must not be too near to it.
      const double too_near = shortest > step ? shortest + most_rounded - apart : 0.0;
      const double most_before = first - range.begin, most_after = range.end - last;
      if (token < first && from_begin < max_of(0.5 * most_before, most_before + too_near)) return before;
      if (token > last && to_end < max_of(0.5 * most_after, most_after + too_near)) return after;
    } else {
      // Ends could be too near to each other. They are multiples of pieces of one size, of which no lane has two.
      const double fitting = min_of<double>(size / (shortest + step), max_of(2.0, size / max_of(apart, 1.0)));
      const i32 pieces = max_of(1, static_cast<i32>(fitting));
      const i32 place = static_cast<i32>(from_begin * pieces / size + 0.5);
      if (place == 0) return before;
      if (place >= pieces) return after;
      token = rules_.down_to_step(range.begin + static_cast<i32>(static_cast<i64>(size) * place / pieces) + step / 2);
    }
    token = max_of(first, min_of(last, token));
    return {{unit.cut.request, 0, unit.cut.tile, token}, token_0 + product(token, price.ns)};
  }

  const CostModel& model_;
  const CutRules& rules_;
  const Request* requests_;
  i32 batch_;
  const Lane* lane_;
  Lanes lanes_;
  double ns_per_merge_;
  double per_piece_;
  double total_;
  i32 first_ = 0;        // the first lane that has a share
  double least_weight_;  // of the lanes from it on
  // Loads of full lanes with cuts, and with whole units. `per_end_`: what each lane that begins inside a unit takes
  // less of the axis.
  double level_, whole_level_, per_end_ = 0.0;
  bool has_few_units_;
};

}  // namespace flashpage::plan
