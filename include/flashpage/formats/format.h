// Formats of K and V: how a cache stores their rows. Each of nvfp4.h and *_token.h is a format, which a row of
// flashpage/kernels/kv_formats.py names; this file has what they share.
//
// A row has numbers of `bits`; two of 4 bits share a byte, the low half first. An element is (number - zero point of
// its scale) * factor of its scale, times the float scales of the run (AttentionParams::k_scale, v_scale). A format is
// a struct with
//   bits                           4, 8 or (plain elements) 16 or 32; no other number is packed
//   scale_columns                  columns that share a scale (whole_row: all of a row; 0: no scales)
//   Scale, has_zero                a stored scale, and whether it holds a zero point
//   number(stored)                 the number that `bits` bits stand for
//   factor(scale), zero(scale)     as above
//   scale_for(least, most)         for appending: the scale of elements from least to most; NaN if `most` is NaN.
//                                  Without has_zero, cards pass 0 and the largest magnitude: use
//                                  larger_magnitude(least, most) alone
//   stored(element, scale)         for appending: the bits of an element
// and for cards, which convert to 16-bit elements (Wide: Half or Bf16),
//   widen<Wide>(word, pairs)       the numbers of 32 bits as pairs: i and i + 4 (4 bits), or 0, 1 and 2, 3 (8 bits)
//   scale_pair<Wide>(scale)        if groups of columns have scales: the factor of both elements of a pair
//   left_out                       the power of two that widen and scale_pair leave out: the product of all three is
//                                  the number times its scale or, without scale_pair, the number; 1: none
//   pack(words, elements, scale)   not needed, and faster than `stored`: the bits of eight elements
// and, with 4 bits, for decode_sm90, which computes in fp16 (tile/product/four_bits.h),
//   half_left_out                  the same for widen<Half> with scale_halves, or with zero_bits
//   scale_halves(four, a, b)       groups of columns: four scales as two pairs
//   zero_bits(scale)               the zero point of a scale's 32 bits, as an integer
//   widen<Half>(word, zeros, pairs)  widen, minus `zeros`, a pair of zero_bits
#pragma once
#include "flashpage/formats/numbers.h"
#include "flashpage/params/params.h"

namespace flashpage {

// Defined in ptx/convert.h, which the CPU does not have.
namespace ptx {
u32 FP_DEVICE byte_permute(u32 low, u32 high, u32 selector);
u32 FP_DEVICE mul_half2(u32 a, u32 b);
u32 FP_DEVICE mul_bf162(u32 a, u32 b);
u32 FP_DEVICE fma_half2(u32 a, u32 b, u32 c);
u32 FP_DEVICE fma_bf162(u32 a, u32 b, u32 c);
template <class Wide, class Narrow>
FP_DEVICE void widen4(u32 four, u32& pair0, u32& pair1);
FP_DEVICE float reciprocal_approx(float x);
// ptx/quantise.h
u32 FP_DEVICE pack_e2m1(const float (&numbers)[8], float factor);
u32 FP_DEVICE pack_uint4(const float (&numbers)[8], float factor, float zero);
void FP_DEVICE pack_int8(const float (&numbers)[8], float factor, u32 (&words)[2]);
void FP_DEVICE pack_e4m3(const float (&numbers)[8], float factor, u32 (&words)[2]);
}  // namespace ptx

inline constexpr int whole_row = 1 << 16;  // columns that share a scale: more than a row has

// Elements without scales of their own.
template <class Element>
struct PlainFormat {
  static constexpr int bits = 8 * sizeof(Element), scale_columns = 0;
  static constexpr bool has_zero = false;
  static constexpr float left_out = 1.f;
  struct Scale {};

  FP_HOST_DEVICE static float number(u32 stored) { return number_of<Element>(stored); }
  FP_HOST_DEVICE static float factor(Scale) { return 1.f; }
  FP_HOST_DEVICE static float zero(Scale) { return 0.f; }
  FP_HOST_DEVICE static Scale scale_for(float, float) { return {}; }
  FP_HOST_DEVICE static u32 stored(float element, Scale) { return bits_of<Element>(element); }

  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 (&pairs)[2]) {
    ptx::widen4<Wide, Element>(word, pairs[0], pairs[1]);
  }
};

template <class Format>
inline constexpr bool is_plain_format = Format::scale_columns == 0;

// Whether rows of it can be read and written: elements have whole bytes, and numbers with scales 4 or 8 bits.
template <class Format>
inline constexpr bool has_known_bits =
    Format::bits == 4 || Format::bits == 8 || (is_plain_format<Format> && Format::bits % 8 == 0);

template <class Format>
FP_HOST_DEVICE constexpr int row_bytes(int columns) {
  static_assert(has_known_bits<Format>, "numbers with scales have 4 or 8 bits, plain elements 8, 16 or 32");
  return columns * Format::bits / 8;
}
template <class Format>
FP_HOST_DEVICE constexpr int scales_of_row(int columns) {
  if constexpr (is_plain_format<Format>) return 0;
  return ceil_div(columns, Format::scale_columns);
}
template <class Format>
FP_HOST_DEVICE constexpr int scale_bytes(int columns) {
  return scales_of_row<Format>(columns) * static_cast<int>(sizeof(typename Format::Scale));
}

// The bits of a row's number.
template <class Format>
FP_HOST_DEVICE u32 stored_number(const u8* row, int column) {
  static_assert(has_known_bits<Format>, "numbers with scales have 4 or 8 bits, plain elements 8, 16 or 32");
  if constexpr (Format::bits == 4) {
    return row[column / 2] >> column % 2 * 4 & 15;
  } else if constexpr (Format::bits == 8) {
    return row[column];
  } else {
    u32 bits = 0;
    for (int i = 0; i < Format::bits / 8; ++i) bits |= u32{row[column * (Format::bits / 8) + i]} << 8 * i;
    return bits;
  }
}

// The formats of K and V. Traits that name none have plain elements.
template <class Traits>
struct FormatsOf {
  using Key = PlainFormat<typename Traits::StoredCache>;
  using Value = Key;
};
template <class Traits>
  requires requires { typename Traits::KeyFormat; }
struct FormatsOf<Traits> {
  using Key = typename Traits::KeyFormat;
  using Value = typename Traits::ValueFormat;
};
template <class Traits>
using KeyFormatOf = typename FormatsOf<Traits>::Key;
template <class Traits>
using ValueFormatOf = typename FormatsOf<Traits>::Value;

// Whether K and V are other than plain elements of one type. All strides of the cache are then in bytes, and
// Traits::StoredCache is u8.
template <class Traits>
inline constexpr bool has_formats =
    !is_same<KeyFormatOf<Traits>, ValueFormatOf<Traits>> || !is_plain_format<KeyFormatOf<Traits>>;

}  // namespace flashpage
