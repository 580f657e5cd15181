// The tokens that a row tile sees, and its cost. The cost of a request's first r row tiles has a closed form: under
// causal and window both ends of a tile's token range are clamped linear functions of the tile, and so the sums are
// closed too.
//
// The planner of a card, where many threads add, and the host's planner compute the same bits: sums of costs are exact
// in any order, and products are rounded before something is added to them.
#pragma once
#include "flashpage/plan/lengths.h"
#include "flashpage/plan/schedule.h"
#include "flashpage/plan/visible.h"

namespace flashpage::plan {

// Prices, and the costs that they are compared with, are whole ticks of 2^-20 ns: a double holds every whole tick below
// 8 s, so sums do not depend on their order and can be integers (one_tile_lanes.h). A float of 8 ns or more is a whole
// number of ticks already.
inline constexpr double ticks_per_ns = 1 << 20;

// The nearest whole tick of less than 2 s; coarser beyond. Next to `large`, 1.5 * 2^52 ticks, a double has no bit below
// a tick, so the addition rounds and the subtraction is exact.
FP_HOST_DEVICE double whole_ticks(double ns) {
  constexpr double large = 3.0 * (1ll << 51) / ticks_per_ns;
  return ns + large - large;
}

// The price of a token, the same for all units of a request.
struct TokenPrice {
  TokenPrice() = default;
  explicit TokenPrice(double exact) : ns(whole_ticks(exact)), per_ns(ns > 0.0 ? 1.0 / ns : 0.0) {}

  double ns;      // ns of a token
  double per_ns;  // tokens in a ns; 0 if they cost nothing
};

struct CostModel {
  CostModel() = default;
  CostModel(const Heads& heads, const Schedule& schedule)
      : visibility(heads.visibility),
        group(make_fast_div(heads.group())),
        tile_q(schedule.tile_q),
        most_few_rows(flashpage::plan::most_few_rows(heads.group(), schedule.tile_q)),
        rows_per_tile(static_cast<double>(schedule.tile_q) / heads.group()),
        tiles_per_row(1.0 / rows_per_tile),
        rounding(0.5 *
                 (1.0 - static_cast<double>(greatest_common_divisor(heads.group(), schedule.tile_q)) / heads.group())),
        ns_per_unit(whole_ticks(schedule.ns_per_unit)),
        least_ns_of_unit(whole_ticks(schedule.least_ns_of_unit)),
        many_rows(schedule.ns_per_token + piece_of_token(schedule)),
        few_rows(product(schedule.few_rows_cost, schedule.ns_per_token) + piece_of_token(schedule)) {}

  FP_HOST_DEVICE const TokenPrice& price(const Request& request) const {
    return has_few_rows(request.q_len, most_few_rows) ? few_rows : many_rows;
  }

  // The tokens that any row of this row tile sees.
  FP_HOST_DEVICE TokenRange visible(const Request& request, i32 tile) const {
    const i32 kv_len = request.kv_len, shift = kv_len - request.q_len;
    const u32 first_packed_row = static_cast<u32>(tile) * tile_q;
    const i32 first = shift + static_cast<i32>(group.div(first_packed_row));
    i32 end = kv_len;
    if (tile + 1 < request.tiles) {  // the last row tile sees all tokens
      const i32 last = shift + static_cast<i32>(group.div(first_packed_row + tile_q - 1));
      end = max_of(0, visible_end(visibility, last, kv_len));
    }
    return {min_of(end, first_visible(visibility, first, request.kv_begin)), end};
  }

  // The cost of a whole unit. Only a request's only row tile has a least value, which TileCosts leaves out: kernels
  // with such a value take requests of few rows.
  FP_HOST_DEVICE double unit_ns(const Request& request, i32 tile) const {
    const double ns = ns_per_unit + product(price(request).ns, visible(request, tile).size());
    return request.tiles == 1 ? max_of(ns, least_ns_of_unit) : ns;
  }

  Visibility visibility;
  FastDiv group;
  i32 tile_q;
  i32 most_few_rows;
  double rows_per_tile;
  double tiles_per_row;
  double rounding;  // average distance, in rows, from a tile's exact edge to the edge of the row that it divides
  double ns_per_unit;
  double least_ns_of_unit;
  TokenPrice many_rows;
  TokenPrice few_rows;  // of requests with has_few_rows

 private:
  // A fixed split cuts all units into pieces of one size, so the cost of a piece is a price for each token.
  static double piece_of_token(const Schedule& schedule) {
    return schedule.fixed() ? schedule.ns_per_piece / schedule.fixed_piece_tokens : 0.0;
  }
};

// The sum of clamp(first + slope * t, 0, cap) over t < r.
class ClampedSum {
 public:
  ClampedSum() = default;
  FP_HOST_DEVICE ClampedSum(double first, double slope, double per_slope, double cap)
      : first_(first),
        slope_(slope),
        per_slope_(per_slope),
        cap_(cap),
        rise_(first < 0.0 ? steps(-first) : 0.0),
        flat_(first < cap ? steps(cap - first) : 0.0) {}

  FP_HOST_DEVICE double operator()(double r) const {
    const double rise = min_of(r, rise_), flat = min_of(r, flat_);
    const double mean = first_ + product(slope_ * 0.5, rise + flat - 1.0);
    return product(flat - rise, mean) + product(r - flat, cap_);
  }
  FP_HOST_DEVICE double at(double t) const { return min_of(max_of(first_ + product(slope_, t), 0.0), cap_); }
  FP_HOST_DEVICE double rise() const { return rise_; }
  FP_HOST_DEVICE double flat() const { return flat_; }

 private:
  // The steps in which the line rises by `height`, rounded up.
  FP_HOST_DEVICE double steps(double height) const {
    const double exact = height * per_slope_;
    const double whole = static_cast<double>(static_cast<i64>(exact));
    return whole < exact ? whole + 1.0 : whole;
  }

  double first_ = 0.0, slope_ = 0.0, per_slope_ = 0.0, cap_ = 0.0;
  double rise_ = 0.0;  // first t whose value is above 0
  double flat_ = 0.0;  // first t whose value is cap
};

// The cost of the first r row tiles of a request, for one KV head; the request has at least two. If the group does not
// divide the row tile, tile edges are fractions of a row: a unit's cost here is within one token of the exact cost, and
// right on average.
class TileCosts {
 public:
  TileCosts() = default;
  FP_HOST_DEVICE TileCosts(const CostModel& model, const Request& request)
      : tiles_(request.tiles), ns_per_unit_(model.ns_per_unit), ns_per_token_(model.many_rows.ns) {
    // Tokens are counted from the first one that any row sees.
    const Visibility& visibility = model.visibility;
    const double kv_len = request.tokens(), shift = kv_len - request.q_len;
    const double end = visibility.causal ? shift + model.rows_per_tile + model.rounding : kv_len;
    const double begin = visibility.window_left >= 0 ? shift - visibility.window_left - model.rounding : 0.0;
    const double slope = model.rows_per_tile, per_slope = model.tiles_per_row;
    end_ = visibility.causal ? ClampedSum(end, slope, per_slope, kv_len) : ClampedSum(kv_len, 0.0, 0.0, kv_len);
    if (visibility.window_left >= 0) begin_ = ClampedSum(begin, slope, per_slope, kv_len);
    prepare_guess(model);
  }

  FP_HOST_DEVICE i32 tiles() const { return tiles_; }
  FP_HOST_DEVICE double prefix(double r) const {
    return product(ns_per_unit_, r) + product(ns_per_token_, end_(r) - begin_(r));
  }

  struct Found {
    i32 tile;
    double begin;  // prefix(tile)
    double end;    // prefix(tile + 1)
  };

  // The last tile, `from` or later, whose prefix is at most `cost`.
  FP_HOST_DEVICE Found tile_at(double cost, i32 from) const {
    i32 low = max_of(from, min_of(tiles_ - 1, guess(cost)));
    double begin = prefix(low);
    for (i32 step = 1; begin > cost && low > from; step *= 2) begin = prefix(low = max_of(from, low - step));
    i32 high = low + 1;
    double end = prefix(high);
    for (i32 step = 2; end <= cost && high < tiles_; step *= 2) {
      low = high, begin = end;
      end = prefix(high = min_of(tiles_, high + step));
    }
    while (high - low > 1) {
      const i32 middle = (low + high) / 2;
      const double at = prefix(middle);
      if (at <= cost) {
        low = middle, begin = at;
      } else {
        high = middle, end = at;
      }
    }
    return {low, begin, end};
  }

 private:
  FP_HOST_DEVICE double unit_at(double t) const {
    return ns_per_unit_ + product(ns_per_token_, end_.at(t) - begin_.at(t));
  }

  // Fits the guess: units mostly cost the same at first (they see nothing, or everything), then grow by a constant
  // amount each (causal), then cost the same again (the window is full).
  FP_HOST_DEVICE void prepare_guess(const CostModel& model) {
    const double tiles = tiles_;
    ramp_ = min_of(tiles, end_.rise());
    ramp_cost_ = prefix(ramp_);
    level_ = min_of(tiles, min_of(end_.flat(), model.visibility.window_left >= 0 ? begin_.rise() : tiles));
    level_cost_ = prefix(level_);
    const double growth = model.visibility.causal ? ns_per_token_ * model.rows_per_tile : 0.0;
    half_step_ = growth > 0.0 ? unit_at(ramp_) / growth - 0.5 : 0.0;
    steps_per_ns_ = growth > 0.0 ? 1.0 / growth : 0.0;
    const double before = ramp_ > 0.0 ? ns_per_unit_ : 0.0, after = unit_at(min_of(tiles - 1.0, level_));
    before_per_ns_ = before > 0.0 ? 1.0 / before : 0.0;
    after_per_ns_ = after > 0.0 ? 1.0 / after : 0.0;
  }

  FP_HOST_DEVICE i32 guess(double cost) const {
    double r;
    if (cost >= level_cost_) {
      r = level_ + (cost - level_cost_) * after_per_ns_;
    } else if (cost >= ramp_cost_) {
      r = ramp_ + square_root(half_step_ * half_step_ + 2.0 * (cost - ramp_cost_) * steps_per_ns_) - half_step_;
    } else {
      r = cost * before_per_ns_;
    }
    return r < tiles_ ? static_cast<i32>(r) : tiles_;
  }

  i32 tiles_ = 0;
  double ns_per_unit_ = 0.0, ns_per_token_ = 0.0;
  ClampedSum end_, begin_;
  // The model of guess(): where units begin and stop to grow (tiles and their prefix), and by how much they grow.
  double ramp_ = 0.0, ramp_cost_ = 0.0, level_ = 0.0, level_cost_ = 0.0;
  double half_step_ = 0.0, steps_per_ns_ = 0.0, before_per_ns_ = 0.0, after_per_ns_ = 0.0;
};

// The cost of a request on the axis: `heads` times the cost of its row tiles (heads is 1 if KV heads do not lie on the
// axis). It is a multiple of 1/1024 ns, so that sums are exact: requests may be added in any order.
FP_HOST_DEVICE double cost_on_axis(const CostModel& model, i32 heads, const Request& request) {
  constexpr double steps_per_ns = 1024.0;
  if (request.tiles == 0) return 0.0;
  const double cost = request.tiles == 1 ? model.unit_ns(request, 0) : TileCosts(model, request).prefix(request.tiles);
  return static_cast<double>(static_cast<i64>(heads * cost * steps_per_ns + 0.5)) / steps_per_ns;
}

// Places the requests on one cost axis. requests[batch] receives the totals.
inline void lay_on_axis(const CostModel& model, i32 heads, i32 batch, Request* requests) {
  double at = 0.0, known = 0.0;
  const Request* last = nullptr;  // neighbours often cost the same
  i32 number = 0;
  for (i32 i = 0; i < batch; ++i) {
    Request& request = requests[i];
    request.cost = at;
    request.number = number;
    if (last == nullptr || !request.costs_like(*last)) known = cost_on_axis(model, heads, request);
    last = &request;
    at += known;
    number += request.tiles > 0;
  }
  requests[batch] = {};
  requests[batch].cost = at;
  requests[batch].number = number;
}

}  // namespace flashpage::plan
