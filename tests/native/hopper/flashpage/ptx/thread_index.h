// The fiber's number.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline int thread_index() { return threadIdx.x; }

}  // namespace flashpage::ptx
