// include/flashpage/ptx/quantise.h on the host, for tests/kernels/test_quantise.py.
#include "flashpage/ptx/quantise.h"

#include "hopper.h"

using namespace flashpage;

// kind: e2m1, uint4, int8, e4m3.
extern "C" void quantise_eight(int kind, const float (*numbers)[8], float factor, float zero, u32 (*words)[2]) {
  if (kind == 0) (*words)[0] = ptx::pack_e2m1(*numbers, factor);
  if (kind == 1) (*words)[0] = ptx::pack_uint4(*numbers, factor, zero);
  if (kind == 2) ptx::pack_int8(*numbers, factor, *words);
  if (kind == 3) ptx::pack_e4m3(*numbers, factor, *words);
}
