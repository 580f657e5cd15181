// A format's conversions on the host, for tests/kernels/test_kv_formats.py, which sets FORMAT: a struct of
// flashpage/formats.
#include "flashpage/ptx/convert.h"
#include "hopper.h"

using namespace flashpage;
using Format = FORMAT;
using Scale = Format::Scale;

template <class Wide>
void widen(u32 word, float* numbers) {
  constexpr int count = 32 / Format::bits;
  u32 pairs[count / 2];
  Format::widen<Wide>(word, pairs);
  for (int i = 0; i < count / 2; ++i) {
    const float2 pair = ptx::unpack2<Wide>(pairs[i]);
    numbers[count == 8 ? i : 2 * i] = pair.x;
    numbers[count == 8 ? i + 4 : 2 * i + 1] = pair.y;
  }
}

template <class Wide, class F = Format>
float pair_factor(Scale scale) {
  if constexpr (F::scale_columns == whole_row) {
    return 1.f;
  } else {
    const float2 pair = ptx::unpack2<Wide>(F::template scale_pair<Wide>(scale));
    return pair.x == pair.y ? pair.x : NAN;
  }
}

extern "C" {

// The numbers of a word as cards widen them, in the order of the word, and as the CPU reads them.
void widened(u32 word, int is_half, float* numbers) {
  is_half ? widen<Half>(word, numbers) : widen<Bf16>(word, numbers);
}
float number(u32 stored) { return Format::number(stored); }
float left_out() { return Format::left_out; }
// The factor of pairs on cards.
float factor_of_pairs(const void* scale, int is_half) {
  const Scale& given = *static_cast<const Scale*>(scale);
  return is_half ? pair_factor<Half>(given) : pair_factor<Bf16>(given);
}
void factors(const void* scale, float* factor, float* zero) {
  const Scale& given = *static_cast<const Scale*>(scale);
  *factor = Format::factor(given);
  *zero = Format::zero(given);
}
// Quantises a group of elements; returns them as they are read again.
void quantise(const float* elements, int count, float* read, void* scale_out) {
  float least = elements[0], most = elements[0];
  for (int i = 1; i < count; ++i) {
    least = elements[i] < least ? elements[i] : least;
    most = elements[i] > most ? elements[i] : most;
  }
  const Scale scale = Format::scale_for(least, most);
  for (int i = 0; i < count; ++i)
    read[i] = (Format::number(Format::stored(elements[i], scale)) - Format::zero(scale)) * Format::factor(scale);
  *static_cast<Scale*>(scale_out) = scale;
}

}  // extern "C"
