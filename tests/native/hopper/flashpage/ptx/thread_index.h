// The fiber's number.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline int thread_index() { return threadIdx.x; }
inline int grid_size() { return gridDim.x; }

}  // namespace flashpage::ptx
