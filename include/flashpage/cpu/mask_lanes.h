// Masks: a bit for each lane in a mask register (AVX-512), or lanes of -1 and 0 (AVX2, NEON). Comparisons of GCC's
// vectors are not used: on AVX-512, GCC takes combinations of them apart lane by lane.
#pragma once
#include "flashpage/cpu/intrinsics.h"

namespace flashpage::cpu {

#if defined(__AVX512F__)

struct MaskLanes {
  __mmask16 bits;
  bool operator[](int lane) const { return bits >> lane & 1; }
};

inline MaskLanes mask_of_bits(u32 bits) { return {static_cast<__mmask16>(bits)}; }
inline u32 bits_of(MaskLanes mask) { return mask.bits; }
inline MaskLanes operator&(MaskLanes a, MaskLanes b) { return mask_of_bits(a.bits & b.bits); }
inline MaskLanes operator|(MaskLanes a, MaskLanes b) { return mask_of_bits(a.bits | b.bits); }
inline MaskLanes operator^(MaskLanes a, MaskLanes b) { return mask_of_bits(a.bits ^ b.bits); }
inline IntLanes blend(MaskLanes mask, IntLanes yes, IntLanes no) {
  return (IntLanes)_mm512_mask_blend_epi32(mask.bits, (__m512i)no, (__m512i)yes);
}

#define FP_COMPARE(name, float_predicate, int_predicate, vector_operator)  \
  inline MaskLanes name(FloatLanes a, FloatLanes b) {                      \
    return {_mm512_cmp_ps_mask((__m512)a, (__m512)b, float_predicate)};    \
  }                                                                        \
  inline MaskLanes name(IntLanes a, IntLanes b) {                          \
    return {_mm512_cmp_epi32_mask((__m512i)a, (__m512i)b, int_predicate)}; \
  }

#else

struct MaskLanes {
  IntLanes lanes;
  bool operator[](int lane) const { return lanes[lane] != 0; }
};

inline MaskLanes mask_of_bits(u32 bits) {
  const IntLanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
  return {(static_cast<i32>(bits) & bit) == bit};
}
inline u32 bits_of(MaskLanes mask) {
#if defined(__AVX2__)
  return __builtin_ia32_movmskps256((FloatLanes)mask.lanes);
#else
  const IntLanes bit = mask.lanes & IntLanes{1, 2, 4, 8, 16, 32, 64, 128};
  u32 bits = 0;
  for (int i = 0; i < num_lanes; ++i) bits |= bit[i];
  return bits;
#endif
}
inline MaskLanes operator&(MaskLanes a, MaskLanes b) { return {a.lanes & b.lanes}; }
inline MaskLanes operator|(MaskLanes a, MaskLanes b) { return {a.lanes | b.lanes}; }
inline MaskLanes operator^(MaskLanes a, MaskLanes b) { return {a.lanes ^ b.lanes}; }
inline IntLanes blend(MaskLanes mask, IntLanes yes, IntLanes no) {
#if defined(__AVX2__)
  return (IntLanes)__builtin_ia32_blendvps256((FloatLanes)no, (FloatLanes)yes, (FloatLanes)mask.lanes);
#else
  return (yes & mask.lanes) | (no & ~mask.lanes);
#endif
}

#define FP_COMPARE(name, float_predicate, int_predicate, vector_operator)             \
  inline MaskLanes name(FloatLanes a, FloatLanes b) { return {a vector_operator b}; } \
  inline MaskLanes name(IntLanes a, IntLanes b) { return {a vector_operator b}; }

#endif

FP_COMPARE(less, _CMP_LT_OQ, _MM_CMPINT_LT, <)
FP_COMPARE(less_equal, _CMP_LE_OQ, _MM_CMPINT_LE, <=)
FP_COMPARE(equal, _CMP_EQ_OQ, _MM_CMPINT_EQ, ==)
FP_COMPARE(not_equal, _CMP_NEQ_UQ, _MM_CMPINT_NE, !=)
#undef FP_COMPARE

inline MaskLanes mask_of(bool all) { return mask_of_bits(all ? 0xffff : 0); }
inline MaskLanes operator~(MaskLanes mask) { return mask ^ mask_of(true); }
inline bool all_true(MaskLanes mask) { return bits_of(mask) == (1u << num_lanes) - 1; }
inline FloatLanes blend(MaskLanes mask, FloatLanes yes, FloatLanes no) {
  return (FloatLanes)blend(mask, (IntLanes)yes, (IntLanes)no);
}

}  // namespace flashpage::cpu
