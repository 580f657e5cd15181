// The fp32 scale of formats that have one for a token and head. It multiplies scores and probabilities; elements of V
// are multiplied where probabilities are fp16, and when pages are widened. `largest`: the largest number of the format.
#pragma once
#include "flashpage/formats/format.h"

namespace flashpage {

template <int largest>
struct TokenScale {
  static constexpr int scale_columns = whole_row;
  static constexpr bool has_zero = false;
  static constexpr float left_out = 1.f;
  using Scale = float;

  FP_HOST_DEVICE static float factor(Scale scale) { return scale; }
  FP_HOST_DEVICE static float zero(Scale) { return 0.f; }
  FP_HOST_DEVICE static Scale scale_for(float least, float most) {
    return divided_by<largest>(larger_magnitude(least, most));
  }

 protected:
  FP_HOST_DEVICE static float divided(float element, Scale scale) {
    return scale > 0.f ? rounded_quotient(element, scale) : 0.f;
  }
};

}  // namespace flashpage
