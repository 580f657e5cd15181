// What a row tile sees and what it costs. The cost of a request's first r row tiles has a closed form: under causal and
// window both ends of a tile's token range are clamped linear functions of the tile, and their sums are too.
#pragma once
#include <numeric>

#include "flashpage/plan/lengths.h"
#include "flashpage/plan/schedule.h"

namespace flashpage::plan {

struct TokenRange {
  i32 begin;
  i32 end;
  i32 size() const { return end - begin; }
};

struct CostModel {
  CostModel(const Heads& heads, const Schedule& schedule)
      : causal(heads.causal),
        window_left(heads.window_left),
        group(heads.group()),
        tile_q(schedule.tile_q),
        rows_per_tile(static_cast<double>(schedule.tile_q) / heads.group()),
        tiles_per_row(1.0 / rows_per_tile),
        rounding(0.5 * (1.0 - static_cast<double>(std::gcd(heads.group(), schedule.tile_q)) / heads.group())),
        ns_per_unit(schedule.ns_per_unit),
        // A fixed split has its pieces everywhere alike: their cost is a price per token.
        ns_per_token(schedule.ns_per_token +
                     (schedule.fixed() ? schedule.ns_per_piece / schedule.fixed_piece_tokens : 0.0)) {}

  // Tokens that any row of this row tile sees.
  TokenRange visible(const Request& request, i32 tile) const {
    const i32 kv_len = request.kv_len, shift = kv_len - request.q_len;
    const u32 first_packed_row = static_cast<u32>(tile) * tile_q, heads = group;  // 32-bit division is the fast one
    i32 begin = 0, end = kv_len;
    if (causal && tile + 1 < request.tiles) {
      const i32 end_row = static_cast<i32>((first_packed_row + tile_q - 1) / heads + 1);
      end = max_of(0, shift + end_row);
    }
    if (window_left >= 0) {
      const i64 first = static_cast<i64>(shift) + first_packed_row / heads - window_left;
      begin = static_cast<i32>(min_of<i64>(end, max_of<i64>(0, first)));
    }
    return {begin, end};
  }

  bool causal;
  i32 window_left;
  i32 group;
  i32 tile_q;
  double rows_per_tile;
  double tiles_per_row;
  double rounding;  // rows, on average, from a tile's exact edge to the whole row that it falls in
  double ns_per_unit;
  double ns_per_token;
};

// Sum of clamp(first + slope * t, 0, cap) over t < r.
class ClampedSum {
 public:
  ClampedSum() = default;
  ClampedSum(double first, double slope, double per_slope, double cap)
      : first_(first),
        slope_(slope),
        per_slope_(per_slope),
        cap_(cap),
        rise_(first < 0.0 ? steps(-first) : 0.0),
        flat_(first < cap ? steps(cap - first) : 0.0) {}

  double operator()(double r) const {
    const double rise = min_of(r, rise_), flat = min_of(r, flat_);
    return (flat - rise) * (first_ + slope_ * 0.5 * (rise + flat - 1.0)) + (r - flat) * cap_;
  }

 private:
  // Steps until the line has risen by `height`, rounded up.
  double steps(double height) const {
    const double exact = height * per_slope_;
    const double whole = static_cast<double>(static_cast<i64>(exact));
    return whole < exact ? whole + 1.0 : whole;
  }

  double first_ = 0.0, slope_ = 0.0, per_slope_ = 0.0, cap_ = 0.0;
  double rise_ = 0.0;  // first t whose value is above 0
  double flat_ = 0.0;  // first t whose value is cap
};

// Cost of the first r row tiles of one request and one KV head. Where the group does not divide the row tile, a tile's
// edges are taken as fractions of a row: a unit's cost here is within one token of the exact one, and right on average.
class TileCosts {
 public:
  TileCosts(const CostModel& model, const Request& request)
      : model_(model),
        tiles_(request.tiles),
        kv_len_(request.kv_len),
        end_(request.kv_len - request.q_len + model.rows_per_tile + model.rounding, model.rows_per_tile,
             model.tiles_per_row, request.kv_len),
        begin_(model.window_left < 0 ? ClampedSum()
                                     : ClampedSum(static_cast<double>(request.kv_len) - request.q_len -
                                                      model.window_left - model.rounding,
                                                  model.rows_per_tile, model.tiles_per_row, request.kv_len)) {}

  double prefix(i32 r) const {
    double tokens = model_.causal ? end_(r) : kv_len_ * r;
    if (model_.window_left >= 0) tokens -= begin_(r);
    return model_.ns_per_unit * r + model_.ns_per_token * tokens;
  }

  // The last tile, `from` or later, whose prefix is at most `cost`. A lane that goes on mostly ends near its beginning.
  i32 tile_at(double cost, i32 from) const {
    i32 low = from, high = tiles_;
    if (from > 0) {
      for (i32 step = 1; low + step < high; step *= 2) {
        if (prefix(low + step) > cost) {
          high = low + step;
          break;
        }
        low += step;
      }
    }
    while (high - low > 1) {
      const i32 middle = (low + high) / 2;
      if (prefix(middle) <= cost) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  const CostModel& model_;
  i32 tiles_;
  double kv_len_;
  ClampedSum end_, begin_;
};

// Lays the requests on one cost axis, `copies` times each (once a KV head where heads are walked one after another).
// requests[batch] receives the total.
inline void lay_on_axis(const CostModel& model, i32 copies, i32 batch, Request* requests) {
  double at = 0.0;
  for (i32 i = 0; i < batch; ++i) {
    Request& request = requests[i];
    request.cost = at;
    if (request.tiles == 1) {
      at += copies * (model.ns_per_unit + model.ns_per_token * model.visible(request, 0).size());
    } else if (request.tiles > 1) {
      at += copies * TileCosts(model, request).prefix(request.tiles);
    }
  }
  requests[batch] = {};
  requests[batch].cost = at;
}

}  // namespace flashpage::plan
