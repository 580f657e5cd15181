// Rotates rows in place in shared memory, by one warp: LLaMA's halves, columns i and i + d / 2.
#pragma once
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/swizzled_rows.h"
#include "flashpage/tile/rope/rotation.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Frequencies in shared memory, by column of the lower half.
template <int half>
struct RotationSteps {
  alignas(16) float high[half];          // Frequency::high
  alignas(16) float low[half];           // Frequency::low
  alignas(16) float twice_cosine[half];  // of the rotation by one token

  // Called by all `threads`; a barrier follows.
  FP_DEVICE void fill(const AttentionParams& params, int thread, int threads) {
    for (int i = thread; i < half; i += threads) {
      const double revolutions = revolutions_a_token(params, i, half);
      const Frequency frequency = Frequency::of(revolutions);
      high[i] = frequency.high;
      low[i] = frequency.low;
      twice_cosine[i] = static_cast<float>(2. * cospi(2. * revolutions));
    }
  }
};

// `Rows`: SwizzledRows of a tile. A lane has four neighbouring columns of each half and several consecutive rows.
template <class Element, class Rows, int columns>
struct RotatedRows {
  static constexpr int half = columns / 2, lane_columns = 4, row_lanes = half / lane_columns;
  static constexpr int lane_bytes = lane_columns * sizeof(Element);
  static constexpr int at_once =
      min_of(8, power_of_two_from(32 / row_lanes + 1) / 2);  // rows that a warp rotates at the same time
  static constexpr int batch = 4;                            // rows that a lane holds in registers
  using Steps = RotationSteps<half>;
  static_assert(sizeof(Element) == 2 && half % lane_columns == 0 && row_lanes <= 32);

  // The rotations of a lane's columns.
  struct Rotations {
    Rotation of[lane_columns];
  };
  struct Lane {
    u32 low, high;  // shared addresses of its first row's columns
    int row;        // counted from the warp's first
    int column;
    bool is_odd;  // `low` and `high` are exchanged
  };

  // Rotates `count` rows from `first` on; `position` is that of the first one. Each rotation follows from the two
  // before: rotation(n + 1) = 2 cos(step) rotation(n) - rotation(n - 1), which takes two instructions a column where
  // the complex product takes four. Its rounding error grows with the square of the steps: 2^-16 after 16 tokens, where
  // fp16 rounds by 2^-12.
  template <int count>
  FP_DEVICE static void rotate_keys(const Steps& steps, u32 tile, int first, i32 position) {
    constexpr int rows = count / at_once, run = min_of(rows, 8);
    static_assert(rows % run == 0 && 8 % run == 0 && run % 2 == 0 && rows <= 32);
    if (!has_columns()) return;
    const Lane lane = lane_of(tile, first, rows);
    const float begin = static_cast<float>(position + lane.row);
    Rotations rotations[2] = {rotations_at(steps, lane, begin), rotations_at(steps, lane, begin + 1.f)};
    float twice_cosine[lane_columns];
    load(twice_cosine, steps.twice_cosine, lane.column);
#pragma unroll 1
    for (int at = 0; at < rows * 128; at += run * 128) {
#pragma unroll
      for (int begin = 0; begin < run; begin += batch) {
        constexpr int some = min_of(run, batch);
        u32 low[some][2], high[some][2];
#pragma unroll
        for (int i = 0; i < some; ++i) {
          ptx::load_shared(low[i], address(lane.low, begin + i) + at);
          ptx::load_shared(high[i], address(lane.high, begin + i) + at);
        }
#pragma unroll
        for (int i = 0; i < some; ++i) {
          Rotations &rotation = rotations[i % 2], &next = rotations[(i + 1) % 2];
          apply(low[i], high[i], rotation);
          ptx::store_shared(address(lane.low, begin + i) + at, low[i][0], low[i][1]);
          ptx::store_shared(address(lane.high, begin + i) + at, high[i][0], high[i][1]);
#pragma unroll
          for (int c = 0; c < lane_columns; ++c)
            rotation.of[c] = {fmaf(twice_cosine[c], next.of[c].cosine, -rotation.of[c].cosine),
                              fmaf(twice_cosine[c], next.of[c].sine, -rotation.of[c].sine)};
        }
      }
    }
  }

  // Rotates packed rows of a unit; the rows of a group's heads share a position.
  template <int count>
  FP_DEVICE static void rotate_queries(const Steps& steps, u32 tile, int first, const AttentionParams& params,
                                       const Place& place) {
    constexpr int rows = count / at_once;
    if (!has_columns()) return;
    const Lane lane = lane_of(tile, first, rows);
    const i32 packed = place.unit.first_row + first + lane.row;
    Rotations rotations;
    i32 last = -1;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const i32 row = static_cast<i32>(params.group.div(packed + i));
      if (row != last) rotations = rotations_at(steps, lane, static_cast<float>(query_position(place.item, row)));
      last = row;
      // The lane's first row may be any of the swizzle's eight.
      const int in_tile = first + lane.row;
      const u32 swizzle = ((in_tile ^ (in_tile + i)) & 7) * 16;
      u32 low[2], high[2];
      ptx::load_shared(low, (lane.low ^ swizzle) + i * 128);
      ptx::load_shared(high, (lane.high ^ swizzle) + i * 128);
      apply(low, high, rotations);
      ptx::store_shared((lane.low ^ swizzle) + i * 128, low[0], low[1]);
      ptx::store_shared((lane.high ^ swizzle) + i * 128, high[0], high[1]);
    }
  }

 private:
  // Computed where it is used, because few registers are free.
  FP_DEVICE static int lane_number() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static bool has_columns() { return row_lanes * at_once == 32 || lane_number() < row_lanes * at_once; }

  FP_DEVICE static Lane lane_of(u32 tile, int first, int rows) {
    const int number = lane_number(), side = number / row_lanes, piece = number % row_lanes, row = side * rows;
    const u32 low = tile + Rows::byte_offset(first + row, piece * lane_bytes);
    const u32 high = tile + Rows::byte_offset(first + row, half * sizeof(Element) + piece * lane_bytes);
    // If rows have at most 128 bytes, every second one begins with the upper half, which lies in other banks. Exchanged
    // halves take the negative sine.
    const bool is_odd = columns <= 64 && side % 2 == 1;
    return {is_odd ? high : low, is_odd ? low : high, row, piece * lane_columns, is_odd};
  }
  // `row`: one of the next eight rows. `first` is the address of a row whose number is a multiple of the lane's rows.
  FP_DEVICE static u32 address(u32 first, int row) { return (first ^ row * 16) + row * 128; }

  FP_DEVICE static void load(float (&numbers)[lane_columns], const float* from, int column) {
    u32 words[lane_columns];
    ptx::load_shared(words, ptx::shared_address(from) + column * 4);
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) numbers[i] = __uint_as_float(words[i]);
  }
  FP_DEVICE static Rotations rotations_at(const Steps& steps, const Lane& lane, float position) {
    float high[lane_columns], low[lane_columns];
    load(high, steps.high, lane.column);
    load(low, steps.low, lane.column);
    Rotations rotations;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
      rotations.of[i] = Frequency{high[i], low[i]}.approximately_at(position);
      if (lane.is_odd) rotations.of[i].sine = -rotations.of[i].sine;
    }
    return rotations;
  }
  FP_DEVICE static void apply(u32 (&low)[2], u32 (&high)[2], const Rotations& rotations) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rotate_pairs<Element, Element>(low[i], high[i], RotationPair{rotations.of[2 * i], rotations.of[2 * i + 1]});
  }
};

}  // namespace flashpage
