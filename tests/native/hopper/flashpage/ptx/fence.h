// Fibers see each other's writes at once, so fences do nothing.
#pragma once

namespace flashpage::ptx {

inline void fence_before_bulk_copies() {}
inline void fence_before_products() {}

}  // namespace flashpage::ptx
