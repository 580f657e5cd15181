// The loading warps of latent_wide_sm90: one goes through the plan, loads Q, and fences single rows. The others load
// tokens: boxes of them, where each warp has a part of the columns, or single rows, which the warps share (rows.h).
#pragma once
#include "flashpage/kernels/latent_wide_sm90/convert.h"
#include "flashpage/kernels/latent_wide_sm90/rows.h"
#include "flashpage/kernels/wide_query.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

// Loads a part by the copy engine. A lane holds the origin of one of 32 boxes.
template <class Traits, WidePart part>
struct WideBoxes {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  static constexpr int tokens = Shared::tokens;

  Shared& shared;
  const TensorMap& map;
  const AttentionParams& params;
  const int box_shift;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  BoxOrigin found;

  FP_DEVICE WideBoxes(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared),
        map(part == WidePart::tail ? maps.v : maps.k),
        params(params),
        box_shift(31 - __clz(params.box_tokens)) {}

  FP_DEVICE void open(const WidePlace& next) { place = &next; }

  FP_DEVICE void load(int block, u32 use) {
    const int boxes = tokens >> box_shift, first = block * boxes;
    if (first % 32 == 0) found = box_of_lane(params, *place, first, box_shift);
    const i32 left = place->place.unit.kv_end - place->first_token - block * tokens;
    const int present = min_of(boxes, (left + (1 << box_shift) - 1) >> box_shift);
    const int of_box = first + static_cast<int>(threadIdx.x % 32);  // a shuffle takes it modulo 32
    const BoxOrigin box{__shfl_sync(0xffffffff, found.page, of_box), __shfl_sync(0xffffffff, found.row, of_box)};
    if constexpr (part == WidePart::tail) {
      load_panels<Shared::tail_panels>(shared.tail_of(use), box, present);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_panels<Shared::quarter_panels>(shared.template quarter_of<part>(i, use), box, present);
    }
  }

 private:
  // Loads `present` boxes, each by a lane, which has its origin before memory is free.
  template <int panels>
  FP_DEVICE void load_panels(const WideQuarter& at, const BoxOrigin& box, int present) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const u32 to = ptx::shared_address(at.memory) + (lane * 128 << box_shift), barrier = ptx::shared_address(at.full);
    ptx::mbarrier_wait(ptx::shared_address(at.empty), at.phase ^ 1);
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect(barrier, present * panels * 128 << box_shift);
    __syncwarp();
    if (lane < present) {
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        const int column = (at.first_panel + panel) * Tile::panel_columns;
        ptx::tensor_copy(to + panel * Tile::panel_bytes, map, barrier, column, box.row, 0, box.page);
      }
    }
    __syncwarp();
  }
};

template <class Traits>
struct WideLoad {
  using Shared = WideShared<Traits>;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  WideUnits<Traits, Shared> units;
  int warp = threadIdx.x / 32;

  FP_DEVICE WideLoad(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps), units(shared, params) {}

  FP_DEVICE void run() const {
    if constexpr (Shared::converts) {
      convert_units();
    } else {
      copy_units();
    }
  }

 private:
  FP_DEVICE void copy_units() const {
    if (warp == WideRoles::plan_warp) return plan();
    if (warp >= Shared::loaders) return;
    if constexpr (!Shared::has_boxes) {
      units.load_blocks(WideRows<Traits>(shared, params), warp == 0);
    } else {
      if (warp == 0) load_part<WidePart::first>();
      if (warp == 1) load_part<WidePart::second>();
      if constexpr (Shared::tail_panels > 0) {
        if (warp == 2) load_part<WidePart::tail>();
      }
    }
  }

  FP_DEVICE void plan() const {
    const WideQuery<Traits, Shared> load_query(shared, params, maps);
    if constexpr (Shared::copies_rows) {
      units.plan(load_query, WideFence<Traits>{shared});
    } else {
      units.plan(load_query);
    }
  }

  // All loading warps convert, and one of them also goes through the plan. Q of a unit takes the place of the unit's
  // before, so a block comes first. Units and blocks are counted in the place, because these warps have few registers.
  FP_DEVICE void convert_units() const {
    WideConvert<Traits> loader(shared, params);
    if (warp == WideRoles::plan_warp) units.begin();
    for (u32 use = 0;;) {
      shared.place_ring.wait_full(use);
      const WidePlace& place = shared.places[shared.place_ring.slot(use)];
      if (place.place.done) return;
      loader.open(place);
      if (place.units_before == 0 || place.blocks == 0) loader.load_query(place);
      for (int block = 0; block < place.blocks; ++block) {
        loader.load(block, place.use(block));
        if (block == 0 && place.units_before > 0) loader.load_query(place);
      }
      use = place.units_before;
      shared.place_ring.release(use);
      if (warp == 0 && threadIdx.x % 32 == 0) stamp_first<Traits>(params, Stamp::first_load);
      if (warp == WideRoles::plan_warp) units.publish_next(use);
      ++use;
    }
  }

  template <WidePart part>
  FP_DEVICE void load_part() const {
    units.load_blocks(WideBoxes<Traits, part>(shared, params, maps), part == WidePart::first);
  }
};

}  // namespace flashpage
