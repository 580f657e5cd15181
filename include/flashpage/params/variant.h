// The functions that a rendered logit transform or mask calls, in namespace flashpage::vm, for scalars on host and
// device. flashpage/variants/variant.py renders `struct Variant`; kernels are templates over it:
//
//   static constexpr bool has_logit, has_mask;
// static constexpr bool logit_loads_by_token;  // logit loads an element whose index depends on kv_idx
// static constexpr bool ends_in_soft_cap, only_soft_cap;  // the last or only step is soft_cap * tanh(x / soft_cap)
//   template <class F, class I> static F logit(const VariantArgs&, F score, i32 b, i32 h, i32 q_idx, I kv_idx);
// static float soft_cap(const VariantArgs&);   // if ends_in_soft_cap: the cap, and the steps before it:
//   template <class F, class I> static F before_soft_cap(...);  // logit's arguments
//   template <class I> static auto mask(const VariantArgs&, i32 b, i32 h, i32 q_idx, I kv_idx);  // true: visible
//
// score is in natural-log units, after sm_scale. b is the request in the plan, h the query head, kv_idx the position in
// the request, q_idx = KV length - query length + row. Loads are not bounds-checked: a kernel whose tile reaches past
// the request passes min(kv_idx, kv_len - 1) to every load by token and discards the result, and rows past the last
// query row pass an existing row. Both functions are pure, so a kernel may call them for tokens that it then hides.
// logit may return -infinity, which hides the token.
//
// On the card F = float and I = i32 or Token (variant_token.h). The CPU backend passes vectors of lanes. A lane type
// works with every variant if its header, included before the rendered struct, provides, for classes F (float lanes), I
// (i32 lanes), M (mask lanes):
//   F constructible from float, i32, I and F; I from i32
//   operators between two lanes of one kind, lanes and a scalar on either side, and F with I (I converts to F):
// + - * /  unary -     F; I too, except / of two I
//     < <= > >= == !=      F and I, to M
//     & | ^ << >> ~        I
//     && || ! == !=        M, and M with bool (no short circuit)
//   and in namespace flashpage::vm (arguments of which at least one is lanes, the rest scalars):
//     to_float(F|I|M) to_int(F|I|M) to_bool(F|I|M)
//     div(x, y) -> F (true division); floor_div(F|I, F|I), mod(F|I, F|I): rounded down, like Python's // and %
//     select(M|bool, x, y) with x, y both F, both I or both M after the promotion i32 -> float
//     min max (F or I) abs (F or I) exp log tanh sigmoid sqrt floor (F)
//     logical_and logical_or logical_xor (M or bool) logical_not (M)
//     as_mask(I, M) and as_mask(I, bool) -> M: what mask() returns
//     load<T>(const VariantTensor&, index...) with at least one I among the indices -> F, I or M by Element<T>
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/params/variant_token.h"
#if defined(__CUDACC__)
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/multiply.h"
#include "flashpage/ptx/rcp.h"
#endif

namespace flashpage::vm {

template <class T>
concept Scalar = is_same<T, float> || is_same<T, double> || is_same<T, i32> || is_same<T, bool> || is_same<T, Token> ||
                 is_same<T, Line>;

inline constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);

template <class T>
inline constexpr bool is_floating = is_same<T, float> || is_same<T, double> || is_same<T, Line>;

// Python's promotion with one width of each kind: bool -> i32 -> float.
template <bool floating>
struct Promoted {
  using type = i32;
};
template <>
struct Promoted<true> {
  using type = float;
};
template <class... T>
using promoted = typename Promoted<(is_floating<T> || ...)>::type;

template <Scalar T>
FP_HOST_DEVICE float to_float(T x) {
  return static_cast<float>(x);
}
template <Scalar T>
FP_HOST_DEVICE i32 to_int(T x) {
  return static_cast<i32>(x);
}
template <Scalar T>
FP_HOST_DEVICE bool to_bool(T x) {
  return x != 0;
}

FP_HOST_DEVICE bool logical_and(bool x, bool y) { return x & y; }  // evaluates both sides: no branch around a load
FP_HOST_DEVICE bool logical_or(bool x, bool y) { return x | y; }
FP_HOST_DEVICE bool logical_xor(bool x, bool y) { return x != y; }
FP_HOST_DEVICE bool logical_not(bool x) { return !x; }

template <Scalar I, Scalar M>
FP_HOST_DEVICE bool as_mask(I, M visible) {
  return to_bool(visible);
}

template <Scalar X, Scalar Y>
FP_HOST_DEVICE auto select(bool condition, X x, Y y) {
  if constexpr (is_same<X, bool> && is_same<Y, bool>) {
    return condition ? x : y;
  } else {
    using T = promoted<X, Y>;
    return condition ? static_cast<T>(x) : static_cast<T>(y);
  }
}

template <Scalar X, Scalar Y>
FP_HOST_DEVICE auto min(X x, Y y) {
  using T = promoted<X, Y>;
#if defined(__CUDA_ARCH__)
  if constexpr (is_floating<T>) return fminf(static_cast<T>(x), static_cast<T>(y));
#endif
  return static_cast<T>(x) < static_cast<T>(y) ? static_cast<T>(x) : static_cast<T>(y);
}
template <Scalar X, Scalar Y>
FP_HOST_DEVICE auto max(X x, Y y) {
  using T = promoted<X, Y>;
#if defined(__CUDA_ARCH__)
  if constexpr (is_floating<T>) return fmaxf(static_cast<T>(x), static_cast<T>(y));
#endif
  return static_cast<T>(x) > static_cast<T>(y) ? static_cast<T>(x) : static_cast<T>(y);
}
// One-argument float functions: the device's single-precision function, or the host compiler's builtin.
#if defined(__CUDA_ARCH__)
#define FP_VM_FUNCTION(name)       \
  template <Scalar X>              \
  FP_HOST_DEVICE float name(X x) { \
    return ::name##f(to_float(x)); \
  }
#else
#define FP_VM_FUNCTION(name)                 \
  template <Scalar X>                        \
  FP_HOST_DEVICE float name(X x) {           \
    return __builtin_##name##f(to_float(x)); \
  }
#endif
FP_VM_FUNCTION(exp)
FP_VM_FUNCTION(log)
FP_VM_FUNCTION(sqrt)
FP_VM_FUNCTION(floor)
FP_VM_FUNCTION(fabs)
#undef FP_VM_FUNCTION

template <Scalar X>
FP_HOST_DEVICE auto abs(X x) {
  if constexpr (is_floating<X>) {
    return fabs(x);
  } else {
    i32 value = x;
    return value < 0 ? -value : value;
  }
}

template <Scalar X, Scalar Y>
FP_HOST_DEVICE float div(X x, Y y) {
  return to_float(x) / to_float(y);
}

// The divisor of an integer division. On x86, division by 0 and of -2^31 by -1 ends the process; the divisor is then 1,
// so that the CPU gives some number, as the card does.
FP_HOST_DEVICE i32 safe_divisor([[maybe_unused]] i32 x, i32 y) {
#if !defined(__CUDA_ARCH__)
  if (y == 0 || (y == -1 && x == static_cast<i32>(0x80000000u))) return 1;
#endif
  return y;
}

template <Scalar X, Scalar Y>
FP_HOST_DEVICE auto floor_div(X x, Y y) {
  if constexpr (is_same<promoted<X, Y>, float>) {
    return floor(to_float(x) / to_float(y));
  } else {
    const i32 divisor = safe_divisor(x, y), quotient = x / divisor;
    return quotient - i32((x % divisor != 0) && ((x < 0) != (y < 0)));
  }
}

template <Scalar X, Scalar Y>
FP_HOST_DEVICE auto mod(X x, Y y) {
  if constexpr (is_same<promoted<X, Y>, float>) {
    return to_float(x) - floor(to_float(x) / to_float(y)) * to_float(y);
  } else {
    i32 remainder = x % safe_divisor(x, y);
    return remainder != 0 && ((remainder < 0) != (y < 0)) ? remainder + y : remainder;
  }
}

// tanh(x) = x P(x^2) / Q(x^2) for |x| <= tanh_limit, to which x is already clamped: relative error 5.4e-7 everywhere,
// one division, no exp and no cancellation near 0. A minimax fit (Lawson's iteration), for scalars and lanes.
inline constexpr float tanh_limit = 8.f;
template <class F>
FP_HOST_DEVICE F tanh_rational(F x) {
  F u = x * x;
  F p = (((u * -6.142296e-09f + 7.1624972e-06f) * u + 0.0026964089f) * u + 0.1271231f) * u + 0.99999976f;
  F q = ((u * 0.00019674511f + 0.022850297f) * u + 0.4604547f) * u + 1.f;
#if defined(__CUDA_ARCH__)
  return x * p * ptx::reciprocal_approx(q);  // 1 <= q < 2^8
#else
  return x * p / q;
#endif
}
template <Scalar X>
FP_HOST_DEVICE float tanh(X x) {
  return tanh_rational(min(max(to_float(x), -tanh_limit), tanh_limit));
}

template <Scalar X>
FP_HOST_DEVICE float sigmoid(X x) {
  return 1.f / (1.f + exp(-to_float(x)));
}

// The type that an element of a captured tensor is computed as: bool, i32 (64-bit values are narrowed) or float.
template <class T>
struct Element {
  using Stored = T;
  using Value = i32;
  static FP_HOST_DEVICE Value value(Stored stored) { return static_cast<i32>(stored); }
};
template <>
struct Element<bool> {
  using Stored = u8;
  using Value = bool;
  static FP_HOST_DEVICE Value value(Stored stored) { return stored != 0; }
};
template <>
struct Element<float> {
  using Stored = float;
  using Value = float;
  static FP_HOST_DEVICE Value value(Stored stored) { return stored; }
};
template <>
struct Element<Bf16> {
  using Stored = u16;
  using Value = float;
  static FP_HOST_DEVICE Value value(Stored stored) { return __builtin_bit_cast(float, static_cast<u32>(stored) << 16); }
};
template <>
struct Element<Half> {
  using Stored = u16;
  using Value = float;
  static FP_HOST_DEVICE Value value(Stored stored) {
#if defined(__CUDA_ARCH__)
    return ptx::half_bits_to_float(stored);
#else
    // Moves exponent and mantissa to their fp32 fields; 2^112 makes up for the difference of the exponent biases.
    u32 sign = static_cast<u32>(stored & 0x8000) << 16;
    float magnitude = __builtin_bit_cast(float, static_cast<u32>(stored & 0x7fff) << 13) * 0x1p112f;
    u32 bits = __builtin_bit_cast(u32, magnitude);
    if (magnitude >= 65536.f) bits |= 0x7f800000;  // infinity and NaN
    return __builtin_bit_cast(float, bits | sign);
#endif
  }
};

// A 64-bit product of two 32-bit numbers. Without the instruction, compilers that hoist the extension of a factor out
// of a loop multiply 64 by 64 bits.
FP_HOST_DEVICE i64 wide_product(i32 a, i32 b) {
#if defined(__CUDA_ARCH__)
  return ptx::multiply_wide(a, b);
#else
  return static_cast<i64>(a) * b;
#endif
}

// The address of an element. Its innermost stride in bytes fits 32 bits (checked at capture), so that the index that
// varies fastest costs one multiply-add.
template <class Stored, class... Index>
FP_HOST_DEVICE const Stored* element_at(const VariantTensor& tensor, Index... index) {
  constexpr int rank = sizeof...(Index);
  i64 outer = 0, inner = 0;  // elements, bytes
  int dim = 0;
  ((dim == rank - 1 ? inner = wide_product(static_cast<i32>(tensor.stride[dim]) * static_cast<i32>(sizeof(Stored)),
                                           static_cast<i32>(index))
                    : outer += tensor.stride[dim] * static_cast<i32>(index),
    ++dim),
   ...);
  const Stored* row = static_cast<const Stored*>(tensor.data) + outer;
  return reinterpret_cast<const Stored*>(reinterpret_cast<const char*>(row) + inner);
}

template <class T, Scalar... Index>
FP_HOST_DEVICE auto load(const VariantTensor& tensor, Index... index) {
  using Stored = typename Element<T>::Stored;
  const Stored* element = element_at<Stored>(tensor, index...);
#if defined(__CUDA_ARCH__)
  // Captured tensors are read-only while a kernel runs. The low half of a 64-bit element is its value.
  if constexpr (is_same<T, i64>)
    return __ldg(reinterpret_cast<const i32*>(element));
  else
    return Element<T>::value(__ldg(element));
#else
  return Element<T>::value(*element);
#endif
}

template <class T>
FP_HOST_DEVICE T scalar(const VariantArgs& args, int slot) {
  return static_cast<T>(args.scalars[slot]);
}

}  // namespace flashpage::vm
