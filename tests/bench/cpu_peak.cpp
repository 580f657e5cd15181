// Measures the multiplications of one core: sums stay in registers, nothing is loaded. Argument: seconds to run. Prints
// Gflop/s: fp32, bf16.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "flashpage/cpu/convert.h"

using namespace flashpage;
using namespace flashpage::cpu;

static double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

template <class Operand>
static double gigaflops(double seconds) {
  constexpr int sums_in_flight = 12, steps = 100000;
  FloatLanes sums[sums_in_flight] = {}, factor = splat(0.5f);
  const double start = now();
  long rounds = 0;
  for (; now() - start < seconds; ++rounds)
    for (int step = 0; step < steps; ++step)
#pragma GCC unroll 12
      for (int i = 0; i < sums_in_flight; ++i) sums[i] = multiply_add<Operand>(sums[i], factor, factor);
  const double elapsed = now() - start;
  volatile float kept = 0;
  for (FloatLanes sum : sums) kept = kept + sum[0];
  return 2.0 * num_lanes * word_elements<Operand> * sums_in_flight * steps * rounds / elapsed * 1e-9;
}

int main(int, char** arguments) {
  const double seconds = std::atof(arguments[1]);
  std::printf("%.1f %.1f\n", gigaflops<float>(seconds), gigaflops<Operand<Bf16, Bf16>>(seconds));
}
