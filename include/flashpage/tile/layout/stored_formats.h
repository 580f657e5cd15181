// Tiles in shared memory and the formats of K and V (formats/format.h), if they hold rows as the cache stores
// them. Traits::Cache is then u8, and rows of K and V have their own numbers of bytes.
#pragma once
#include "flashpage/formats/format.h"

namespace flashpage {

template <class Traits>
inline constexpr bool tiles_have_formats = is_same<typename Traits::Cache, u8>;

template <class Traits, bool of_formats = tiles_have_formats<Traits>>
struct StoredFormats {
  using Element = typename Traits::Cache;
  using Key = PlainFormat<Element>;
  using Value = Key;
  static constexpr int key_columns = Traits::head_dim_qk, value_columns = Traits::head_dim_vo;  // elements of a row
  static constexpr int key_bits = 8 * sizeof(Element), value_bits = key_bits;                   // of a number
  static constexpr int key_scale_bytes = 0, value_scale_bytes = 0;                              // of a token
  static constexpr bool has_scales = false;
};

template <class Traits>
struct StoredFormats<Traits, true> {
  using Key = KeyFormatOf<Traits>;
  using Value = ValueFormatOf<Traits>;
  static constexpr int key_columns = row_bytes<Key>(Traits::head_dim_qk);
  static constexpr int value_columns = row_bytes<Value>(Traits::head_dim_vo);
  static constexpr int key_bits = Key::bits, value_bits = Value::bits;
  static constexpr int key_scale_bytes = scale_bytes<Key>(Traits::head_dim_qk);
  static constexpr int value_scale_bytes = scale_bytes<Value>(Traits::head_dim_vo);
  static constexpr bool has_scales = key_scale_bytes + value_scale_bytes > 0;
};

// Whether a format has a scale for each group of columns, which multiplies elements, or one for each token, which
// multiplies scores and probabilities.
template <class Format>
inline constexpr bool has_group_scales = Format::scale_columns > 0 && Format::scale_columns < whole_row;
template <class Format>
inline constexpr bool has_token_scales = Format::scale_columns == whole_row;

}  // namespace flashpage
