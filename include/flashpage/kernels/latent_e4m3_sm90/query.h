// Q as two terms in e4m3. A term has four significant bits, and bf16 has eight, so that the sum of both is exact, but
// for elements below 2^-9 of the largest one.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/shared.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/load/latent_numbers.h"

namespace flashpage {

// Converts a warp's 16 rows where they are. Two panels of 16-bit elements, 128 columns, become a panel of their first
// terms and a panel of their second terms; the tail's panel holds both terms if tails are e4m3. Each row is
// divided by a power of two, so that its largest element is from 128 to 256, and has the sign of the unit's scale.
// Returns the scale of scores that is left of row lane % 16, which is positive: the softmax takes maxima before it
// scales.
template <class Traits>
struct E4m3Query {
  using Shared = E4m3Shared<Traits>;
  using Tile = typename Shared::Tile;
  static constexpr int panel_bytes = Tile::panel_bytes;
  static constexpr u32 magnitude_bits = 0x7fff7fff;
  static constexpr float least_scale = 1.17549435e-38f;  // 0 would make NaN of hidden scores

  FP_DEVICE static float convert(u32 query, int first_row, int lane, float scale) {
    const u32 exponent = largest_of(query, first_row, lane) >> 23;
    // 2^(e - 7) for a largest element from 2^e on, as e4m3 ends at 448; 1 if it is 0, close to that, infinite or NaN.
    const u32 power_exponent = exponent < 8 || exponent == 255 ? 127 : exponent - 7;
    const float inverse = copysignf(__uint_as_float((254 - power_exponent) << 23), scale);
#pragma unroll 1
    for (int panel = 0; panel < Shared::panels; ++panel)
      convert_columns<8>(query + panel * 2 * panel_bytes, first_row, lane, inverse);
    if constexpr (Shared::tail_panels > 0) {
      const u32 tail = query + 2 * Shared::panels * panel_bytes;
      if constexpr (Shared::has_e4m3_tail) {
        convert_columns<4>(tail, first_row, lane, inverse);
      } else {
        divide(tail, first_row, lane, inverse);
      }
    }
    const float mine = fabsf(scale) * __uint_as_float(power_exponent << 23);
    return mine < least_scale ? least_scale : mine;  // NaN stays
  }

 private:
  // The bits of the largest magnitude in row lane % 16, as fp32.
  FP_DEVICE static u32 largest_of(u32 query, int first_row, int lane) {
    u32 largest[4] = {};
#pragma unroll 1
    for (int panel = 0; panel < Tile::panels; ++panel)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 words[4];
        ptx::load_shared(words, query + Tile::chunk_offset(first_row + i * 4 + lane / 8, panel * 8 + lane % 8));
#pragma unroll
        for (const u32 word : words) {
          const u32 both = word & magnitude_bits;
          largest[i] = max_of(largest[i], max_of(both << 16, both & 0xffff0000));
        }
      }
    u32 own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2)
        largest[i] =
            max_of(largest[i], __float_as_uint(__shfl_xor_sync(0xffffffff, __uint_as_float(largest[i]), distance)));
      const u32 found = __float_as_uint(__shfl_sync(0xffffffff, __uint_as_float(largest[i]), lane % 4 * 8));
      if (lane % 16 / 4 == i) own = found;
    }
    return own;
  }

  // Converts the columns of two panels (`lanes` is 8), or of one whose second half then holds the second terms (4). A
  // lane has 16 columns of a row.
  template <int lanes>
  FP_DEVICE static void convert_columns(u32 panels, int first_row, int lane, float inverse) {
    constexpr int at_once = 32 / lanes;  // rows
    const int in_row = lane % lanes;
#pragma unroll 1
    for (int i = 0; i < 16; i += at_once) {
      const int row = first_row + i + lane / lanes;
      u32 words[2][4], terms[2][4];
      const float of_row = __shfl_sync(0xffffffff, inverse, row - first_row);
#pragma unroll
      for (int k = 0; k < 2; ++k) ptx::load_shared(words[k], panels + Tile::chunk_offset(row, in_row * 2 + k));
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) {
          const float2 low = ptx::unpack2<typename Shared::Cache>(words[k][pair]);
          const float2 high = ptx::unpack2<typename Shared::Cache>(words[k][pair + 1]);
          split(low, high, of_row, terms[0][k * 2 + pair / 2], terms[1][k * 2 + pair / 2]);
        }
      __syncwarp();  // all lanes of the row have read it, before terms replace it
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 to = panels + Tile::chunk_offset(row, in_row + k * lanes);
        ptx::store_shared(to, terms[k][0], terms[k][1], terms[k][2], terms[k][3]);
      }
      __syncwarp();
    }
  }
  // Four elements in, two words of four terms out.
  FP_DEVICE static void split(float2 low, float2 high, float inverse, u32& first, u32& second) {
    float numbers[4] = {low.x * inverse, low.y * inverse, high.x * inverse, high.y * inverse};
    first = ptx::pack4<E4m3>(numbers[0], numbers[1], numbers[2], numbers[3]);
    u32 pairs[2];
    ptx::widen4<Half, E4m3>(first, pairs[0], pairs[1]);
    const float2 taken[2] = {ptx::unpack2<Half>(pairs[0]), ptx::unpack2<Half>(pairs[1])};
    const float of_first[4] = {taken[0].x, taken[0].y, taken[1].x, taken[1].y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 0; NaN for an infinite number, which would become 448.
      const float zero_or_nan = numbers[i] - numbers[i];
      numbers[i] = numbers[i] - of_first[i] + zero_or_nan;
    }
    second = ptx::pack4<E4m3>(numbers[0], numbers[1], numbers[2], numbers[3]);
  }
  // Divides a panel of 16-bit elements.
  FP_DEVICE static void divide(u32 panel, int first_row, int lane, float inverse) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 at = panel + Tile::chunk_offset(first_row + i * 4 + lane / 8, lane % 8);
      u32 words[4];
      ptx::load_shared(words, at);
      scale_pairs<typename Shared::Cache, typename Shared::Cache>(words,
                                                                  __shfl_sync(0xffffffff, inverse, i * 4 + lane / 8));
      ptx::store_shared(at, words[0], words[1], words[2], words[3]);
    }
  }
};

}  // namespace flashpage
