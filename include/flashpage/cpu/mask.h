// Which tokens a row sees, num_lanes at a time: its own range, the packed custom mask and the variant's mask combined.
#pragma once
#include "flashpage/cpu/unit.h"
#include "flashpage/cpu/variant_lanes.h"

namespace flashpage::cpu {

template <class Traits>
inline constexpr bool has_custom_mask = Traits::mask_source == MaskSource::packed_bits || Traits::Variant::has_mask;

// Bits [first, first + num_lanes) of a packed mask. Bytes at or after bit `end` are not read.
inline MaskLanes mask_bits(const u8* mask, i64 first, i64 end) {
  u32 bits = 0;
  const i64 last_byte = (min_of(first + num_lanes, end) - 1) >> 3;
  for (i64 byte = first >> 3; byte <= last_byte; ++byte) bits |= u32{mask[byte]} << 8 * (byte - (first >> 3));
  return mask_of_bits(bits >> (first & 7));
}

template <class Traits>
inline MaskLanes visible_tokens(const AttentionParams& params, const VariantArgs& args, const WorkItem& item,
                                const Row& row, i32 first, IntLanes tokens) {
  MaskLanes visible = between(count_from(first), row.begin, row.end);
  if constexpr (Traits::mask_source == MaskSource::packed_bits) {
    const i64 row_bit = i64{row.row} * item.kv_len;
    visible = visible & mask_bits(params.custom_mask + item.mask_offset, row_bit + first, row_bit + item.kv_len);
  }
  if constexpr (Traits::Variant::has_mask)
    visible = visible &
              vm::to_bool(Traits::Variant::mask(args, item.request, row.head, row.position, vm::Ints(tokens))).lanes;
  return visible;
}

}  // namespace flashpage::cpu
