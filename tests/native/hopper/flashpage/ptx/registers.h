// Fibers have any number of registers.
#pragma once

namespace flashpage::ptx {

template <int count>
void give_registers_back() {}
template <int count>
void take_registers() {}

}  // namespace flashpage::ptx
