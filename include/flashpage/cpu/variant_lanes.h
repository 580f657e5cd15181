// The lanes that variants compute with on the CPU: the operators, promotion and functions that
// flashpage/params/variant.h lists.
#pragma once
#include "flashpage/cpu/convert.h"
#include "flashpage/params/variant.h"

namespace flashpage::vm {

using cpu::FloatLanes;
using cpu::IntLanes;
using cpu::MaskLanes;
using cpu::num_lanes;

struct Mask {
  MaskLanes lanes;
  Mask(MaskLanes x) : lanes(x) {}
  Mask(bool x) : lanes(cpu::mask_of(x)) {}
};

struct Ints {
  IntLanes lanes;
  Ints(IntLanes x) : lanes(x) {}
  Ints(Mask x) : lanes(cpu::blend(x.lanes, IntLanes{} + 1, IntLanes{})) {}
  template <Scalar T>
    requires(!is_floating<T>)
  Ints(T x) : lanes(IntLanes{} + static_cast<i32>(x)) {}
};

struct Floats {
  FloatLanes lanes;
  Floats(FloatLanes x) : lanes(x) {}
  Floats(Ints x) : lanes(__builtin_convertvector(x.lanes, FloatLanes)) {}
  Floats(Mask x) : Floats(Ints(x)) {}
  template <Scalar T>
  Floats(T x) : lanes(cpu::splat(static_cast<float>(x))) {}
};

template <class T>
concept Lanes = is_same<T, Floats> || is_same<T, Ints> || is_same<T, Mask>;
template <class... T>
concept SomeLanes = (Lanes<T> || ...) && ((Lanes<T> || Scalar<T>) && ...);

template <class T>
inline constexpr bool is_float_like = is_same<T, Floats> || is_floating<T>;
template <class T>
inline constexpr bool is_mask_like = is_same<T, Mask> || is_same<T, bool>;

template <bool floating>
struct PromotedLanes {
  using type = Ints;
};
template <>
struct PromotedLanes<true> {
  using type = Floats;
};
// bool -> i32 -> float, as for scalars.
template <class... T>
using promoted_lanes = typename PromotedLanes<(is_float_like<T> || ...)>::type;

inline IntLanes safe_divisor(IntLanes x, IntLanes y) {
  const IntLanes ends_the_process = (y == 0) | ((y == -1) & (x == static_cast<i32>(0x80000000u)));
  return ends_the_process ? IntLanes{} + 1 : y;
}
inline FloatLanes safe_divisor(FloatLanes, FloatLanes y) { return y; }

#define FP_LANES_OPERATOR(op, ...)           \
  template <class A, class B>                \
    requires SomeLanes<A, B>                 \
  inline __VA_ARGS__ operator op(A a, B b) { \
    using T = promoted_lanes<A, B>;          \
    return T(a).lanes op T(b).lanes;         \
  }
FP_LANES_OPERATOR(+, promoted_lanes<A, B>)
FP_LANES_OPERATOR(-, promoted_lanes<A, B>)
FP_LANES_OPERATOR(*, promoted_lanes<A, B>)
FP_LANES_OPERATOR(&, Ints)
FP_LANES_OPERATOR(|, Ints)
FP_LANES_OPERATOR(^, Ints)
FP_LANES_OPERATOR(<<, Ints)
FP_LANES_OPERATOR(>>, Ints)
#undef FP_LANES_OPERATOR

#define FP_LANES_DIVISION(op, ...)             \
  template <class A, class B>                  \
    requires SomeLanes<A, B>                   \
  inline __VA_ARGS__ operator op(A a, B b) {   \
    using T = promoted_lanes<A, B>;            \
    const auto x = T(a).lanes, y = T(b).lanes; \
    return x op safe_divisor(x, y);            \
  }
FP_LANES_DIVISION(/, promoted_lanes<A, B>)
FP_LANES_DIVISION(%, Ints)
#undef FP_LANES_DIVISION

#define FP_LANES_COMPARISON(op, function, first, second)   \
  template <class A, class B>                              \
    requires SomeLanes<A, B>                               \
  inline Mask operator op(A a, B b) {                      \
    using T = promoted_lanes<A, B>;                        \
    return cpu::function(T(first).lanes, T(second).lanes); \
  }
FP_LANES_COMPARISON(<, less, a, b)
FP_LANES_COMPARISON(<=, less_equal, a, b)
FP_LANES_COMPARISON(>, less, b, a)
FP_LANES_COMPARISON(>=, less_equal, b, a)
FP_LANES_COMPARISON(==, equal, a, b)
FP_LANES_COMPARISON(!=, not_equal, a, b)
#undef FP_LANES_COMPARISON

inline Floats operator-(Floats x) { return -x.lanes; }
inline Ints operator-(Ints x) { return -x.lanes; }
inline Ints operator~(Ints x) { return ~x.lanes; }

template <class X>
  requires Lanes<X>
inline Floats to_float(X x) {
  return x;
}
inline Ints to_int(Floats x) { return __builtin_convertvector(x.lanes, IntLanes); }
inline Ints to_int(Ints x) { return x; }
inline Ints to_int(Mask x) { return x; }
inline Mask to_bool(Floats x) { return x != 0.0f; }
inline Mask to_bool(Ints x) { return x != 0; }
inline Mask to_bool(Mask x) { return x; }

template <class T>
  requires(Lanes<T> || Scalar<T>)
inline Mask truth(T x) {
  return to_bool(x);
}
template <class A, class B>
  requires SomeLanes<A, B>
inline Mask logical_and(A a, B b) {
  return truth(a).lanes & truth(b).lanes;
}
template <class A, class B>
  requires SomeLanes<A, B>
inline Mask logical_or(A a, B b) {
  return truth(a).lanes | truth(b).lanes;
}
template <class A, class B>
  requires SomeLanes<A, B>
inline Mask logical_xor(A a, B b) {
  return truth(a).lanes ^ truth(b).lanes;
}
inline Mask logical_not(Mask x) { return ~x.lanes; }
inline Mask operator!(Mask x) { return ~x.lanes; }
template <class A, class B>
  requires SomeLanes<A, B>
inline Mask operator&&(A a, B b) {
  return logical_and(a, b);
}
template <class A, class B>
  requires SomeLanes<A, B>
inline Mask operator||(A a, B b) {
  return logical_or(a, b);
}

// The mask that mask() returns; the first argument selects the lane type.
template <class M>
inline Mask as_mask(Ints, M visible) {
  return truth(visible);
}

template <class C, class X, class Y>
  requires SomeLanes<C, X, Y>
inline auto select(C condition, X x, Y y) {
  if constexpr (is_mask_like<X> && is_mask_like<Y>) {
    return Mask((truth(condition).lanes & Mask(x).lanes) | (~truth(condition).lanes & Mask(y).lanes));
  } else {
    using T = promoted_lanes<X, Y>;
    return T(cpu::blend(truth(condition).lanes, T(x).lanes, T(y).lanes));
  }
}
template <class A, class B>
  requires SomeLanes<A, B>
inline auto min(A a, B b) {
  using T = promoted_lanes<A, B>;
  return select(T(a) < T(b), T(a), T(b));
}
template <class A, class B>
  requires SomeLanes<A, B>
inline auto max(A a, B b) {
  using T = promoted_lanes<A, B>;
  return select(T(a) > T(b), T(a), T(b));
}
inline Floats abs(Floats x) { return (FloatLanes)((IntLanes)x.lanes & 0x7fffffff); }
inline Ints abs(Ints x) { return x.lanes < 0 ? -x.lanes : x.lanes; }

// ln 2 as a sum of two floats: the product of a whole number and the first is exact.
inline constexpr float ln_2_high = 0.693359375f, ln_2_low = -2.12194440e-4f;

inline Floats exp(Floats value) {
  const FloatLanes x = value.lanes,
                   whole = cpu::round_to_integer(cpu::clamp_number(x * log2_e, cpu::lowest_power, cpu::highest_power));
  // Where the power is clamped, `rest` has no influence; it only has to stay in the polynomial's range.
  const FloatLanes rest = cpu::clamp_number((x - whole * ln_2_high) - whole * ln_2_low, -0.5f, 0.5f);
  return cpu::scale_by_power(cpu::exp2_of_fraction(rest * log2_e), whole);
}

inline Floats log(Floats value) {
  constexpr float coefficients[] = {0.33333331347f, 0.20000196993f, 0.14267280698f, 0.11812818050f};
  const FloatLanes x = value.lanes;
  const IntLanes is_small = x < 1.17549435e-38f;
  const FloatLanes scaled = is_small ? x * 16777216.0f : x;  // 2^24 makes subnormal numbers normal
  constexpr i32 sqrt_half = 0x3f3504f3;                      // mantissas run from sqrt(1/2) to sqrt(2)
  const IntLanes bits = (IntLanes)scaled - sqrt_half;
  const FloatLanes power = __builtin_convertvector((bits >> 23) - (is_small & 24), FloatLanes);
  const FloatLanes f = (FloatLanes)((bits & 0x7fffff) + sqrt_half) - 1.0f;
  // log(1 + f) = 2 atanh(s), s = f / (2 + f), written as f - s * (f - series) so that f itself is not rounded.
  const FloatLanes s = f / (f + 2.0f), z = s * s, series = 2.0f * z * cpu::polynomial(z, coefficients);
  FloatLanes result = power * ln_2_high + (f - (s * (f - series) - power * ln_2_low));
  result = x == 0.0f ? cpu::splat(-cpu::infinity) : result;
  result = x == cpu::infinity ? x : result;
  return x >= 0.0f ? result : cpu::splat(__builtin_nanf(""));
}

inline Floats sqrt(Floats x) { return cpu::square_root(x.lanes); }
inline Floats floor(Floats x) { return cpu::round_down(x.lanes); }
inline Floats tanh(Floats x) { return tanh_rational(Floats(cpu::clamp_number(x.lanes, -tanh_limit, tanh_limit))); }
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

template <class A, class B>
  requires SomeLanes<A, B>
inline Floats div(A a, B b) {
  return Floats(a) / Floats(b);
}
template <class A, class B>
  requires SomeLanes<A, B>
inline auto floor_div(A a, B b) {
  if constexpr (is_float_like<A> || is_float_like<B>) {
    return floor(div(a, b));
  } else {
    const IntLanes x = Ints(a).lanes, y = Ints(b).lanes, quotient = x / safe_divisor(x, y);
    const MaskLanes inexact = cpu::not_equal(x, quotient * y), opposite = cpu::less(x ^ y, IntLanes{});
    return Ints(cpu::blend(inexact & opposite, quotient - 1, quotient));
  }
}
template <class A, class B>
  requires SomeLanes<A, B>
inline auto mod(A a, B b) {
  return a - floor_div(a, b) * b;
}

inline i32 lane(Ints x, int i) { return x.lanes[i]; }
template <Scalar T>
inline i32 lane(T x, int) {
  return static_cast<i32>(x);
}

// num_lanes consecutive elements.
template <class T>
inline auto load_neighbours(const typename Element<T>::Stored* data) {
  using Value = typename Element<T>::Value;
  if constexpr (is_same<Value, float>) {
    return Floats(cpu::load(reinterpret_cast<const T*>(data)));
  } else {
    i32 values[num_lanes];
    for (int i = 0; i < num_lanes; ++i) values[i] = static_cast<i32>(Element<T>::value(data[i]));
    const Ints ints = (IntLanes)cpu::load_bits(values);
    if constexpr (is_same<Value, bool>) {
      return ints != 0;
    } else {
      return ints;
    }
  }
}

template <class... Index>
inline constexpr bool only_last_is_lanes = false;
template <Lanes Last>
inline constexpr bool only_last_is_lanes<Last> = true;
template <Scalar First, class... Rest>
inline constexpr bool only_last_is_lanes<First, Rest...> = only_last_is_lanes<Rest...>;

// Whether the lanes' elements are consecutive, as in a bias by token: then one load is enough.
template <class... Index>
inline bool are_neighbours(const VariantTensor& tensor, Index... index) {
  if constexpr (only_last_is_lanes<Index...>) {
    const IntLanes last = (index, ...).lanes;
    return tensor.stride[sizeof...(Index) - 1] == 1 && cpu::all_true(cpu::equal(last, cpu::count_from(last[0])));
  } else {
    return false;
  }
}

// Not inlined: it would take registers from the loops around loads.
template <class T, class... Index>
[[gnu::noinline]] auto gather(const VariantTensor& tensor, Index... index) {
  using Stored = typename Element<T>::Stored;
  using Value = typename Element<T>::Value;
  typename Element<Value>::Stored values[num_lanes];
  for (int i = 0; i < num_lanes; ++i) values[i] = Element<T>::value(*element_at<Stored>(tensor, lane(index, i)...));
  return load_neighbours<Value>(values);
}

template <class T, class... Index>
  requires SomeLanes<Index...>
inline auto load(const VariantTensor& tensor, Index... index) {
  if (!are_neighbours(tensor, index...)) return gather<T>(tensor, index...);
  return load_neighbours<T>(element_at<typename Element<T>::Stored>(tensor, lane(index, 0)...));
}

}  // namespace flashpage::vm
