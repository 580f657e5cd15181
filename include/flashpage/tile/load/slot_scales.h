// The scales of formats (formats/format.h) next to a ring's slots: those of a slot's tokens, token after token. They
// are copied by the lanes of the warp that loads the slot, because the copy engine brings no less than 16 bytes of a
// row.
#pragma once
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/stored_formats.h"
#include "flashpage/tile/load/kv_rows.h"

namespace flashpage {

template <class Traits, int tokens>
struct SlotScales {
  using Formats = StoredFormats<Traits>;
  static constexpr int key_bytes = Formats::key_scale_bytes, value_bytes = Formats::value_scale_bytes;  // of a token

  alignas(16) u8 of_tokens[Traits::stages][tokens * (key_bytes + value_bytes)];

  FP_DEVICE u32 keys(u32 slot) const { return ptx::shared_address(of_tokens[slot]); }
  FP_DEVICE u32 values(u32 slot) const { return keys(slot) + tokens * key_bytes; }

  // Copies the scales of the slot's `token`; zeros if it does not `exist`, which hide whatever the slot has of V.
  // `found` is its page, as KvRows::row takes it; `in_cache` the token that has its place in the page.
  template <class Rows>
  FP_DEVICE void load(const AttentionParams& params, const Rows& rows, u32 slot, int token, bool exists, i32 found,
                      i32 in_cache, i32 head) const {
    copy<key_bytes>(keys(slot) + token * key_bytes, rows.template row<u8>(params.key_scales, found, in_cache, head),
                    exists);
    copy<value_bytes>(values(slot) + token * value_bytes,
                      rows.template row<u8>(params.value_scales, found, in_cache, head), exists);
  }

 private:
  template <int bytes>
  FP_DEVICE static void copy(u32 to, const u8* from, bool exists) {
    constexpr int piece = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4;
    static_assert(bytes % piece == 0);
#pragma unroll
    for (int at = 0; at < bytes; at += piece) ptx::cp_async<piece>(to + at, from + at, exists);
  }
};

}  // namespace flashpage
