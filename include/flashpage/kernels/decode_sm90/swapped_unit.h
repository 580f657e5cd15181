// One unit of at most eight packed rows over keys and values of four or eight bits: what DecodeCompute does for others,
// with products whose rows are tokens (tile/product/swapped.h).
#pragma once
#include "flashpage/kernels/decode_sm90/combine.h"
#include "flashpage/tile/load/half_query.h"
#include "flashpage/tile/product/swapped.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/token_scales.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

template <class Traits>
struct SwappedUnit {
  using S = Shape<Traits>;
  using Shared = DecodeShared<Traits>;
  using KeyFormat = typename S::Formats::Key;
  using ValueFormat = typename S::Formats::Value;
  static constexpr int tokens = Shared::tokens, row_tiles = tokens / 16, column_tiles = S::value_tiles / 2;
  static constexpr int teams = DecodeWarps<Traits>::teams;

  Shared& shared;
  const AttentionParams& params;
  const SlottedPlace& slotted;
  int rank, lane;
  const Unit unit = slotted.place.unit;
  float values[column_tiles][4] = {};
  float maximum[2], sum[2];  // of the lane's rows; sums are of this lane's scores
  float value_unit = 0.f;    // as ScaledProbabilities::unit

  FP_DEVICE SwappedUnit(Shared& shared, const AttentionParams& params, const SlottedPlace& slotted, int rank, int lane)
      : shared(shared), params(params), slotted(slotted), rank(rank), lane(lane) {
    const WarpRows rows{params, slotted.place.item, unit, 0, lane};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool has_sink = rank == 0 && params.sinks;
      maximum[e] = has_sink ? sink_of(rows, rows.clamped(row_of_lane(e))) : ptx::negative_infinity();
      sum[e] = lane / 4 == 0 && maximum[e] != ptx::negative_infinity() ? 1.f : 0.f;
    }
  }

  // `use`: uses of the ring before this unit. clear_values(values, first_token): DecodeCompute::clear_values.
  FP_DEVICE void run(const u8* query_tile, u32 use, auto&& clear_values) {
    SwappedQuery<Traits> query(ptx::shared_address(query_tile), lane);
    float scale = score_scale_of<Traits>(params, slotted.place.item, unit) * left_out<KeyFormat>();
    if constexpr (!is_same<Half, typename S::Query>)
      scale *= to_half_query(reinterpret_cast<u32(&)[S::key_steps * 2]>(query.fragment));
    const bool scales_rows = transforms_scores<Traits>(params, scale);
    const float softmax_scale = scales_first<Traits>(scale) ? 1.f : scale;

    for (int slot = rank; slot < slotted.slots; slot += teams) {
      shared.ring.wait_full(use + slot);
      if (threadIdx.x == DecodeWarps<Traits>::loading * 32) stamp_first<Traits>(params, Stamp::first_tile);
      const u32 at = shared.ring.slot(use + slot), tile = ptx::shared_address(shared.slots[at]);
      const i32 first = slotted.first_token + slot * tokens;
      // Values of eight bits may be NaN, which a probability of zero would not hide; those of four bits are finite.
      if constexpr (Traits::loader == Loader::boxes && S::Formats::value_bits == 8) {
        if (first < unit.kv_begin || first + tokens > unit.kv_end)
          clear_values(shared.slots[at] + Shared::key_bytes, first);
      }
      float scores[row_tiles][4];
      multiply_keys_swapped<Traits>(scores, query, tile, key_scales(at), lane);
      if constexpr (has_token_scales<KeyFormat>) scale_tokens<KeyFormat>(scores, key_scales(at), 1.f);
      if (scales_rows) scale_rows(scores, scales_first<Traits>(scale) ? scale : 1.f);
      if (first < unit.all_begin || first + tokens > unit.all_end) hide(scores, first);
      raise(scores, softmax_scale);
      exponentiate(scores, softmax_scale);
      if constexpr (has_token_scales<ValueFormat>) scale_values(scores, value_scales(at));
      multiply_values_swapped<Traits>(values, scores, tile + Shared::key_bytes, value_scales(at), lane);
      __syncwarp();
      if (lane == 0) shared.ring.release(use + slot);
    }
  }

  // Writes the state to the exchange, where combine.h reads it.
  FP_DEVICE void hand_over() {
    const float factor = (has_token_scales<ValueFormat> ? value_unit : 1.f) * left_out<ValueFormat>();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = row_of_lane(e);
      const float total = across_tokens(sum[e], [](float a, float b) { return a + b; });
      if (lane / 4 == 0) {
        shared.maximum[row][rank] = maximum[e];
        shared.sum[row][rank] = total;
      }
      if constexpr (S::Formats::value_bits == 8) {
#pragma unroll
        for (int chunk = 0; chunk < column_tiles; ++chunk) {
          auto& to = reinterpret_cast<float (&)[4]>(shared.exchange[rank][0][chunk][row * 4 + lane / 8]);
          to[lane / 4 % 2] = values[chunk][e] * factor;
          to[2 + lane / 4 % 2] = values[chunk][e + 2] * factor;
        }
      } else {
#pragma unroll
        for (int chunk = 0; chunk < column_tiles / 2; ++chunk) {
          const float (&first)[4] = values[2 * chunk], (&second)[4] = values[2 * chunk + 1];
          // In the order of for_each_column_of_pair for values of eight bits.
          shared.exchange[rank][0][2 * chunk + lane / 16][row * 4 + lane / 4 % 4] =
              make_float4(first[e] * factor, second[e] * factor, first[e + 2] * factor, second[e + 2] * factor);
        }
      }
    }
  }

 private:
  // Four bits are widened to numbers that lack a factor.
  template <class Format>
  FP_DEVICE static constexpr float left_out() {
    if constexpr (Format::bits == 4) {
      return Format::half_left_out;
    } else {
      return 1.f;
    }
  }
  FP_DEVICE u32 key_scales(u32 at) const {
    if constexpr (S::Formats::has_scales) {
      return shared.scales.keys(at);
    } else {
      return 0;
    }
  }
  FP_DEVICE u32 value_scales(u32 at) const {
    if constexpr (S::Formats::has_scales) {
      return shared.scales.values(at);
    } else {
      return 0;
    }
  }

  FP_DEVICE int row_of_lane(int e) const { return lane % 4 * 2 + e; }
  FP_DEVICE PackedRow packed_row(int e) const {
    return unpack_row(params, unit.kv_head, unit.first_row + min_of(row_of_lane(e), unit.num_rows - 1));
  }

  // Combines a number of each of the eight lanes that have the same rows.
  template <class Combine>
  FP_DEVICE static float across_tokens(float x, Combine&& combine) {
#pragma unroll
    for (int other = 4; other < 32; other *= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, other));
    return x;
  }
  FP_DEVICE static float maximum_across(float x) {
    return across_tokens(x, [](float a, float b) { return fmaxf(a, b); });
  }

  FP_DEVICE void scale_rows(float (&scores)[row_tiles][4], float by) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float factor = by;
      if (scales_heads(params)) factor *= head_scale_of(params, slotted.place.item, packed_row(e).head);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) scores[m][e] *= factor, scores[m][e + 2] *= factor;
    }
  }

  // Multiplies by the factors of tokens.
  template <class Format>
  FP_DEVICE void scale_tokens(float (&scores)[row_tiles][4], u32 scales, float by) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factor_of<Format>(scales, m, half) * by;
        scores[m][half * 2] *= factor, scores[m][half * 2 + 1] *= factor;
      }
  }
  template <class Format>
  FP_DEVICE float factor_of(u32 scales, int m, int half) const {
    const u32 bits = ptx::load_shared(scales + (m * 16 + half * 8 + lane / 4) * 4);
    return Format::factor(__builtin_bit_cast(typename Format::Scale, bits));
  }

  // As ScaledProbabilities::scale.
  FP_DEVICE void scale_values(float (&probabilities)[row_tiles][4], u32 scales) {
    float top = 0.f;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) top = fmaxf(top, fabsf(factor_of<ValueFormat>(scales, m, half)));
    if (__any_sync(0xffffffff, top > value_unit * ScaledProbabilities::headroom)) {
      const float next = ScaledProbabilities::unit_of(maximum_across(top));
      rescale(value_unit * ScaledProbabilities::inverse(next), value_unit * ScaledProbabilities::inverse(next));
      value_unit = next;
    }
    scale_tokens<ValueFormat>(probabilities, scales, value_unit > 0.f ? ScaledProbabilities::inverse(value_unit) : 0.f);
  }

  FP_DEVICE void hide(float (&scores)[row_tiles][4], i32 first) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const TokenRange range =
          visible_range(params, slotted.place.item, query_position(slotted.place.item, packed_row(e).row));
      const i32 mine = first + lane / 4;
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const i32 token = mine + m * 16 + half * 8;
          if (token < range.begin || token >= range.end) scores[m][half * 2 + e] = ptx::negative_infinity();
        }
    }
  }

  // As SoftmaxState::raise.
  FP_DEVICE void raise(const float (&scores)[row_tiles][4], float scale) {
    constexpr float headroom = 8.f;
    float top[2];
    bool outgrown = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[e] = fmaxf(scores[0][e], scores[0][e + 2]);
#pragma unroll
      for (int m = 1; m < row_tiles; ++m) top[e] = fmaxf(top[e], fmaxf(scores[m][e], scores[m][e + 2]));
      outgrown = outgrown || top[e] * scale > maximum[e] + headroom;
    }
    if (!__any_sync(0xffffffff, outgrown)) return;
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float next = fmaxf(maximum[e], maximum_across(top[e]) * scale);
      factor[e] = state_weight(maximum[e], next);
      maximum[e] = next;
      sum[e] *= factor[e];
    }
    rescale(factor[0], factor[1]);
  }
  FP_DEVICE void rescale(float first, float second) {
#pragma unroll
    for (int m = 0; m < column_tiles; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) values[m][e] *= e % 2 ? second : first;
  }

  FP_DEVICE void exponentiate(float (&scores)[row_tiles][4], float scale) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float origin = finite_or_zero(maximum[e]);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[m][half * 2 + e];
          score = ptx::exp2_approx(fmaf(score, scale, -origin));
          sum[e] += score;
        }
    }
  }
};

}  // namespace flashpage
