// Where a token's K and V rows are; one interface for paged and ragged caches.
#pragma once
#include "flashpage/params/latent_format.h"

namespace flashpage {

// The tiles that cover the tokens that a unit sees.
struct TileExtent {
  i32 first_token;
  i32 tiles;  // at least one: a unit that sees nothing has a tile of hidden tokens
};

// The page number of a token below the request's length; 0 for ragged caches.
template <KvSource source>
FP_DEVICE i32 look_up_page(const AttentionParams& params, i64 kv_offset, i32 token) {
  return source != KvSource::ragged ? __ldg(params.kv_indices + kv_offset + params.page.div(token)) : 0;
}

// Where a box of tokens begins in a tensor map.
struct BoxOrigin {
  i32 page;
  i32 row;  // of the page; ragged: of the tensor
};

// Which of 32 tokens exist: the first `count`. `found` is what look_up found for the lane's token.
template <KvSource source>
struct PresentTokens {
  i32 count;

  FP_DEVICE static PresentTokens of_lanes(i32 count, i32) { return {count}; }
  FP_DEVICE bool has(int token) const { return token < count; }
};

// A list may have gaps, so there is a bit for each token.
template <KvSource source>
  requires reads_lists<source>
struct PresentTokens<source> {
  u32 bits;

  FP_DEVICE static PresentTokens of_lanes(i32 count, i32 found) {
    return {__ballot_sync(0xffffffff, static_cast<i32>(threadIdx.x % 32) < count && found >= 0)};
  }
  FP_DEVICE bool has(int token) const { return (bits >> token & 1) != 0; }
};

// The place of an item's page numbers or entries, from which KvRows is made; two_lists: its row of q.
template <KvSource source>
FP_DEVICE i64 rows_offset(const WorkItem& item) {
  return source == KvSource::two_lists ? item.q_begin : item.kv_offset;
}
// Entries of the first of two lists that are used; 0 if there is one list, or none.
template <KvSource source>
FP_DEVICE i32 first_length_of(const AttentionParams& params, const WorkItem& item) {
  if constexpr (source == KvSource::two_lists) return first_list_length(params, item.q_begin);
  return 0;
}
// Whether the entry of a token is in use, which look_up does not say: a kernel that tested it there would wait for the
// entry. `first_length`: of first_length_of.
template <KvSource source>
FP_DEVICE bool is_used(const AttentionParams& params, i32 token, i32 first_length) {
  return source != KvSource::two_lists || token < first_length || is_in_second(params, token);
}

// Looks up the page of a token, and later computes the address of the token's row in K or V. The lookup is the only
// load on which the copy depends, so kernels issue it at least one tile earlier.
template <KvSource source>
struct KvRows {
  const i32* indices;  // paged: the request's page numbers
  i64 first_row;       // ragged: the request's first row
  FastDiv page;

  FP_DEVICE KvRows(const AttentionParams& params, i64 kv_offset)  // WorkItem::kv_offset
      : indices(params.kv_indices + (source != KvSource::ragged ? kv_offset : 0)),
        first_row(kv_offset),
        page(params.page) {}
  FP_DEVICE KvRows(const AttentionParams& params, const WorkItem& item) : KvRows(params, item.kv_offset) {}

  // The page number of a token below the request's length.
  FP_DEVICE i32 look_up(i32 token) const {
    if constexpr (source != KvSource::ragged) return __ldg(place(token));
    return 0;
  }
  // The address of that page number; selected: of the number of the token's slot, which is negative if there is none.
  FP_DEVICE const i32* place(i32 token) const {
    return indices + (source == KvSource::selected ? token : page.div(token));
  }
  // The slot of a token, by the number that look_up found.
  FP_DEVICE CacheSlot slot(i32 found, i32 token) const {
    if constexpr (source == KvSource::selected) {
      const u32 number = page.div(found);
      return {number, found - number * page.divisor};
    }
    return {found, token - page.div(token) * page.divisor};
  }

  // The parts of a token's row in a format of its own, by the number that look_up found.
  template <class Format>
  FP_DEVICE LatentParts parts(const AttentionParams& params, i32 found, i32 token) const {
    return Format::find(params, slot(found, token));
  }

  // The address of element `column` of the token's row.
  template <class Element>
  FP_DEVICE const Element* row(const KvView& view, i32 found, i32 token, i32 head, i32 column = 0) const {
    i64 offset = head * view.head_stride + column;
    if constexpr (source == KvSource::selected) {
      const CacheSlot at = slot(found, token);
      offset += at.page * view.page_stride + at.in_page * view.token_stride;
    } else if constexpr (source != KvSource::ragged) {
      u32 in_page = token - page.div(token) * page.divisor;
      offset += found * view.page_stride + in_page * view.token_stride;
    } else {
      offset += (first_row + token) * view.token_stride;
    }
    return static_cast<const Element*>(view.data) + offset;
  }
};

// Lists of tokens of two caches, in a format whose rows hold their scales.
template <>
struct KvRows<KvSource::two_lists> {
  const AttentionParams& params;
  i32 row;  // of q

  FP_DEVICE KvRows(const AttentionParams& params, i64 row) : params(params), row(static_cast<i32>(row)) {}
  FP_DEVICE KvRows(const AttentionParams& params, const WorkItem& item) : KvRows(params, item.q_begin) {}

  FP_DEVICE i32 look_up(i32 token) const { return __ldg(entry_of_lists(params, row, token)); }
  template <class Format>
  FP_DEVICE LatentParts parts(const AttentionParams& params, i32 found, i32 token) const {
    return parts_of_entry<Format>(params, found, token);
  }
};

}  // namespace flashpage
