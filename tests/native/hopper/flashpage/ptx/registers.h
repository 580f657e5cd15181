// Fibers have as many registers as they want.
#pragma once

namespace flashpage::ptx {

template <int count>
void give_registers_back() {}
template <int count>
void take_registers() {}

}  // namespace flashpage::ptx
