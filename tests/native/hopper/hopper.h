// The parts of CUDA that kernels for Hopper use in addition to card.h: shared memory by 32-bit addresses, barriers and
// built-in functions. Threads are fibers, so an ordinary access happens at once; copies land later, and products are
// computed when they are waited for.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>

#include "../card/card.h"
#include "flashpage/common/types.h"

#undef __shared__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float_as_int(float number) { return std::bit_cast<int>(number); }
inline void __syncwarp() { card::meet(card::warps[card::fiber / 32].meeting); }
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }
inline float __shfl_xor_sync(unsigned, float value, int other) {
  const int lane = threadIdx.x % 32;
  return card::exchange(std::bit_cast<unsigned>(value),
                        [&](const unsigned* values) { return std::bit_cast<float>(values[lane ^ other]); });
}
inline float __shfl_sync(unsigned lanes, float value, int lane) {
  return std::bit_cast<float>(__shfl_sync(lanes, std::bit_cast<unsigned>(value), lane));
}
inline unsigned long long __shfl_sync(unsigned lanes, const unsigned long long& value, int lane) {
  const unsigned low = __shfl_sync(lanes, static_cast<unsigned>(value), lane);
  return static_cast<unsigned long long>(__shfl_sync(lanes, static_cast<unsigned>(value >> 32), lane)) << 32 | low;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
using std::exp2f, std::fmaf, std::fmaxf, std::log2f;
inline double cospi(double x) { return std::cos(3.141592653589793 * x); }
inline void sincospif(float x, float* sine, float* cosine) {
  const double angle = 3.14159265358979323846 * x;
  *sine = static_cast<float>(std::sin(angle));
  *cosine = static_cast<float>(std::cos(angle));
}

namespace flashpage {

alignas(1024) inline u8 memory[1 << 19];  // the name that kernels give their shared memory; all CTAs of a cluster

}  // namespace flashpage

namespace hopper {

using namespace flashpage;

inline u32 cta_bytes = sizeof memory / 2;  // of `memory`, of each CTA of a cluster

[[noreturn]] inline void stop(const char* why) {  // a fiber cannot throw
  std::fprintf(stderr, "a kernel on the host, thread %u: %s\n", card::fiber, why);
  std::abort();
}
inline u8* at(u32 address) {
  if (address >= sizeof memory) stop("an address outside of shared memory");
  return memory + address;
}
// The 128-byte swizzle of copies and products: bits 4 to 6 of an address are XORed with bits 7 to 9.
inline u8& swizzled(u32 address) { return *at(address ^ (address >> 7 & 7) << 4); }
// The 64-byte swizzle: bits 4 and 5 are XORed with bits 7 and 8.
inline u8& swizzled_64(u32 address) { return *at(address ^ (address >> 7 & 3) << 4); }

// The words of all lanes of the warp, for example addresses.
inline std::array<u32, 32> of_lanes(u32 word) {
  return card::exchange(word, [](const unsigned* values) {
    std::array<u32, 32> all;
    std::copy(values, values + 32, all.begin());
    return all;
  });
}

struct Barrier {
  int expected;
  int arrived = 0;
  i64 bytes = 0;  // in flight
  u32 phase = 0;

  void settle() {
    if (arrived > expected) stop("more arrivals than a barrier expects");
    if (arrived < expected || bytes != 0) return;
    arrived = 0;
    ++phase;
  }
};
inline std::map<u32, Barrier> barriers;

// Copies in flight, which land in any order.
inline std::vector<std::function<void()>> copies;
inline u64 random_number() {  // std::minstd_rand, whose header would take a third of a second to compile
  static u64 number = 1;
  return number = number * 48271 % 2147483647;
}
inline void land_some() {
  if (copies.empty() || random_number() % 2048 != 0) return;
  std::swap(copies[random_number() % copies.size()], copies.back());
  const auto land = std::move(copies.back());
  copies.pop_back();
  land();
  card::idle_switches = 0;
}
// Where warps sleep at random, some boxes are late, as those of a card may be: so many other copies land before them.
inline int lateness() {
  const bool may_be_late = std::getenv("FLASHPAGE_HOST_SEED") != nullptr;
  return may_be_late && random_number() % 32 == 0 ? 2000 : 0;
}
// Lands a copy after it has been drawn so many times.
inline void land_later(int draws, std::function<void()> copy) {
  copies.push_back([draws, copy = std::move(copy)] {
    if (draws == 0) return copy();
    land_later(draws - 1, copy);
  });
}

}  // namespace hopper
