// Rows that are stored in formats (formats/format.h), and latent rows in fp8, converted to the operands of the
// products.
#pragma once
#include "flashpage/cpu/work.h"

namespace flashpage::cpu {

inline float latent_scale(float scale) { return scale; }
inline float latent_scale(PowerOfTwo scale) { return __builtin_bit_cast(float, u32{scale.exponent} << 23); }

template <class Traits>
void convert_row(const AttentionParams& params, const LatentParts& parts, typename Work<Traits>::Operand* to) {
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  using Rest = typename Format::Rest;
  const bool has_scales = Format::has_scales(params);
  const float common = Format::common_scale(params), rest = Format::rest_scale(params);
  const auto scale_of = [&](int group) {  // rows start anywhere
    typename Format::Scale scale;
    __builtin_memcpy(&scale, parts.scales + group * sizeof scale, sizeof scale);
    return latent_scale(scale);
  };
  const auto* quantised = reinterpret_cast<const E4m3*>(parts.quantised);
  for (int i = 0; i < Format::quantised; i += num_lanes) {
    const float scale = has_scales ? scale_of(i / Format::scale_columns) : common;
    store_first(to + i, load_first(quantised + i, Format::quantised - i) * scale, Format::quantised - i);
  }
  const auto* others = reinterpret_cast<const Rest*>(parts.rest);
  for (int i = 0; i < Format::rest; i += num_lanes)
    store_first(to + Format::quantised + i, load_first(others + i, Format::rest - i) * rest, Format::rest - i);
}

// Converts the rows of the tile; those that do not exist become zeros.
template <class Traits>
void convert_tile(Work<Traits>& work) {
  constexpr int head_dim = Traits::head_dim_qk;
  for (i32 i = 0; i < work.tile.count; ++i) {
    const LatentParts& parts = work.tile.parts[i];
    auto* to = work.made_keys + i * head_dim;
    if (parts.quantised) {
      convert_row<Traits>(work.params, parts, to);
    } else {
      __builtin_memset(to, 0, head_dim * sizeof *to);
    }
  }
}

// Converts the numbers that share a scale.
template <class Format>
void convert_block(const u8* row, int begin, int end, float factor, float zero, float* to) {
#pragma GCC ivdep
  for (int i = begin; i < end; ++i) to[i] = (Format::number(stored_number<Format>(row, i)) - zero) * factor;
}

// Converts a row of `columns` numbers; its scales may start anywhere.
template <class Format, int columns>
void convert_format(const u8* row, const u8* scales, float* to) {
  if constexpr (is_plain_format<Format>) {
    convert_block<Format>(row, 0, columns, 1.f, 0.f, to);
  } else {
    for (int group = 0; group < scales_of_row<Format>(columns); ++group) {
      typename Format::Scale scale;
      __builtin_memcpy(&scale, scales + group * sizeof scale, sizeof scale);
      const int begin = group * Format::scale_columns, end = min_of(columns, begin + Format::scale_columns);
      convert_block<Format>(row, begin, end, Format::factor(scale), Format::zero(scale), to);
    }
  }
}

template <class Traits>
void convert_format_keys(Work<Traits>& work) {
  constexpr int columns = Traits::head_dim_qk;
  const auto& tile = work.tile;
  for (i32 i = 0; i < tile.count; ++i)
    convert_format<KeyFormatOf<Traits>, columns>(tile.keys[i], tile.key_scales[i], work.made_keys + i * columns);
}

// Values of tokens that a custom mask hides from every row become zeros: their memory may hold NaN, and 0 * NaN is NaN.
template <class Traits, bool has_mask>
void convert_format_values(Work<Traits>& work) {
  constexpr int columns = Traits::head_dim_vo;
  const auto& tile = work.tile;
  for (i32 i = 0; i < tile.count; ++i) {
    float* to = work.made_values + i * columns;
    if (has_mask && !work.seen[i / num_lanes][i % num_lanes]) {
      __builtin_memset(to, 0, columns * sizeof *to);
    } else {
      convert_format<ValueFormatOf<Traits>, columns>(tile.values[i], tile.value_scales[i], to);
    }
  }
}

// Fills `rows` with the addresses of `count` rows of `columns` at `made`, and of zeros after them.
template <class Operand, int tokens>
void rows_at(const Operand* made, int columns, i32 count, const Operand* (&rows)[tokens]) {
  for (i32 i = 0; i < count; ++i) rows[i] = made + i * columns;
  for (i32 i = count; i < round_up(count, num_lanes); ++i) rows[i] = zero_row<Operand>;
}

}  // namespace flashpage::cpu
