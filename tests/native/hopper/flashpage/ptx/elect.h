// A warp elects its first lane.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline bool elect_one() { return threadIdx.x % 32 == 0; }

}  // namespace flashpage::ptx
