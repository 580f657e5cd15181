// The instruction sets that this machine's cores can run, by the compiler's names.
#include <string>

#include "errors.h"

int32_t fp_cpu_features(char* text, int32_t size) {
  // __builtin_cpu_supports also checks the operating system, and takes only literals. The names are GCC's -m options.
  const struct {
    const char* name;
    bool present;
  } features[] = {
      {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},
      {"f16c", __builtin_cpu_supports("f16c") != 0},
      {"bmi2", __builtin_cpu_supports("bmi2") != 0},
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},
      {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
      {"avx512cd", __builtin_cpu_supports("avx512cd") != 0},
      {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
      {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
      {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
      {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
  };
  std::string found;
  for (const auto& feature : features) {
    if (!feature.present) continue;
    if (!found.empty()) found += ',';
    found += feature.name;
  }
  if (static_cast<int32_t>(found.size()) >= size) {
    return flashpage::host::fail(FP_INTERNAL, "%d bytes do not hold the features' names: give %zu", size,
                                 found.size() + 1);
  }
  found.copy(text, found.size());
  text[found.size()] = '\0';
  return FP_OK;
}
