// The searches of a Partitioner on the host, by one thread. Each lane begins where the lane before it ends, so a plan
// takes as long as the chain of its searches: they avoid long dependent arithmetic and branches that cannot be
// predicted.
#pragma once
#include "flashpage/plan/cost.h"
#include "flashpage/plan/one_tile_lanes.h"

namespace flashpage::plan {

// TileCosts with a table: lanes mostly end in requests of the same lengths, so the second search for such a request
// writes down the costs of all its row tiles. Later searches count the tiles that begin at or before a cost, first of
// every eighth tile and then of eight neighbours. TileCosts::tile_at waits for a square root and takes twice as long.
class TabledTileCosts {
 public:
  TabledTileCosts& operator=(const TileCosts& costs) {
    costs_ = costs;
    searches_ = 0;
    return *this;
  }

  FP_HOT TileCosts::Found tile_at(double cost, i32 from) {
    if (costs_.tiles() > most_tiles || ++searches_ == 1) return costs_.tile_at(cost, from);
    if (searches_ == 2) fill();
    const i32 eight = max_of(8 * begun(eighths_, cost) - 8, 0);
    const i32 tiles = min_of(eight + begun(prefixes_ + eight, cost), costs_.tiles());
    const i32 tile = max_of(from, tiles - 1);
    return {tile, prefixes_[tile], prefixes_[tile + 1]};
  }

 private:
  static constexpr i32 most_tiles = 64;

  // How many of eight tiles begin at or before a cost.
  static i32 begun(const double* prefixes, double cost) {
    i32 count = 0;
    for (i32 i = 0; i < 8; ++i) count += prefixes[i] <= cost;
    return count;
  }

  void fill() {
    const i32 tiles = costs_.tiles();
    for (i32 tile = 0; tile <= tiles; ++tile) prefixes_[tile] = costs_.prefix(tile);
    for (i32 tile = tiles + 1; tile < most_tiles; ++tile) prefixes_[tile] = prefixes_[tiles];
    for (i32 i = 0; i < 8; ++i) eighths_[i] = prefixes_[8 * i];
  }

  TileCosts costs_;
  i32 searches_ = 0;                 // for the present request, or others of its lengths
  double prefixes_[most_tiles + 1];  // TileCosts::prefix; after the last tile its end
  double eighths_[8];                // of tiles 0, 8, 16, ...
};

struct OneSearcher {
  using Costs = TabledTileCosts;
  static constexpr bool fills_lanes = true;  // `lanes` may fill some in Partitioner's place
  const OneTileLanes* lanes = nullptr;       // null: Partitioner fills all lanes

  // The last request, `from` or later, that begins on the axis at or before `cost`. It is mostly among the next few,
  // which are compared one by one: their places then do not depend on the outcome of a comparison.
  FP_HOST_DEVICE i32 request_at(const Request* requests, i32 batch, i32 from, double cost) const {
    i32 low = from, step = 1;
    for (const i32 far = from + near; low < far; ++low) {
      if (low + 1 >= batch || requests[low + 1].cost > cost) return low;
    }
    while (low + step < batch && requests[low + step].cost <= cost) {
      low += step;
      step *= 2;
    }
    i32 high = min_of(low + step, batch);  // the total, which is above the goal
    while (high - low > 1) {
      const i32 middle = low + (high - low) / 2;
      (requests[middle].cost <= cost ? low : high) = middle;
    }
    return low;
  }
  FP_HOST_DEVICE bool writes() const { return true; }
  FP_HOST_DEVICE void meet() const {}

 private:
  static constexpr i32 near = 4;
};

}  // namespace flashpage::plan
