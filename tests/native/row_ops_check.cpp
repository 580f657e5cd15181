// Compares every version of the row loops with the plain one, for tests/host/test_host_ops.py; a machine uses only one
// of them.
#include <cmath>
#include <random>

#include "../../csrc/cpu/row_ops.cpp"

using namespace flashpage;
using namespace flashpage::host;

template <class T>
static int differences(const RowOps<T>& ops, bool check_every_value) {
  constexpr int n = 1003;  // not a multiple of a vector
  std::mt19937 random(1);
  int found = 0;
  for (int round = 0; round < 200; ++round) {
    T values[n], stored[n], expected_stored[n];
    float sums[n] = {}, expected[n] = {}, source[n];
    for (int i = 0; i < n; ++i) {
      source[i] = std::bit_cast<float>(static_cast<u32>(random()));
      const u32 bits = check_every_value ? round * n + i : random();
      __builtin_memcpy(&values[i], &bits, sizeof(T));
    }
    ops.add_weighted(sums, values, 1.0f, n);
    add_baseline(expected, values, 1.0f, n);
    ops.store_scaled(stored, source, 1.0f, n);
    store_baseline(expected_stored, source, 1.0f, n);
    for (int i = 0; i < n; ++i) {
      const float a = to_float(stored[i]), b = to_float(expected_stored[i]);
      found += sums[i] != expected[i] && !(std::isnan(sums[i]) && std::isnan(expected[i]));
      found += a != b && !(std::isnan(a) && std::isnan(b));
    }
  }
  return found;
}

extern "C" int count_differences() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return -1;
  return differences<float>({add_avx2<float>, store_avx2<float>}, false) +
         differences<Bf16>({add_avx2<Bf16>, store_avx2<Bf16>}, true) +
         differences<Half>({add_avx2<Half>, store_avx2<Half>}, true) + differences<Half>({add_f16c, store_f16c}, true);
}
