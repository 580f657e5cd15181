// Fibers have any number of registers.
#pragma once

namespace flashpage::ptx {

template <int count>
void give_registers_back() {}
template <int count>
void take_registers() {}
template <int before, int after>
void change_registers() {}

}  // namespace flashpage::ptx
