// The tiles of a unit that kernels with a loading warpgroup visit: all of them, or those that some row sees, if a
// custom mask or a mask function was evaluated before. Loading warps find the tiles and pass each one to the computing
// warps.
#pragma once
#include "flashpage/tile/mask/mask_tiles.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Whether a kernel's tiles lie at multiples of their size in a request and are numbered there, so that it can look up
// in the mask's tiles which ones to visit. Warps that rotate keys have no registers for that.
template <class Traits>
inline constexpr bool has_mask_tiles =
    Traits::mask_source != MaskSource::implicit && Traits::position_encoding == PositionEncoding::none &&
    (Traits::loader == Loader::boxes || Traits::loader == Loader::rows);

// Whether the bits of mixed tiles exist in the order of computing lanes (tile/mask/lane_bits.h).
template <class Traits>
inline constexpr bool has_lane_bits = has_mask_tiles<Traits> && Traits::mask_source == MaskSource::packed_bits;

// How much of a visited tile the rows of a unit see.
enum class TileVisibility : i16 {
  all,
  some,     // some row does not see some token
  nothing,  // the unit sees no token at all: no bits are written for the tile
};

// A visited tile, as loading warps describe it to computing warps.
struct alignas(8) VisitedTile {
  i32 first_token;
  i16 is_last;  // of its unit
  TileVisibility visibility;
};
// Stands for VisitedTile in kernels that visit all tiles.
struct NextTile {
  static constexpr i32 first_token = 0;
  static constexpr bool is_last = false;
  static constexpr TileVisibility visibility = TileVisibility::all;
};
template <class Traits>
using CurrentTile = typename select_type<has_mask_tiles<Traits>, VisitedTile, NextTile>::type;

// Only the lane that later releases the slot loads it: racecheck does not order other lanes' loads before the release.
FP_DEVICE VisitedTile from_first_lane(const VisitedTile& visited) {
  u64 bits = 0;
  if (threadIdx.x % 32 == 0) bits = *reinterpret_cast<const u64*>(&visited);
  bits = __shfl_sync(0xffffffff, bits, 0);
  return {static_cast<i32>(bits), static_cast<i16>(bits >> 32), static_cast<TileVisibility>(bits >> 48)};
}

// All tiles of a unit by their number, as one warp visits them. `ahead` is the tile after the next one, whose place is
// looked up early; a number after the unit's end means that there is none.
struct EveryTile {
  int tile = 0;
  i32 count;

  FP_DEVICE EveryTile(const MaskTilesParams&, u32, const Unit&, i32, i32 count) : count(count) {}
  FP_DEVICE bool more() const { return tile < count; }
  FP_DEVICE int now() const { return tile; }
  FP_DEVICE int next() const { return tile + 1; }
  FP_DEVICE int ahead() const { return tile + 2; }
  FP_DEVICE void step() { ++tile; }
};

// Visits the tiles that some row sees, with EveryTile's interface. A unit that sees nothing visits its first tile, with
// all tokens hidden.
class VisibleTiles {
 public:
  FP_DEVICE VisibleTiles(const MaskTilesParams& params, u32 cell, const Unit& unit, i32 tokens, i32)
      : tokens_(tokens), words_(tile_words(params, cell)) {
    const i32 first = unit.kv_begin / tokens;
    end_ = max_of(first + 1, ceil_div(unit.kv_end, tokens));
    take(first >> part_bits);
    now_ = find(first);
    if (tile_of(now_) >= end_) now_ = with(first, TileVisibility::nothing);
    next_ = find(tile_of(now_) + 1);
  }
  FP_DEVICE bool more() const { return tile_of(now_) < end_; }
  FP_DEVICE int now() const { return tile_of(now_); }
  FP_DEVICE int next() const { return tile_of(next_); }
  FP_DEVICE int ahead() { return tile_of(find(tile_of(next_) + 1)); }  // not kept: registers are few
  FP_DEVICE bool is_mixed() const { return visibility_of(now_) == TileVisibility::some; }
  FP_DEVICE void step() {
    now_ = next_;
    next_ = find(tile_of(next_) + 1);
  }
  FP_DEVICE VisitedTile visited() const {
    return {tile_of(now_) * tokens_, tile_of(next_) >= end_, visibility_of(now_)};
  }

 private:
  static constexpr int part_bits = 10;  // tiles at a time: a word a lane
  // A found tile's number and its visibility in one word.
  FP_DEVICE static i32 with(i32 tile, TileVisibility visibility) { return tile << 2 | static_cast<i32>(visibility); }
  FP_DEVICE static i32 tile_of(i32 found) { return found >> 2; }
  FP_DEVICE static TileVisibility visibility_of(i32 found) { return static_cast<TileVisibility>(found & 3); }

  FP_DEVICE void take(i32 part) {
    part_ = part;
    const i32 word = part * 32 + threadIdx.x % 32;
    mine_ = word << 5 < end_ ? words_[word] : TileWord{};  // a request without tokens has a word too
  }
  // The first visible tile from `at` on, or `end_` or more if there is none.
  FP_DEVICE i32 find(i32 at) {
    while (at < end_) {
      if (at >> part_bits != part_) take(at >> part_bits);
      const int lane = at >> 5 & 31;
      const u32 bits = __shfl_sync(0xffffffff, mine_.visible, lane) & (~0u << (at & 31));
      if (bits != 0) {
        const int bit = __ffs(bits) - 1;
        const u32 hidden = __shfl_sync(0xffffffff, mine_.hidden, lane);
        return with((at & ~31) + bit, hidden >> bit & 1 ? TileVisibility::some : TileVisibility::all);
      }
      const u32 later = __ballot_sync(0xffffffff, mine_.visible != 0) & ~(~0u >> (31 - lane));
      at = (part_ * 32 + (later != 0 ? __ffs(later) - 1 : 32)) * 32;
    }
    return with(end_, TileVisibility::all);
  }

  i32 end_;  // of the unit
  i32 tokens_;
  const TileWord* words_;
  i32 part_;
  TileWord mine_;  // the lane's, of 32 words
  i32 now_, next_;
};

template <class Traits>
using TileVisits = typename select_type<has_mask_tiles<Traits>, VisibleTiles, EveryTile>::type;

}  // namespace flashpage
