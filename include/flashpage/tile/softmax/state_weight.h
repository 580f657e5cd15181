// Combines softmax states of one row, in base 2. A state is a maximum and a sum relative to it; an LSE is a state whose
// sum is 1.
#pragma once
#include "flashpage/ptx/math.h"

namespace flashpage {

// 0 instead of -inf, for a row that has seen nothing: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
FP_DEVICE float finite_or_zero(float x) { return x == ptx::negative_infinity() ? 0.f : x; }

// The factor of the sum and values of a state with maximum `maximum`, when it is added to states with the common
// maximum `common`.
FP_DEVICE float state_weight(float maximum, float common) { return ptx::exp2_approx(maximum - finite_or_zero(common)); }

}  // namespace flashpage
