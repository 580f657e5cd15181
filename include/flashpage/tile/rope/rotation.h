// Rotations of keys without a sine for each key: a token's rotation is that of its slot's first token (one sine and
// cosine for each column, spread over the lanes of a warp) times that of its place in the slot (a table of the CTA).
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/math.h"
#include "flashpage/tile/layout/shape.h"

namespace flashpage {

struct Rotation {
  float cosine, sine;

  // Columns i (low) and i + d / 2 (high) of a row after the rotation.
  FP_DEVICE float low(float low, float high) const { return low * cosine - high * sine; }
  FP_DEVICE float high(float low, float high) const { return high * cosine + low * sine; }
};

FP_DEVICE Rotation operator*(Rotation a, Rotation b) {
  return {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
}

// The rotations of two neighbouring columns of the lower half; the columns d / 2 further have the same ones.
struct alignas(16) RotationPair {
  Rotation first, second;
};

FP_DEVICE RotationPair operator*(const RotationPair& a, const RotationPair& b) {
  return {a.first * b.first, a.second * b.second};
}

// Rotates two neighbouring columns of each half in fp32.
template <class From, class To>
FP_DEVICE void rotate_pairs(u32& low, u32& high, const RotationPair& rotation) {
  float2 a = ptx::unpack2<From>(low), b = ptx::unpack2<From>(high);
  low = ptx::pack2<To>(rotation.first.low(a.x, b.x), rotation.second.low(a.y, b.y));
  high = ptx::pack2<To>(rotation.first.high(a.x, b.x), rotation.second.high(a.y, b.y));
}

// Revolutions a token of column i of the lower half of a row. Params are AttentionParams or RotatePagesParams.
template <class Params>
FP_DEVICE double revolutions_a_token(const Params& params, int i, int half) {
  constexpr double two_pi = 6.283185307179586;
  return exp2(log2(static_cast<double>(params.rope_theta)) * -i / half) / (params.rope_scale * two_pi);
}

// Revolutions a token as a sum of two floats: at position 2^20 one float would be off by some hundredths of a
// revolution.
struct Frequency {
  float high, low;

  FP_DEVICE static Frequency of(double revolutions) {
    const float high = static_cast<float>(revolutions);
    return {high, static_cast<float>(revolutions - high)};
  }
  // The revolutions at a position without the whole ones: from -0.5 to 0.5.
  FP_DEVICE float part_at(float position) const {
    float whole = rintf(position * high);
    return fmaf(position, low, fmaf(position, high, -whole));
  }
  FP_DEVICE Rotation at(float position) const {
    float part = part_at(position);
    Rotation rotation;
    sincospif(2.f * part, &rotation.sine, &rotation.cosine);
    return rotation;
  }
  // Error at most 2^-21, without a branch.
  FP_DEVICE Rotation approximately_at(float position) const {
    const float angle = part_at(position) * 6.283185307f;
    return {ptx::cos_approx(angle), ptx::sin_approx(angle)};
  }
};

// The rotations of the places in a slot, in shared memory. A step of the score product has eight columns of the lower
// half and their partners; a lane has two of them, of token lane / 4 of eight.
template <class Traits>
struct RotationTable {
  using S = Shape<Traits>;
  static constexpr int steps = S::key_steps;
  static constexpr int half = Traits::head_dim_qk / 2;
  // Whether columns are in the order in which ldmatrix distributes a chunk of 16 fp8 columns: four consecutive ones in
  // each lane, for two steps.
  static constexpr bool bytes_order = is_fp8<typename S::Cache> && half % 16 == 0;
  // Rotated fp8 keys are halved, because rotating the largest of e5m2 could exceed fp16's range.
  static constexpr float key_scale = is_fp8<typename S::Cache> ? 0.5f : 1.f;

  alignas(16) Frequency frequency[steps * 8];     // by column
  alignas(16) RotationPair rotations[steps][36];  // entry i: token i / 4, columns of lane i % 4; token 8 is not scaled

  FP_DEVICE static int column(int step, int lane) {
    return bytes_order ? step / 2 * 16 + lane % 4 * 4 + step % 2 * 2 : step * 8 + lane % 4 * 2;
  }

  FP_DEVICE RotationPair at(int column, float position) const {
    return {frequency[column].at(position), frequency[column + 1].at(position)};
  }

  // All `threads` call fill_frequencies and then fill_rotations, with a barrier after each.
  FP_DEVICE void fill_frequencies(const AttentionParams& params, int thread, int threads) {
    for (int i = thread; i < steps * 8; i += threads)
      frequency[i] = Frequency::of(revolutions_a_token(params, i, half));
  }
  FP_DEVICE void fill_rotations(int thread, int threads) {
    for (int i = thread; i < steps * 36; i += threads) {
      int step = i / 36, entry = i % 36;
      RotationPair pair = at(column(step, entry), static_cast<float>(entry / 4));
      float scale = entry < 32 ? key_scale : 1.f;
      pair.first = {pair.first.cosine * scale, pair.first.sine * scale};
      pair.second = {pair.second.cosine * scale, pair.second.sine * scale};
      rotations[step][entry] = pair;
    }
  }
};

// The rotations at one position: a lane computes those of every eighth step.
template <class Traits>
struct SpreadRotations {
  static constexpr int steps = RotationTable<Traits>::steps;
  RotationPair mine[ceil_div(steps, 8)];

  FP_DEVICE SpreadRotations(const RotationTable<Traits>& table, i32 position, int lane) {
#pragma unroll
    for (int i = 0; i < ceil_div(steps, 8); ++i) {
      int step = min_of(i * 8 + lane / 4, steps - 1);
      mine[i] = table.at(RotationTable<Traits>::column(step, lane), static_cast<float>(position));
    }
  }

  // The rotations of step `eighth` * 8 + `step`; called by the whole warp.
  FP_DEVICE RotationPair of(int eighth, int step, int lane) const {
    const RotationPair& pair = mine[eighth];
    auto take = [&](float x) { return __shfl_sync(0xffffffff, x, step * 4 + lane % 4); };
    return {{take(pair.first.cosine), take(pair.first.sine)}, {take(pair.second.cosine), take(pair.second.sine)}};
  }
};

}  // namespace flashpage
