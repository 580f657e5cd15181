// Keys and values of four bits on their way to the tensor cores (formats/format.h). A word of eight numbers becomes
// four pairs, which are the halves of two k16 steps of keys, or of four n8 tiles of values; scales of column groups and
// zero points are applied to them.
//
// A lane's word of a key, from ldmatrix, has eight consecutive columns. Pairs have columns i and i + 4 of them, and Q's
// fragments have the same order (FourBitQuery). A lane's word of values, from the transposing ldmatrix, has four
// columns of two neighbouring tokens; so tile i of four has every fourth column of 32, from column i on.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/layout/shape.h"

namespace flashpage {

// A lane applies these to the words of four n8 tiles of keys: each of them has one token of the lane.
template <class Traits>
struct FourBitKeys {
  using S = Shape<Traits>;
  using Format = typename S::Formats::Key;
  static constexpr int bytes = S::Formats::key_scale_bytes, words = bytes / 4;
  static constexpr bool has_groups = has_group_scales<Format>;
  static_assert(!has_groups || (Format::scale_columns == 16 && sizeof(typename Format::Scale) == 1 && words <= 2));

  u32 scales[4][has_groups ? words : 1];  // of two chunks of 32 columns in each pair
  u32 zeros[4];

  // `from`: shared address of the first token's scales.
  FP_DEVICE FourBitKeys(u32 from, int lane) {
    from += lane / 4 * bytes;
    const u32 own = lane % 4 / 2;  // a chunk has two groups of columns
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      if constexpr (has_groups && words == 2) {
        u32 of_token[2];
        ptx::load_shared(of_token, from + tile * 8 * bytes);
        Format::scale_halves(ptx::byte_permute(of_token[0], of_token[1], 0x6420 + 0x1111 * own), scales[tile][0],
                             scales[tile][1]);
      } else if constexpr (has_groups) {
        u32 other;
        Format::scale_halves(ptx::byte_permute(ptx::load_shared(from + tile * 8 * bytes), 0, 0x4420 + 0x0011 * own),
                             scales[tile][0], other);
      } else if constexpr (Format::has_zero) {
        const u32 zero = Format::zero_bits(ptx::load_shared(from + tile * 8 * bytes));
        zeros[tile] = zero | zero << 16;
      }
    }
  }

  FP_DEVICE void widen(u32 word, u32 (&pairs)[4], int tile, int chunk) const {
    if constexpr (has_groups) {
      Format::template widen<Half>(word, pairs);
#pragma unroll
      for (u32& pair : pairs) pair = ptx::mul_half2_by(pair, scales[tile][chunk / 2], chunk % 2);
    } else {
      Format::template widen<Half>(word, zeros[tile], pairs);
    }
  }
};

// What a lane applies to the words of 16 tokens of values: it has two tokens of the first eight, and two of the others.
template <class Traits>
struct FourBitValues {
  using S = Shape<Traits>;
  using Format = typename S::Formats::Value;
  static constexpr int bytes = S::Formats::value_scale_bytes, words = bytes / 4;
  static constexpr bool has_groups = has_group_scales<Format>;
  static_assert(!has_groups || (Format::scale_columns == 16 && sizeof(typename Format::Scale) == 1 && words <= 2));

  u32 scales[2][has_groups ? words * 2 : 1];  // of a chunk of 32 columns in each, both tokens
  u32 zeros[2];

  // `from`: shared address of the first token's scales.
  FP_DEVICE FourBitValues(u32 from, int lane) {
    from += lane % 4 * 2 * bytes;
    const u32 own = 0x6240 + 0x1111 * (lane / 16);  // a chunk has two groups of columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 address = from + half * 8 * bytes;
      if constexpr (has_groups && words == 2) {
        u32 of_tokens[4];
        ptx::load_shared(of_tokens, address);
        Format::scale_halves(ptx::byte_permute(of_tokens[0], of_tokens[2], own), scales[half][0], scales[half][1]);
        Format::scale_halves(ptx::byte_permute(of_tokens[1], of_tokens[3], own), scales[half][2], scales[half][3]);
      } else {
        u32 of_tokens[2];
        ptx::load_shared(of_tokens, address);
        if constexpr (has_groups) {
          Format::scale_halves(ptx::byte_permute(of_tokens[0], of_tokens[1], own), scales[half][0], scales[half][1]);
        } else {
          zeros[half] = Format::zero_bits(of_tokens[0]) | Format::zero_bits(of_tokens[1]) << 16;
        }
      }
    }
  }

  FP_DEVICE void widen(u32 word, u32 (&pairs)[4], int half, int chunk) const {
    if constexpr (has_groups) {
      Format::template widen<Half>(word, pairs);
#pragma unroll
      for (u32& pair : pairs) pair = ptx::mul_half2(pair, scales[half][chunk]);
    } else {
      Format::template widen<Half>(word, zeros[half], pairs);
    }
  }
};

// Q for keys of four bits: fragments of the two steps of a chunk of 32 columns.
template <class Traits>
struct FourBitQuery {
  using Rows = typename Shape<Traits>::QueryRows;
  static_assert(Traits::head_dim_qk % 32 == 0);

  // `query`: shared address of the warp's first row.
  FP_DEVICE static void load(u32 (&first)[1][4], u32 (&second)[1][4], u32 query, int lane, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 words[4];  // eight consecutive columns
      ptx::load_shared(words, query + Rows::chunk_offset(lane / 4 + half * 8, chunk * 4 + lane % 4));
      first[0][half] = ptx::byte_permute(words[0], words[2], 0x5410);
      first[0][half + 2] = ptx::byte_permute(words[0], words[2], 0x7632);
      second[0][half] = ptx::byte_permute(words[1], words[3], 0x5410);
      second[0][half + 2] = ptx::byte_permute(words[1], words[3], 0x7632);
    }
  }
};

// As multiply_keys. `scales`: shared address of the scales of the tile's first token.
template <class Traits, class QueryFragment, int token_tiles>
FP_DEVICE void multiply_four_bit_keys(float (&scores)[1][token_tiles][4], u32 key, u32 scales, int lane,
                                      QueryFragment&& query_fragment) {
  using Rows = typename Shape<Traits>::KeyRows;
  static_assert(token_tiles % 4 == 0);
#pragma unroll
  for (int n = 0; n < token_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[0][n][e] = 0.f;
  const u32 lane_address = Rows::lane_address(key, lane, 0);
#pragma unroll
  for (int n = 0; n < token_tiles; n += 4) {
    const FourBitKeys<Traits> keys(scales + n * 8 * FourBitKeys<Traits>::bytes, lane);
#pragma unroll
    for (int chunk = 0; chunk < Rows::chunks; ++chunk) {
      u32 words[4], pairs[4][4];
      ptx::ldmatrix_x4(words, Rows::at_chunk(lane_address, chunk) + n * 8 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 4; ++i) keys.widen(words[i], pairs[i], i, chunk);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        u32 a[1][4];
        query_fragment(a, 2 * chunk + step);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::mma_m16n8k16<Half>(scores[0][n + i], a[0], pairs[i][2 * step], pairs[i][2 * step + 1]);
      }
    }
  }
}

// As multiply_values. `fragments`: probabilities of 16 tokens each; `scales`: as above.
template <class Traits, int value_tiles, int steps>
FP_DEVICE void multiply_four_bit_values(float (&values)[1][value_tiles][4], const u32 (&fragments)[steps][1][4],
                                        u32 value, u32 scales, int lane) {
  using Rows = typename Shape<Traits>::ValueRows;
  static_assert(value_tiles == 4 * Rows::chunks && Rows::chunks % 2 == 0);
  const u32 lane_address = Rows::lane_address(value, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const FourBitValues<Traits> of_tokens(scales + step * 16 * FourBitValues<Traits>::bytes, lane);
#pragma unroll
    for (int chunk = 0; chunk < Rows::chunks; chunk += 2) {
      u32 words[4];
      ptx::ldmatrix_x4_trans(words, Rows::at_chunk(lane_address, chunk) + step * 16 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 low[4], high[4];
        of_tokens.widen(words[2 * i], low, 0, chunk + i);
        of_tokens.widen(words[2 * i + 1], high, 1, chunk + i);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile)
          ptx::mma_m16n8k16<Half>(values[0][4 * (chunk + i) + tile], fragments[step][0], low[tile], high[tile]);
      }
    }
  }
}

}  // namespace flashpage
