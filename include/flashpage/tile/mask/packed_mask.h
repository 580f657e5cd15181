// The packed custom mask of one request, read 32 tokens of a row at a time; a row starts at any bit. For kernels and
// for tests on the host.
#pragma once
#include "flashpage/params/params.h"

namespace flashpage {

// Reads whole words, but none that ends after the request's last byte.
struct PackedMask {
  const u32* words;  // starting with the word that holds the request's first byte
  i64 first_bit;     // of the request, in that word
  i64 whole;         // words before the request's end
  u32 rest;          // the bytes after those words, then zeros
  i32 kv_len;

  PackedMask() = default;
  FP_HOST_DEVICE PackedMask(const u8* custom_mask, const WorkItem& item) : kv_len(item.kv_len) {
    const u64 address = reinterpret_cast<u64>(custom_mask) + item.mask_offset;
    words = reinterpret_cast<const u32*>(address & ~3ull);
    first_bit = static_cast<i64>(address & 3) * 8;
    const i64 bytes = (first_bit + static_cast<i64>(item.q_len) * kv_len + 7) >> 3;
    whole = bytes >> 2;
    rest = 0;
    for (int i = 0; i < 3; ++i)
      if (i < (bytes & 3)) rest |= reinterpret_cast<const u8*>(words + whole)[i] << 8 * i;
  }

  // Bit i: whether the row sees token first_token + i. Bits beyond the row's last token are undefined.
  FP_HOST_DEVICE u32 bits(i32 row, i32 first_token) const {
    const i64 bit = bit_of(row, first_token);
    return join(word(bit >> 5), word((bit >> 5) + 1), bit);
  }

  // Sets some bit of `visible` if the row sees one of `count` tokens, and of `hidden` if it does not see one.
  FP_HOST_DEVICE void classify(i32 row, i32 first_token, i32 count, u32& visible, u32& hidden) const {
    const i64 bit = bit_of(row, first_token);
    i64 at = bit >> 5;
    u32 low = count > 0 ? word(at) : 0;
    for (; count > 0; count -= 32) {
      const u32 high = word(++at), found = join(low, high, bit), exist = count >= 32 ? ~0u : ~(~0u << count);
      visible |= found & exist;
      hidden |= ~found & exist;
      low = high;
    }
  }

 private:
  FP_HOST_DEVICE i64 bit_of(i32 row, i32 token) const { return first_bit + static_cast<i64>(row) * kv_len + token; }
  FP_HOST_DEVICE u32 word(i64 i) const { return i < whole ? words[i] : i == whole ? rest : 0; }
  FP_HOST_DEVICE static u32 join(u32 low, u32 high, i64 bit) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (bit & 31));
  }
};

}  // namespace flashpage
