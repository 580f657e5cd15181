// Rows of K or V in a format (formats/format.h): copied to shared memory as they are stored, with their scales, and
// converted there to a tile of 16-bit elements. Scales of column groups and zero points are applied to elements. The
// scale of a whole row is applied to the scores of K and to probabilities or, as fp16 has no room for their products
// with V's scales, to elements of V.
#pragma once
#include "flashpage/formats/format.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/load/copy.h"

namespace flashpage {

// Eight neighbouring numbers in order of columns, minus their zero point, as pairs. They are multiplied by the scales
// of column groups, without the format's `left_out`.
template <class Format, class Wide>
FP_DEVICE void widen_eight_of(u32 (&pairs)[4], const u32 (&words)[Format::bits / 4], typename Format::Scale scale) {
  if constexpr (Format::bits == 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = words[i];
  } else if constexpr (Format::bits == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 two[2];
      Format::template widen<Wide>(words[i], two);
      pairs[2 * i] = two[0], pairs[2 * i + 1] = two[1];
    }
  } else {
    u32 apart[4];  // numbers i and i + 4
    Format::template widen<Wide>(words[0], apart);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = ptx::byte_permute(apart[i % 2 * 2], apart[i % 2 * 2 + 1], i < 2 ? 0x5410 : 0x7632);
  }
  constexpr bool has_factor = requires { Format::template scale_pair<Wide>(scale); };
  static_assert(has_factor == has_group_scales<Format>, "scales of column groups, and no others, need scale_pair");
  static_assert(!has_factor || !Format::has_zero, "scales of column groups have no zero points");
  if constexpr (has_factor || Format::has_zero) {
    constexpr u32 one = is_same<Wide, Half> ? 0x3c003c00 : 0x3f803f80;
    u32 factor = one, offset = 0x80008000;  // -0
    if constexpr (has_factor) factor = Format::template scale_pair<Wide>(scale);
    if constexpr (Format::has_zero) offset = ptx::pack2<Wide>(-Format::zero(scale), -Format::zero(scale));
#pragma unroll
    for (u32& pair : pairs)
      pair = is_same<Wide, Half> ? ptx::fma_half2(pair, factor, offset) : ptx::fma_bf162(pair, factor, offset);
  }
}

// `columns` of a row's `all` columns; `last`: the last column at which a tile may begin.
template <class Format, int columns, int all = columns, int last = 0>
struct FormatRows {
  // Whether groups of columns have scales, or whole rows.
  static constexpr bool has_groups = Format::scale_columns > 0 && Format::scale_columns < whole_row;
  static constexpr bool has_row_scale = Format::scale_columns == whole_row;
  static constexpr int values = row_bytes<Format>(columns), scales = scale_bytes<Format>(columns);
  static constexpr int scales_at = round_up(values, 8);
  // A lane converts one part of a row at a time: bytes, parts of a row, and chunks of eight elements in one.
  static constexpr int part_bytes = values % 16 ? 8 : 16, parts = values / part_bytes;
  static constexpr int eights = part_bytes / Format::bits;
  // An odd number of 16 bytes spreads rows over banks.
  static constexpr int pitch = (ceil_div(scales_at + scales, 16) | 1) * 16;
  static_assert(columns % 8 == 0 && values % 8 == 0);

  static constexpr int bytes(int tokens) { return tokens * pitch; }

  // The addresses of a column's number and scale in a row.
  FP_DEVICE static constexpr int value_offset(int column) { return row_bytes<Format>(column); }
  FP_DEVICE static constexpr int scale_offset(int column) {
    if constexpr (has_groups) return column / Format::scale_columns * int(sizeof(typename Format::Scale));
    return 0;
  }

  // Issues one thread's share of a tile's copies. values_of(row), scales_of(row): a row's addresses in the cache, of
  // numbers on 8 bytes, which are those of rows with their scales after them; every thread calls them equally often,
  // with rows below `tokens`. Rows from `count` on become zero.
  template <int tokens, int threads>
  FP_DEVICE static void copy(u8* to, int thread, int count, auto&& values_of, auto&& scales_of) {
    copy_part<tokens, threads, values, chunk_of(values | row_bytes<Format>(all), 16)>(to, thread, count, values_of);
    if constexpr (scales > 0)
      copy_part<tokens, threads, scales, chunk_of(scales | scale_bytes<Format>(all) | scale_offset(last), 8)>(
          to + scales_at, thread, count, scales_of);
  }

  // Converts one thread's share of a tile that has arrived, to rows of `To` from `first_row` on. Eight neighbouring
  // lanes have a part of eight rows each, so that neither loads nor stores meet in a bank. The scales of whole rows
  // multiply elements only if `scales_rows`. `tokens`: a multiple of eight.
  template <class To, class Wide, bool scales_rows, int threads>
  FP_DEVICE static void convert(const u8* from, int tokens, int thread, u32 to, int first_row = 0) {
    constexpr int groups = threads / 8, lane_rows = groups / parts * 8;
    if constexpr (groups % parts == 0) {  // a lane has the same part of each of its rows
      const int part_index = thread / 8 % parts, row = thread / 8 / parts * 8 + thread % 8;
      const u8* stored = from + row * pitch;
      const u32 place = To::lane_address(to, first_row + row, part_index * eights);
#pragma unroll 1
      for (int i = 0; row + i < tokens; i += 2 * lane_rows) {
        LanePart first, second;  // loaded together
        const bool has_second = tokens % (2 * lane_rows) == 0 || row + i + lane_rows < tokens;
        first.load(stored + i * pitch, part_index);
        if (has_second) second.load(stored + (i + lane_rows) * pitch, part_index);
        first.template convert<To, Wide, scales_rows>(place + i * To::stride);
        if (has_second) second.template convert<To, Wide, scales_rows>(place + (i + lane_rows) * To::stride);
      }
    } else {
#pragma unroll 2
      for (int i = thread / 8; i < tokens / 8 * parts; i += groups) {
        const int row = i / parts * 8 + thread % 8;
        LanePart one;
        one.load(from + row * pitch, i % parts);
        one.template convert<To, Wide, scales_rows>(To::lane_address(to, first_row + row, i % parts * eights));
      }
    }
  }

  // Multiplies a warp's scores, or probabilities, by the scales of whole rows.
  template <int row_tiles, int token_tiles>
  FP_DEVICE static void scale_tokens(float (&scores)[row_tiles][token_tiles][4], const u8* from, int lane) {
    if constexpr (has_row_scale) {
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float factor = Format::factor(scale_of(from + (n * 8 + lane % 4 * 2 + e) * pitch, 0));
#pragma unroll
          for (int m = 0; m < row_tiles; ++m) scores[m][n][e] *= factor, scores[m][n][e + 2] *= factor;
        }
    }
  }

 private:
  FP_DEVICE static typename Format::Scale scale_of(const u8* stored, int column) {
    return *reinterpret_cast<const typename Format::Scale*>(stored + scales_at + scale_offset(column));
  }
  template <class Wide>
  FP_DEVICE static void multiply_pairs(u32 (&pairs)[4], float factor) {
#pragma unroll
    for (u32& pair : pairs) {
      const float2 two = ptx::unpack2<Wide>(pair);
      pair = ptx::pack2<Wide>(two.x * factor, two.y * factor);
    }
  }

  // A lane's part of a row as it is stored, in registers.
  struct LanePart {
    static constexpr int scale_eights = has_groups ? Format::scale_columns / 8 : eights;  // that share a scale
    static constexpr int scales = ceil_div(eights, scale_eights);
    static_assert(eights % scale_eights == 0 || scale_eights % eights == 0, "a lane's first column begins a scale");
    u32 words[part_bytes / 4];
    typename Format::Scale scale[scales];

    FP_DEVICE void load(const u8* stored, int index) {
      load_words(words, stored + index * part_bytes);
      if constexpr (FormatRows::scales > 0) {
#pragma unroll
        for (int i = 0; i < scales; ++i) scale[i] = scale_of(stored, (index * eights + i * scale_eights) * 8);
      }
    }
    // `place`: lane_address of the part's first chunk.
    template <class To, class Wide, bool scales_rows>
    FP_DEVICE void convert(u32 place) const {
#pragma unroll
      for (int i = 0; i < eights; ++i) {
        u32 pairs[4];
        widen_eight_of<Format, Wide>(pairs,
                                     reinterpret_cast<const u32(&)[Format::bits / 4]>(words[i * Format::bits / 4]),
                                     scale[i / scale_eights]);
        if constexpr (scales_rows && has_row_scale)
          multiply_pairs<Wide>(pairs, Format::factor(scale[i / scale_eights]));
        ptx::store_shared(To::at_chunk(place, i), pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  };

  // The largest power of two up to `most` that divides all of the numbers that make up `together`; 1 if a copy of four
  // bytes would be too large.
  FP_HOST_DEVICE static constexpr int chunk_of(int together, int most) {
    while (most > 1 && together % most != 0) most /= 2;
    return most >= 4 ? most : 1;
  }

  template <int tokens, int threads, int row_bytes, int chunk>
  FP_DEVICE static void copy_part(u8* to, int thread, int count, auto&& source) {
    constexpr int chunks = row_bytes / chunk, total = tokens * chunks;
#pragma unroll 4
    for (int first = 0; first < total; first += threads) {
      const int i = first + thread, row = total % threads == 0 ? i / chunks : min_of(i / chunks, tokens - 1);
      const u8* from = source(row);
      if (total % threads != 0 && i >= total) continue;
      from += i % chunks * chunk;
      u8* place = to + row * pitch + i % chunks * chunk;
      if constexpr (chunk == 16) {
        copy_on_eight(ptx::shared_address(place), from, row < count);
      } else if constexpr (chunk >= 4) {
        ptx::cp_async<chunk>(ptx::shared_address(place), from, row < count);
      } else {
        *place = row < count ? *from : 0;
      }
    }
  }

  template <int count>
  FP_DEVICE static void load_words(u32 (&words)[count], const u8* from) {
    if constexpr (count == 1) {
      words[0] = *reinterpret_cast<const u32*>(from);
    } else if constexpr (count == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[0] = two.x, words[1] = two.y;
    } else {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
  }
};

// K and V of a kernel that multiplies 16-bit tiles or, if its cache has no formats, tiles of the cache's type. Sizes
// are bytes of shared memory; `finished` is a tile for keys that are rotated, or for converted keys and then values.
template <class Traits, bool converts = has_formats<Traits>>
struct StoredRows {
  using S = Shape<Traits>;
  static constexpr bool scales_probabilities = false;
  static constexpr int key_bytes(int tokens) { return S::CacheKeyRows::bytes(tokens); }
  static constexpr int value_bytes(int tokens) { return S::ValueRows::bytes(tokens); }
  static constexpr int finished_bytes(int tokens) { return S::rotate ? S::KeyRows::bytes(tokens) : 16; }
};
template <class Traits>
struct StoredRows<Traits, true> {
  using S = Shape<Traits>;
  using Element = typename S::Cache;
  static constexpr int last_column = S::value_passes == 1 ? 0 : Traits::head_dim_vo - S::value_columns;
  using Keys = FormatRows<KeyFormatOf<Traits>, Traits::head_dim_qk>;
  using Values = FormatRows<ValueFormatOf<Traits>, S::value_columns, Traits::head_dim_vo, last_column>;
  static constexpr bool scales_probabilities = Values::has_row_scale && !is_same<typename S::Probability, Half>;
  static_assert(sizeof(Element) == 2);

  static constexpr int key_bytes(int tokens) { return Keys::bytes(tokens); }
  static constexpr int value_bytes(int tokens) { return Values::bytes(tokens); }
  static constexpr int finished_bytes(int tokens) {
    return max_of(S::KeyRows::bytes(tokens), S::ValueRows::bytes(tokens));
  }

  // Converts a tile by `threads`; they wait for each other afterwards.
  template <int tokens, int threads>
  FP_DEVICE static void convert_keys(const u8* from, u8* to, int thread) {
    Keys::template convert<typename S::KeyRows, Element, false, threads>(from, tokens, thread, ptx::shared_address(to));
    zero_padding<Element, Traits::head_dim_qk>(to, tokens, thread, threads);  // values were there
  }
  template <int tokens, int threads>
  FP_DEVICE static void convert_values(const u8* from, u8* to, int thread) {
    Values::template convert<typename S::ValueRows, Element, !scales_probabilities, threads>(from, tokens, thread,
                                                                                             ptx::shared_address(to));
  }
};

}  // namespace flashpage
