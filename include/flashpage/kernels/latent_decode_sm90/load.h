// The loading warps of latent_decode_sm90: two fill the ring of slots, and another one publishes the units and their Q,
// so that loads of a unit's first slots do not wait until its place is free.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/slots.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct LatentLoad {
  using Shared = LatentShared<Traits>;
  using Warps = LatentWarps<Traits>;
  using SlotLoader =
      typename select_type<(Traits::loader == Loader::boxes), LatentBoxes<Traits>, LatentRows<Traits>>::type;
  using Source = typename SlotLoader::Source;
  static constexpr int slot_arrivals = Shared::converts ? Warps::converters : SlotLoader::arrivals;

  Shared& shared;
  const AttentionParams& params;
  const KvMaps& maps;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 plan_words;  // the CTA's start and the plan's header, a word in each lane

  FP_DEVICE LatentLoad(Shared& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), maps(maps) {}

  // Loads the first words of the plan while the CTA starts. They are loaded as words, because whole structs would stay
  // in registers.
  FP_DEVICE void load_plan_words() {
    static_assert(sizeof(CtaStart) + sizeof(PlanHeader) == 32 * sizeof(u32));
    const u32* start = reinterpret_cast<const u32*>(&cta_start(params.plan, blockIdx.x));
    plan_words = lane < start_words ? start[lane] : reinterpret_cast<const u32*>(params.plan)[lane - start_words];
  }

  FP_DEVICE void run() {
    if (warp != Warps::publisher && (Shared::converts || warp >= Warps::slot_loaders)) return;
    PlaceCursor cursor;
    Place place;
    cursor.first(params, Traits::tile_q, from_plan_words<CtaStart>(0), place);
    if (warp == Warps::publisher) return publish_all(cursor, place);
    if constexpr (!Shared::converts) load_all(cursor, place);
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

  FP_DEVICE void load_all(PlaceCursor& cursor, Place& place) const {
    if (threadIdx.x == 0) stamp<Traits>(params, Stamp::plan_known);
    const SlotLoader loader(shared, params, maps);
    const auto extent_of = [&](const Place& of) { return LatentExtent(of.unit, loader.box_shift, Shared::tokens); };
    u32 use = 0;  // ring use of the unit's first slot
    Source source;
    if (!place.done) source = loader.open(place, extent_of(place), warp);
    while (!place.done) {
      const int slots = extent_of(place).slots, early = min_of(slots, Traits::stages);
      int slot = 0;
      for (; slot < early; ++slot) loader.load(source, slot, use + slot, warp);
      if (threadIdx.x == 0) stamp_first<Traits>(params, Stamp::first_load);
      Place next;  // its first lookups are in flight while this unit is loaded
      cursor.next(params, Traits::tile_q, 1, place, next);
      Source following;
      if (!next.done) following = loader.open(next, extent_of(next), warp);
      for (; slot < slots; ++slot) loader.load(source, slot, use + slot, warp);
      use += slots;
      place = next;
      source = following;
    }
  }

  FP_DEVICE void publish_all(PlaceCursor& cursor, Place& place) const {
    const SlotLoader loader(shared, params, maps);
    const PlanHeader header = from_plan_words<PlanHeader>(start_words);
    for (u32 unit_use = 0;; ++unit_use) {
      if constexpr (Shared::converts) publish_converted(place, unit_use);
      publish(place, loader.box_shift, unit_use, header, cursor.cta);
      if (place.done) break;
      Place next;
      cursor.next(params, Traits::tile_q, 1, place, next);
      place = next;
    }
  }

  FP_DEVICE void publish_converted(const Place& place, u32 use) const {
    shared.converted_ring.wait_empty(use);
    if (lane != 0) return;
    const LatentExtent extent(place.unit, 0, Shared::tokens);
    const i32 first_length = place.done ? 0 : first_length_of<Traits::kv_source>(params, place.item);
    shared.converted[shared.converted_ring.slot(use)] = {rows_offset<Traits::kv_source>(place.item),
                                                         extent.first_token,
                                                         place.unit.kv_end,
                                                         extent.slots,
                                                         first_length,
                                                         place.done};
    ptx::mbarrier_arrive(shared.converted_ring.full_barrier(use));
  }

  FP_DEVICE void publish(const Place& place, int box_shift, u32 use, const PlanHeader& header,
                         const CtaItems& cta) const {
    shared.place_ring.wait_empty(use);
    const u32 slot = shared.place_ring.slot(use), barrier = shared.place_ring.full_barrier(use);
    if (!place.done) {
      Shared::load_query(ptx::shared_address(shared.query[slot]), params, place.unit, lane,
                         [&](u32 row) { return query_offset(params, place.item, place.unit, row); });
    }
    if (lane == 0) {
      SlottedPlace& to = shared.places[slot];
      const LatentExtent extent(place.unit, box_shift, Shared::tokens);
      to.place = place;
      to.first_token = extent.first_token;
      to.slots = extent.slots;
      if (!place.done && place.item.partial_row >= 0) {
        to.merge = plan_merges(params.plan, header) + first_merge(header, place.item, cta);
        to.in_cluster = header.cluster_size > 0;
      }
      ptx::mbarrier_arrive(barrier);
    }
    ptx::mbarrier_arrive_after_copies(barrier);
  }
};

}  // namespace flashpage
