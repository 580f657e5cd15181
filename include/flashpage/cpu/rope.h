// LLaMA's rotary embedding: in a row at position p, columns i and i + d / 2 are rotated by p / scale * theta^(-2 i /
// d).
#pragma once
#include "flashpage/cpu/convert.h"

namespace flashpage::cpu {

template <int head_dim>
class Rotation {
 public:
  static constexpr int num_pairs = head_dim / 2;

  Rotation(float scale, float theta) {
    for (int i = 0; i < num_pairs; ++i) {
      angle_[i] = __builtin_pow(double{theta}, -2.0 * i / head_dim) / scale;
      step_cos_[i] = __builtin_cos(angle_[i]);
      step_sin_[i] = __builtin_sin(angle_[i]);
    }
  }

  void start(i32 position) {
    for (int i = 0; i < num_pairs; ++i) {
      cos_[i] = __builtin_cos(position * angle_[i]);
      sin_[i] = __builtin_sin(position * angle_[i]);
    }
  }

  // Moves to the next position by one complex product, in double, so that a tile of steps stays exact to fp32.
  void advance() {
    for (int i = 0; i < num_pairs; ++i) {
      const double cos = cos_[i] * step_cos_[i] - sin_[i] * step_sin_[i];
      sin_[i] = sin_[i] * step_cos_[i] + cos_[i] * step_sin_[i];
      cos_[i] = cos;
    }
  }

  template <class Operand, class T>
  void rotate(const T* source, Operand* destination) const {
    float row[round_up(head_dim, num_lanes)], rotated[round_up(head_dim, num_lanes)];
    for (int i = 0; i < head_dim; i += num_lanes) store(row + i, load_first(source + i, head_dim - i));
    for (int i = 0; i < num_pairs; ++i) {
      const float cos = static_cast<float>(cos_[i]), sin = static_cast<float>(sin_[i]);
      rotated[i] = row[i] * cos - row[i + num_pairs] * sin;
      rotated[i + num_pairs] = row[i + num_pairs] * cos + row[i] * sin;
    }
    for (int i = 0; i < head_dim; i += num_lanes) store_first(destination + i, load(rotated + i), head_dim - i);
  }

 private:
  double angle_[num_pairs], step_cos_[num_pairs], step_sin_[num_pairs], cos_[num_pairs], sin_[num_pairs];
};

}  // namespace flashpage::cpu
