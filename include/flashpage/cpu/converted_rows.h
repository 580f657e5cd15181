// Latent rows in fp8, converted to the operands of the products.
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
  const auto scale_of = [&](int block) {  // rows start anywhere
    typename Format::Scale scale;
    __builtin_memcpy(&scale, parts.scales + block * sizeof scale, sizeof scale);
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

// Fills `rows` with the addresses of the converted rows, and of zeros after them; returns it.
template <class Traits, class Operand>
const Operand* const* converted_rows(const Work<Traits>& work, const Operand* (&rows)[Traits::tile_kv]) {
  const i32 count = work.tile.count;
  for (i32 i = 0; i < count; ++i) rows[i] = work.made_keys + i * Traits::head_dim_qk;
  for (i32 i = count; i < round_up(count, num_lanes); ++i) rows[i] = zero_row<Operand>;
  return rows;
}

}  // namespace flashpage::cpu
