// There is no launch before or after.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}

}  // namespace flashpage::ptx
