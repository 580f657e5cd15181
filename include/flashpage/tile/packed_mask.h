// The packed custom mask of one request, 32 tokens of a row at a time: rows start at any bit. For kernels, and for
// tests on the host.
#pragma once
#include "flashpage/params.h"

namespace flashpage {

// Reads whole words: none that reaches beyond the request's last byte.
struct PackedMask {
  const u32* words;  // from the word on that holds the request's first byte
  i64 first_bit;     // of the request, in that word
  i64 whole;         // words before the request's end
  int rest_bytes;    // behind them
  u32 rest;          // those, then zeros
  i32 kv_len;

  PackedMask() = default;
  FP_HOST_DEVICE PackedMask(const u8* custom_mask, const WorkItem& item) : kv_len(item.kv_len) {
    const u64 address = reinterpret_cast<u64>(custom_mask) + item.mask_offset;
    words = reinterpret_cast<const u32*>(address & ~3ull);
    first_bit = static_cast<i64>(address & 3) * 8;
    const i64 bytes = (first_bit + static_cast<i64>(item.q_len) * kv_len + 7) >> 3;
    whole = bytes >> 2;
    rest_bytes = static_cast<int>(bytes & 3);
    rest = read_rest();
  }

  // Bit i: whether the row sees token first_token + i. Bits beyond the row's last token mean nothing.
  FP_HOST_DEVICE u32 bits(i32 row, i32 first_token) const {
    const i64 bit = bit_of(row, first_token);
    return join(word(bit >> 5), word((bit >> 5) + 1), bit);
  }

  // Where the first of them lies: the number of its word, and its place there, which takes less to find than a mask.
  FP_HOST_DEVICE i64 word_of(i32 row, i32 first_token) const { return bit_of(row, first_token) >> 5; }
  FP_HOST_DEVICE static u32 place_in_word(const u8* custom_mask, const WorkItem& item, i32 row, i32 first_token) {
    const u32 first_byte = static_cast<u32>(reinterpret_cast<u64>(custom_mask) + item.mask_offset);
    return (first_byte * 8 + static_cast<u32>(row) * item.kv_len + first_token) & 31;
  }
  // Zero behind the request.
  FP_HOST_DEVICE u32 word(i64 i) const { return i < whole ? words[i] : i == whole ? rest : 0; }
  FP_HOST_DEVICE u32 read_rest() const {
    u32 found = 0;
    for (int i = 0; i < 3; ++i)
      if (i < rest_bytes) found |= reinterpret_cast<const u8*>(words + whole)[i] << 8 * i;
    return found;
  }

  // From bit `place` of the first word on, counted in words.
  FP_HOST_DEVICE static u32 join(u32 low, u32 high, i64 place) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (place & 31));
  }

 private:
  FP_HOST_DEVICE i64 bit_of(i32 row, i32 token) const { return first_bit + static_cast<i64>(row) * kv_len + token; }
};

}  // namespace flashpage
