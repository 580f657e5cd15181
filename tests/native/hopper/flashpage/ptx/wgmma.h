// Products of a warpgroup. They read their factors, including registers, when they are waited for. Sums are fp32.
#pragma once
#include "hopper.h"

namespace hopper {

constexpr u64 is_narrow = 1ull << 63;

using Group = std::vector<std::function<void()>>;
inline std::map<u32, std::vector<Group>> products;  // of each thread; the last group is open

template <class Product>
void multiply_later(Product&& product) {
  std::vector<Group>& groups = products[card::fiber];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(product);
}

}  // namespace hopper

namespace flashpage::ptx {

// An address, and the distance to the next panel of columns.
struct Matrix {
  u32 address, next_panel;

  Matrix(u32 address, u32 next_panel) : address(address), next_panel(next_panel) {}
  static Matrix of_cta(u32 address) { return {address, 0}; }
  Matrix moved_by(u32 bytes) const { return {address + bytes, next_panel}; }
  u64 at(u32 bytes) const { return static_cast<u64>(next_panel) << 32 | (address + bytes); }
};

// Panels of 64-byte rows. The highest bit of a product's factor says so.
struct NarrowMatrix {
  u32 address;

  explicit NarrowMatrix(u32 address) : address(address) {}
  u64 at(u32 bytes) const { return hopper::is_narrow | (address + bytes); }
};

inline void wgmma_fence() {}
inline void wgmma_commit() { hopper::products[card::fiber].emplace_back(); }
template <int pending>
void wgmma_wait() {
  std::vector<hopper::Group>& groups = hopper::products[card::fiber];
  while (static_cast<int>(groups.size()) - 1 > pending) {
    const hopper::Group oldest = std::move(groups.front());
    groups.erase(groups.begin());
    for (const auto& product : oldest) product();
  }
}
template <class Register, int tiles>
void wgmma_settle(Register (&)[tiles][4]) {}

}  // namespace flashpage::ptx
