// append_quantised on the CPU: rows of new tokens are quantised to the formats of K and V as they are written. A "CTA"
// is one token.
#pragma once
#include "flashpage/cpu/convert.h"
#include "flashpage/formats/format.h"
#include "flashpage/params/latent_format.h"
#include "flashpage/params/variant.h"

namespace flashpage::cpu {

// Multiplies a row by a Hadamard matrix over the root of its size, which is a power of two.
template <int columns>
void rotate_by_hadamard(float (&row)[columns]) {
  for (int apart = 1; apart < columns; apart *= 2)
    for (int i = 0; i < columns; ++i) {
      if (i & apart) continue;
      const float first = row[i], second = row[i + apart];
      row[i] = first + second;
      row[i + apart] = first - second;
    }
  const float factor = 1.f / __builtin_sqrtf(columns);
  for (float& element : row) element *= factor;
}

// Writes the bits of elements [begin, end).
template <class Format>
void store_numbers(const float* elements, int begin, int end, typename Format::Scale scale, u8* row) {
  static_assert(has_known_bits<Format>, "numbers with scales have 4 or 8 bits, plain elements 8, 16 or 32");
  if constexpr (Format::bits == 4) {
    for (int i = begin; i < end; i += 2)
      row[i / 2] = static_cast<u8>(Format::stored(elements[i], scale) | Format::stored(elements[i + 1], scale) << 4);
  } else {
    constexpr int bytes = Format::bits / 8;
    for (int i = begin; i < end; ++i) {
      const u32 stored = Format::stored(elements[i], scale);
      __builtin_memcpy(row + i * bytes, &stored, bytes);
    }
  }
}

template <class Format, int columns>
void store_row(const float (&elements)[columns], u8* row, u8* scales) {
  constexpr int groups = max_of(1, scales_of_row<Format>(columns));
  for (int group = 0; group < groups; ++group) {
    const int begin = group * (groups > 1 ? Format::scale_columns : 0);
    const int end = groups > 1 ? min_of(columns, begin + Format::scale_columns) : columns;
    float least = elements[begin], most = elements[begin], widest = 0.f;
    for (int i = begin; i < end; ++i) {
      least = min_of(least, elements[i]);
      most = max_of(most, elements[i]);
      widest = larger_magnitude(widest, elements[i]);
    }
    if (widest != widest) most = widest;  // NaN, which comparisons may have left out
    const typename Format::Scale scale = Format::scale_for(least, most);
    store_numbers<Format>(elements, begin, end, scale, row);
    if constexpr (!is_plain_format<Format>) __builtin_memcpy(scales + group * sizeof scale, &scale, sizeof scale);
  }
}

// A row that is appended, and where it goes.
struct RowMove {
  const void* from;
  i64 offset;  // elements
  float divisor;
  bool rotates;
  const KvView& to;
  const KvView& scales;
};

template <class Given, class Format, int columns>
void append_row(const RowMove& row, const CacheSlot& slot, i32 head) {
  float elements[columns];
  const auto* from = static_cast<const Given*>(row.from) + row.offset;
  for (int i = 0; i < columns; i += num_lanes)
    store_first(elements + i, load_first(from + i, columns - i), columns - i);
  if constexpr ((columns & (columns - 1)) == 0)
    if (row.rotates) rotate_by_hadamard(elements);
  if (row.divisor != 1.f)
    for (float& element : elements) element /= row.divisor;
  u8* scales = nullptr;
  if constexpr (!is_plain_format<Format>)
    scales = const_cast<u8*>(byte_row(row.scales, slot)) + head * row.scales.head_stride;
  store_row<Format>(elements, const_cast<u8*>(byte_row(row.to, slot)) + head * row.to.head_stride, scales);
}

// The slot of a token; false if it has none.
inline bool slot_of_token(const AppendQuantisedParams& p, i32 token, CacheSlot& slot) {
  const i32 position = p.positions[token], request = p.batch_indices ? p.batch_indices[token] : 0;
  if (position < 0 || request < 0 || (!p.batch_indices && position >= p.num_slots)) return false;
  u32 page, in_page;
  p.page.divmod(position, page, in_page);
  slot = {p.batch_indices ? p.kv_indices[p.kv_indptr[request] + static_cast<i32>(page)] : static_cast<i32>(page),
          in_page};
  return true;
}

template <class Traits>
void append_quantised(const AppendQuantisedParams& p, const VariantArgs&, i32 token_begin, i32 token_end) {
  using Given = typename Traits::StoredQuery;
  const float key_divisor = p.k_scale ? p.key_divisor * *p.k_scale : p.key_divisor;
  const float value_divisor = p.v_scale ? p.value_divisor * *p.v_scale : p.value_divisor;
  for (i32 token = token_begin; token < token_end; ++token) {
    CacheSlot slot;
    if (!slot_of_token(p, token, slot)) continue;
    for (i32 head = 0; head < p.num_kv_heads; ++head) {
      const RowMove key = {p.append_key, token * p.key_row_stride + head * p.key_head_stride,
                           key_divisor,  p.rotates_keys != 0,
                           p.k,          p.key_scales};
      const RowMove value = {
          p.append_value, token * p.value_row_stride + head * p.value_head_stride, value_divisor, false, p.v,
          p.value_scales};
      append_row<Given, KeyFormatOf<Traits>, Traits::head_dim_qk>(key, slot, head);
      append_row<Given, ValueFormatOf<Traits>, Traits::head_dim_vo>(value, slot, head);
    }
  }
}

}  // namespace flashpage::cpu
