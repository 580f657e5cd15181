// Rotary position embedding in the kernel, by LLaMA's halves: columns i and i + d / 2 are rotated by position / scale *
// theta^(-2 i / d).
#pragma once
#include "flashpage/tile/layout/shared_rows.h"
#include "flashpage/tile/rope/rotation.h"

namespace flashpage {

// Rotates `num_rows` rows from one shared tile into another (or in place); `position(row)` is the row's token position.
template <class From, class To, int columns, class Position>
FP_DEVICE void rotate_rows(const u8* from, u8* to, int num_rows, float rope_scale, float rope_theta, int thread,
                           int threads, Position&& position) {
  using Source = SharedRows<From, columns>;
  using Target = SharedRows<To, columns>;
  constexpr int half = columns / 2;
  float log2_theta = log2f(rope_theta);
  for (int i = thread; i < num_rows * half; i += threads) {
    int row = i / half, column = i % half;
    // Revolutions modulo 1 keep the argument of sine small: this avoids the slow range reduction and keeps the
    // accuracy.
    float frequency = exp2f(log2_theta * (-2.f * column / columns)) / rope_scale;
    float revolutions = position(row) * frequency * 0.15915494309189535f;
    Rotation rotation;
    sincospif(2.f * (revolutions - floorf(revolutions)), &rotation.sine, &rotation.cosine);
    u32 low = column * sizeof(From), high = (column + half) * sizeof(From);
    float a = ptx::to_float(*reinterpret_cast<const From*>(from + Source::byte_offset(row, low)));
    float b = ptx::to_float(*reinterpret_cast<const From*>(from + Source::byte_offset(row, high)));
    low = column * sizeof(To), high = (column + half) * sizeof(To);
    *reinterpret_cast<To*>(to + Target::byte_offset(row, low)) = ptx::from_float<To>(rotation.low(a, b));
    *reinterpret_cast<To*>(to + Target::byte_offset(row, high)) = ptx::from_float<To>(rotation.high(a, b));
  }
}

}  // namespace flashpage
