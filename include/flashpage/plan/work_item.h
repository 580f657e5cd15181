// The plan: what the planner writes and every kernel reads. Plain data, the same bytes on host and device.
//
// A request's query rows are packed with the query heads of one KV head: packed row = row * group_size + head in group.
// A row tile is `tile_q` consecutive packed rows; a unit is one row tile of one KV head. A work item is consecutive
// units of one request over one token range; the items of a CTA are consecutive. The CTAs of a lane take the same token
// ranges for different KV heads and share one list of items, so a decode plan has one item for each request and cut,
// not one for each KV head. for_each_item reads the list and gives each CTA its own head and partial row; first_merge
// gives it its own merge. CtaStart holds a CTA's range and a copy of its first item, already adjusted to the CTA: a
// kernel that starts waits for one load, not for the range and then for the item.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

struct alignas(16) WorkItem {
  i64 kv_offset;         // paged: index in kv_indices of the request's first page; ragged: the request's first KV row
  i64 mask_offset;       // packed custom mask: index of the request's first byte; mask function: cells of one KV head
                         // before the request's (tile/mask/mask_tiles.h)
  i32 request;           // index in the batch
  i32 q_begin;           // the request's first row of q (rows)
  i32 q_len;             // rows of the request
  i32 kv_len;            // tokens of the request
  i32 first_packed_row;  // of the first unit, in the request
  i32 kv_head;           // of the first unit
  i32 num_units;         // consecutive: after the request's last row tile comes the first one of the next KV head
  i32 kv_begin;          // tokens; causal and window clip it further for each unit
  i32 kv_end;            // tokens
  i32 partial_row;  // row of the partial buffers for the unit's first packed row; -1: writes to out. An item with a
                    // partial row has num_units == 1.
  i32 piece;        // index of this piece in its unit; piece 0 adds the attention sink
  i32 merge;        // the unit's first MergeItem for place 0 (see first_merge); -1 if partial_row is -1
};
static_assert(sizeof(WorkItem) == 64);

// Packed rows of one unit whose token range is cut: combines the partials in order and writes to out. An item has at
// most `merge_rows` rows; the items of a unit are consecutive, in the order of their rows.
struct alignas(16) MergeItem {
  i32 request;
  i32 q_begin;           // the request's first row of q (rows)
  i32 first_packed_row;  // within the request
  i32 num_rows;          // packed rows
  i32 kv_head;
  i32 partial_row;     // row of partial 0 for first_packed_row
  i32 partial_stride;  // rows between one partial and the next
  i32 num_partials;
};
static_assert(sizeof(MergeItem) == 32);

// How often a CTA of eight warps waits for loads when it merges so many partials in `jobs`, which are rows or 128
// columns of them (tile/merge/arrival_merge.h): eight loads of a warp are in flight at once.
FP_HOST_DEVICE constexpr i32 merge_rounds(i32 partials, i32 jobs) {
  if (jobs <= 8) return ceil_div(partials, 8);
  return jobs <= 16 ? ceil_div(partials, 4) : ceil_div(partials, 2) * ceil_div(jobs, 32);
}

// The work of one CTA: items [begin, end), adjusted by this CTA's place in its lane.
struct alignas(16) CtaItems {
  i32 begin;
  i32 end;
  u16 kv_head;  // added to WorkItem::kv_head
  u16 place;    // position in a full lane, for first_merge (a CTA of several heads has several places: the first one)
  i32 partial_row;  // added to WorkItem::partial_row if that is not -1
};
static_assert(sizeof(CtaItems) == 16);

struct alignas(16) CtaStart {
  CtaItems items;
  WorkItem first;  // item items.begin as item_of_cta gives it; zero if the range is empty
};
static_assert(sizeof(CtaStart) == 80);

// The first bytes of a plan in the int workspace; offsets are bytes from the header. One CtaStart for each CTA of the
// schedule follows the header; CTAs without work have an empty range. One counter of arrivals for each merge follows
// the merges.
struct alignas(16) PlanHeader {
  i32 num_ctas;
  i32 num_items;
  i32 num_merges;
  i32 num_partial_rows;
  i32 merges_of_place;  // merges of the CTAs of one place; those of the next place, for other KV heads, follow
  i32 items_offset;     // WorkItem [num_items]
  i32 merges_offset;    // MergeItem [num_merges]
  i32 used_bytes;
  i32 cluster_size;  // CTAs of a group (own_ctas.h): piece p of a cut unit is the only item of CTA p of its group, and
                     // all pieces of the unit are in the group, so that they may merge without partials. 0: items and
                     // pieces are anywhere
  i32 merge_rows;    // rows of a merge item, at most
  i32 unused[2];
};
static_assert(sizeof(PlanHeader) == 48);

inline constexpr i64 merge_bytes = sizeof(MergeItem) + sizeof(u32);  // with its counter of arrivals

FP_HOST_DEVICE WorkItem item_of_cta(WorkItem item, const CtaItems& cta) {
  item.kv_head += cta.kv_head;
  if (item.partial_row >= 0) item.partial_row += cta.partial_row;
  return item;
}

// The start of CTA `cta`, which may be any CTA that the schedule counts. The address does not depend on the header's
// bytes, so that both loads are in flight together.
FP_HOST_DEVICE const CtaStart& cta_start(const PlanHeader* plan, i32 cta) {
  return reinterpret_cast<const CtaStart*>(plan + 1)[cta];
}
FP_HOST_DEVICE CtaItems cta_items(const PlanHeader* plan, i32 cta) { return cta_start(plan, cta).items; }
FP_HOST_DEVICE const WorkItem* plan_items(const PlanHeader* plan) {
  return reinterpret_cast<const WorkItem*>(reinterpret_cast<const char*>(plan) + plan->items_offset);
}
// `header`: a copy of *plan that was loaded earlier.
FP_HOST_DEVICE const MergeItem* plan_merges(const PlanHeader* plan, const PlanHeader& header) {
  return reinterpret_cast<const MergeItem*>(reinterpret_cast<const char*>(plan) + header.merges_offset);
}
FP_HOST_DEVICE const MergeItem* plan_merges(const PlanHeader* plan) { return plan_merges(plan, *plan); }
// Counters, [num_merges], for kernels that merge inside the attention launch: how many pieces of a unit are done,
// counted at the unit's first merge. They are zero in a fresh plan; the CTA that merges resets its counter to zero for
// the next run.
FP_HOST_DEVICE u32* plan_arrivals(const PlanHeader* plan, const PlanHeader& header) {
  return reinterpret_cast<u32*>(const_cast<MergeItem*>(plan_merges(plan, header) + header.num_merges));
}
// The index of the first merge of an item's unit; only valid if its partial_row is not -1.
FP_HOST_DEVICE i32 first_merge(const PlanHeader& header, const WorkItem& item, const CtaItems& cta) {
  return item.merge + cta.place * header.merges_of_place;
}

// Calls body(item) for every item of a CTA, in order.
template <class Body>
FP_HOST_DEVICE void for_each_item(const PlanHeader* plan, i32 cta, Body&& body) {
  const CtaItems mine = cta_items(plan, cta);
  const WorkItem* items = plan_items(plan);
  for (i32 i = mine.begin; i < mine.end; ++i) body(item_of_cta(items[i], mine));
}

}  // namespace flashpage
