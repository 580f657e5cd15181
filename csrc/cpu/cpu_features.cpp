// Reads the processor itself: __builtin_cpu_supports needs a runtime library that not every compiler brings.
#include "cpu/cpu_features.h"

#include <string>

#include "errors.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace flashpage::host {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros for a leaf that the processor does not have.
Registers read_leaf(unsigned leaf, unsigned subleaf) {
  Registers found;
  __get_cpuid_count(leaf, subleaf, &found.eax, &found.ebx, &found.ecx, &found.edx);
  return found;
}

// The registers that the operating system saves when it changes threads (XCR0).
[[gnu::target("xsave")]] unsigned long long saved_registers() { return _xgetbv(0); }

constexpr bool bit(unsigned long long word, int number) { return word >> number & 1; }

CpuFeatures read_features() {
  const Registers basic = read_leaf(1, 0), extended = read_leaf(7, 0);
  const Registers more = extended.eax > 0 ? read_leaf(7, 1) : Registers{};
  const unsigned long long saved = bit(basic.ecx, 27) ? saved_registers() : 0;
  const bool ymm = (saved & 0x6) == 0x6, zmm = ymm && (saved & 0xe0) == 0xe0;
  return {
      .avx2 = ymm && bit(extended.ebx, 5),
      .fma = ymm && bit(basic.ecx, 12),
      .f16c = ymm && bit(basic.ecx, 29),
      .bmi2 = bit(extended.ebx, 8),
      .avx512f = zmm && bit(extended.ebx, 16),
      .avx512bw = zmm && bit(extended.ebx, 30),
      .avx512cd = zmm && bit(extended.ebx, 28),
      .avx512dq = zmm && bit(extended.ebx, 17),
      .avx512vl = zmm && bit(extended.ebx, 31),
      .avx512vnni = zmm && bit(extended.ecx, 11),
      .avx512bf16 = zmm && bit(more.eax, 5),
      .neon = false,
  };
}

#else

CpuFeatures read_features() {
  CpuFeatures features = {};
  features.neon = true;  // every 64-bit Arm processor has it
  return features;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures found = read_features();
  return found;
}

}  // namespace flashpage::host

int32_t fp_cpu_features(char* text, int32_t size) {
  const flashpage::host::CpuFeatures& has = flashpage::host::cpu_features();
  const struct {
    const char* name;  // of the compiler's -m option
    bool present;
  } features[] = {
      {"avx2", has.avx2},
      {"fma", has.fma},
      {"f16c", has.f16c},
      {"bmi2", has.bmi2},
      {"avx512f", has.avx512f},
      {"avx512bw", has.avx512bw},
      {"avx512cd", has.avx512cd},
      {"avx512dq", has.avx512dq},
      {"avx512vl", has.avx512vl},
      {"avx512vnni", has.avx512vnni},
      {"avx512bf16", has.avx512bf16},
      {"neon", has.neon},
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
