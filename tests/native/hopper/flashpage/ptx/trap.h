// Replaces include/flashpage/ptx/trap.h: counts, and goes on.
#pragma once
#include <atomic>

namespace flashpage::ptx {

inline std::atomic<int> traps{0};
inline void trap() { ++traps; }

}  // namespace flashpage::ptx
