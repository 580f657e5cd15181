// Compares every version of the row loops with the plain one, for tests/host/test_host_ops.py; a machine uses only one
// of them.
#include <cmath>
#include <random>

#include "../../csrc/cpu/cpu_features.cpp"
#include "../../csrc/cpu/row_ops.cpp"
#include "../../csrc/errors.cpp"

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
  const CpuFeatures& has = cpu_features();
  if (!has.avx2 || !has.fma || !has.f16c) return -1;
  return differences<float>({add_avx2<float>, store_avx2<float>}, false) +
         differences<Bf16>({add_avx2<Bf16>, store_avx2<Bf16>}, true) +
         differences<Half>({add_avx2<Half>, store_avx2<Half>}, true) + differences<Half>({add_f16c, store_f16c}, true);
}

// The features of which the compiler's run time says something else.
extern "C" int count_wrong_features() {
  const CpuFeatures& has = cpu_features();
  return (has.avx2 != (__builtin_cpu_supports("avx2") != 0)) + (has.fma != (__builtin_cpu_supports("fma") != 0)) +
         (has.f16c != (__builtin_cpu_supports("f16c") != 0)) + (has.bmi2 != (__builtin_cpu_supports("bmi2") != 0)) +
         (has.avx512f != (__builtin_cpu_supports("avx512f") != 0)) +
         (has.avx512bw != (__builtin_cpu_supports("avx512bw") != 0)) +
         (has.avx512cd != (__builtin_cpu_supports("avx512cd") != 0)) +
         (has.avx512dq != (__builtin_cpu_supports("avx512dq") != 0)) +
         (has.avx512vl != (__builtin_cpu_supports("avx512vl") != 0)) +
         (has.avx512vnni != (__builtin_cpu_supports("avx512vnni") != 0)) +
         (has.avx512bf16 != (__builtin_cpu_supports("avx512bf16") != 0)) + has.neon;
}
