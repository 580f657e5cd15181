// The loading warps of decode kernels for Hopper: they fill the ring of slots.
#pragma once
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/load/decode_boxes.h"
#include "flashpage/tile/load/decode_rows.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/load/slotted_place.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// Every loading warp goes through the same units and loads its share of the slots, one in `warps`. The last warp, whose
// first slot is needed last, also publishes the units and their Q.
template <class Traits, class Shared>
struct DecodeLoad {
  using S = Shape<Traits>;
  using SlotLoader = typename select_type<(Traits::loader == Loader::boxes), DecodeBoxes<Traits, Shared>,
                                          DecodeRows<Traits, Shared>>::type;
  using Source = typename SlotLoader::Source;
  static constexpr int warps = Shared::loading_warps;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 plan_words;  // the CTA's start and the plan's header, a word in each lane

  FP_DEVICE DecodeLoad(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps) {}

  // Loads the first words of the plan while the CTA starts. They are loaded as words, because whole structs would stay
  // in registers.
  FP_DEVICE void load_plan_words() {
    static_assert(sizeof(CtaStart) + sizeof(PlanHeader) == 32 * sizeof(u32));
    const u32* start = reinterpret_cast<const u32*>(&cta_start(params.plan, blockIdx.x));
    plan_words = lane < start_words ? start[lane] : reinterpret_cast<const u32*>(params.plan)[lane - start_words];
  }

  FP_DEVICE void run() {
    PlaceCursor cursor;
    Place place;
    cursor.first(params, Traits::tile_q, from_plan_words<CtaStart>(0), place);
    if (threadIdx.x == 0) stamp<Traits>(params, Stamp::plan_known);
    const SlotLoader loader(shared, params, maps);
    u32 use = 0;  // ring use of the unit's first slot
    Source source;
    if (!place.done) source = loader.open(place, first_own(use));
    u32 unit_use = 0;
    while (!place.done) {
      publish(place, source, unit_use++, cursor.cta);
      const int slots = source.slots, early = min_of(slots, Traits::stages);
      int slot = first_own(use);
      for (; slot < early; slot += warps) loader.load(source, slot, use + slot);
      if (threadIdx.x == 0) stamp_first<Traits>(params, Stamp::first_load);
      Place next;  // its first lookups are in flight while this unit is loaded
      cursor.next(params, Traits::tile_q, 1, place, next);
      Source following;
      if (!next.done) following = loader.open(next, first_own(use + slots));
      for (; slot < slots; slot += warps) loader.load(source, slot, use + slot);
      if constexpr (Shared::merges_in_launch) {
        if (place.item.partial_row >= 0) look_for_others(unit_use - 1);
      }
      use += slots;
      place = next;
      source = following;
    }
    publish(place, source, unit_use, cursor.cta);
  }

 private:
  static constexpr int start_words = sizeof(CtaStart) / sizeof(u32);

  template <class T>
  FP_DEVICE T from_plan_words(int first_word) const {
    T result;
    u32* words = reinterpret_cast<u32*>(&result);
#pragma unroll
    for (int i = 0; i < sizeof(T) / sizeof(u32); ++i) words[i] = __shfl_sync(0xffffffff, plan_words, first_word + i);
    return result;
  }

  // Called for a cut unit, once all its loads are issued. If all other pieces are done, the computing warps skip the
  // counter of arrivals.
  FP_DEVICE void look_for_others(u32 unit_use) {
    if (warp != warps - 1 || lane != 0) return;
    SlottedPlace& place = shared.places[shared.place_ring.slot(unit_use)];
    if (place.in_cluster) return;
    const u32 others = static_cast<u32>(place.merge->num_partials) - 1;
    if (ptx::load_acquire(place.arrivals) == others) ptx::store_release_shared(&place.others_are_done, 1);
  }

  FP_DEVICE int first_own(u32 use) const { return (warp - use) % warps; }

  FP_DEVICE void publish(const Place& place, const Source& source, u32 use, const CtaItems& cta) {
    if (warp != warps - 1) return;
    const PlanHeader header = from_plan_words<PlanHeader>(start_words);
    // Opaque, because otherwise the places of Q's rows would stay in registers for all units.
    const int lane = ptx::opaque_from<100>(threadIdx.x) % 32;
    shared.place_ring.wait_empty(use);
    u32 slot = shared.place_ring.slot(use), barrier = shared.place_ring.full_barrier(use);
    if (!place.done) {
      Shared::load_query(ptx::shared_address(shared.query[slot]), params, place.unit, lane,
                         [&](u32 row) { return query_offset(params, place.item, place.unit, row); });
    }
    if (lane == 0) {
      SlottedPlace& to = shared.places[slot];
      to.place = place;
      to.first_token = source.first_token;
      to.slots = source.slots;
      if (!place.done && place.item.partial_row >= 0) {
        const i32 merge = first_merge(header, place.item, cta);
        to.merge = plan_merges(params.plan, header) + merge;
        to.arrivals = plan_arrivals(params.plan, header) + merge;
        to.others_are_done = 0;
        to.in_cluster = header.cluster_size > 0;
      }
      ptx::mbarrier_arrive(barrier);
    }
    if constexpr (is_fp8<typename Traits::StoredQuery>) {
      ptx::mbarrier_arrive(barrier);  // releases what this lane has stored
    } else {
      ptx::mbarrier_arrive_after_copies(barrier);
    }
  }
};

}  // namespace flashpage
