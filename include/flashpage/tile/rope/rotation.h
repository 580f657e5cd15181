// Rotations of keys without a sine for each key: a token's rotation is that of its slot's first token (one sine and
// cosine for each column, spread over the lanes of a warp) times that of its place in the slot (a table of the CTA).
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/math.h"
#include "flashpage/tile/layout/shape.h"

namespace flashpage {

struct Turn {
  float cosine, sine;

  // Columns i (low) and i + d / 2 (high) of a row after the rotation.
  FP_DEVICE float low(float low, float high) const { return low * cosine - high * sine; }
  FP_DEVICE float high(float low, float high) const { return high * cosine + low * sine; }
};

FP_DEVICE Turn operator*(Turn a, Turn b) {
  return {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
}

// The rotations of two neighbouring columns of the lower half; the columns d / 2 further have the same ones.
struct alignas(16) TurnPair {
  Turn first, second;
};

FP_DEVICE TurnPair operator*(const TurnPair& a, const TurnPair& b) { return {a.first * b.first, a.second * b.second}; }

// Rotates two neighbouring columns of each half in fp32.
template <class From, class To>
FP_DEVICE void turn_pairs(u32& low, u32& high, const TurnPair& turn) {
  float2 a = ptx::unpack2<From>(low), b = ptx::unpack2<From>(high);
  low = ptx::pack2<To>(turn.first.low(a.x, b.x), turn.second.low(a.y, b.y));
  high = ptx::pack2<To>(turn.first.high(a.x, b.x), turn.second.high(a.y, b.y));
}

// Revolutions a token of column i of the lower half of a row.
FP_DEVICE double turns_a_token(const AttentionParams& params, int i, int half) {
  constexpr double two_pi = 6.283185307179586;
  return exp2(log2(static_cast<double>(params.rope_theta)) * -i / half) / (params.rope_scale * two_pi);
}

// Revolutions a token as a sum of two floats: at position 2^20 one float would be off by some hundredths of a
// revolution.
struct Frequency {
  float high, low;

  FP_DEVICE static Frequency of(double turns) {
    const float high = static_cast<float>(turns);
    return {high, static_cast<float>(turns - high)};
  }
  // The revolutions at a position without the whole ones: from -0.5 to 0.5.
  FP_DEVICE float part_at(float position) const {
    float whole = rintf(position * high);
    return fmaf(position, low, fmaf(position, high, -whole));
  }
  FP_DEVICE Turn at(float position) const {
    float part = part_at(position);
    Turn turn;
    sincospif(2.f * part, &turn.sine, &turn.cosine);
    return turn;
  }
  // Error at most 2^-21, without a branch.
  FP_DEVICE Turn approximately_at(float position) const {
    const float angle = part_at(position) * 6.283185307f;
    return {ptx::cos_approx(angle), ptx::sin_approx(angle)};
  }
};

// The rotations of the places in a slot, in shared memory. A step of the score product has eight columns of the lower
// half and their partners; a lane has two of them, of token lane / 4 of eight.
template <class Traits>
struct TurnTable {
  using S = Shape<Traits>;
  static constexpr int steps = S::key_steps;
  static constexpr int half = Traits::head_dim_qk / 2;
  // Whether columns are in the order in which ldmatrix distributes a chunk of 16 fp8 columns: four consecutive ones in
  // each lane, for two steps.
  static constexpr bool bytes_order = is_fp8<typename S::Cache> && half % 16 == 0;
  // Rotated fp8 keys are halved, because rotating the largest of e5m2 could exceed fp16's range.
  static constexpr float key_scale = is_fp8<typename S::Cache> ? 0.5f : 1.f;

  alignas(16) Frequency frequency[steps * 8];  // by column
  alignas(16) TurnPair turns[steps][36];       // entry i: token i / 4, columns of lane i % 4; token 8 is not scaled

  FP_DEVICE static int column(int step, int lane) {
    return bytes_order ? step / 2 * 16 + lane % 4 * 4 + step % 2 * 2 : step * 8 + lane % 4 * 2;
  }

  FP_DEVICE TurnPair at(int column, float position) const {
    return {frequency[column].at(position), frequency[column + 1].at(position)};
  }

  // Both are called by all `threads`, with a barrier between them and after.
  FP_DEVICE void fill_frequencies(const AttentionParams& params, int thread, int threads) {
    for (int i = thread; i < steps * 8; i += threads) frequency[i] = Frequency::of(turns_a_token(params, i, half));
  }
  FP_DEVICE void fill_turns(int thread, int threads) {
    for (int i = thread; i < steps * 36; i += threads) {
      int step = i / 36, entry = i % 36;
      TurnPair pair = at(column(step, entry), static_cast<float>(entry / 4));
      float scale = entry < 32 ? key_scale : 1.f;
      pair.first = {pair.first.cosine * scale, pair.first.sine * scale};
      pair.second = {pair.second.cosine * scale, pair.second.sine * scale};
      turns[step][entry] = pair;
    }
  }
};

// The rotations at one position: a lane computes those of every eighth step.
template <class Traits>
struct SpreadTurns {
  static constexpr int steps = TurnTable<Traits>::steps;
  TurnPair mine[ceil_div(steps, 8)];

  FP_DEVICE SpreadTurns(const TurnTable<Traits>& table, i32 position, int lane) {
#pragma unroll
    for (int i = 0; i < ceil_div(steps, 8); ++i) {
      int step = min_of(i * 8 + lane / 4, steps - 1);
      mine[i] = table.at(TurnTable<Traits>::column(step, lane), static_cast<float>(position));
    }
  }

  // The rotations of step `eighth` * 8 + `step`; called by the whole warp.
  FP_DEVICE TurnPair of(int eighth, int step, int lane) const {
    const TurnPair& pair = mine[eighth];
    auto take = [&](float x) { return __shfl_sync(0xffffffff, x, step * 4 + lane % 4); };
    return {{take(pair.first.cosine), take(pair.first.sine)}, {take(pair.second.cosine), take(pair.second.sine)}};
  }
};

}  // namespace flashpage
