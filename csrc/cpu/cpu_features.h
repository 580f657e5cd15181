// The instruction sets that this machine's cores and operating system can run.
#pragma once

namespace flashpage::host {

struct CpuFeatures {
  bool avx2, fma, f16c, bmi2, avx512f, avx512bw, avx512cd, avx512dq, avx512vl, avx512vnni, avx512bf16, neon;
};

const CpuFeatures& cpu_features();

}  // namespace flashpage::host
