// A CTA's threads as fibers of one host thread, for the headers of small kernels: what CUDA has built in, as far as
// they use it. A thread runs until it waits for others.
#pragma once
#include <ucontext.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __shared__ static
#define __device__
#define __host__
#define __forceinline__ inline

struct Dim {
  unsigned x = 0;
};
inline Dim threadIdx, blockIdx, gridDim;
struct alignas(8) uint2 {
  unsigned x, y;
};

namespace card {

// Where threads meet; the last one lets all go on.
struct Meeting {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Meeting meeting;
  unsigned values[32];
};

inline std::vector<ucontext_t> threads;
inline std::vector<bool> done;
inline ucontext_t scheduler;
inline std::vector<Warp> warps;
inline Meeting cta;
inline std::function<void()> body;

inline std::function<void()> meanwhile;  // what others than threads do
inline long long turns_in_vain = 0;
// Gives others a turn. Where nobody has moved for long nobody will: the process ends, as fibers cannot be left.
inline void yield() {
  if (++turns_in_vain > 50'000'000) {
    std::fprintf(stderr, "a kernel on the host: everyone waits, thread %u too\n", threadIdx.x);
    std::abort();
  }
  if (meanwhile) meanwhile();
  swapcontext(&threads[threadIdx.x], &scheduler);
}
inline void meet(Meeting& meeting) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    turns_in_vain = 0;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline void thread_main() {
  body();
  done[threadIdx.x] = true;
  yield();
}

// Runs `kernel` in each CTA of a grid, one after the other.
inline void launch(unsigned grid, unsigned num_threads, std::function<void()> kernel) {
  constexpr size_t stack_bytes = 1 << 16;
  static std::vector<char> stacks;
  stacks.resize(num_threads * stack_bytes);
  body = std::move(kernel);
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    threads.assign(num_threads, {});
    done.assign(num_threads, false);
    warps.assign((num_threads + 31) / 32, Warp{{32}, {}});
    cta = {num_threads};
    for (unsigned i = 0; i < num_threads; ++i) {
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = stacks.data() + i * stack_bytes;
      threads[i].uc_stack.ss_size = stack_bytes;
      makecontext(&threads[i], thread_main, 0);
    }
    for (unsigned running = num_threads; running > 0;) {
      running = 0;
      for (threadIdx.x = 0; threadIdx.x < num_threads; ++threadIdx.x) {
        const unsigned i = threadIdx.x;
        if (!done[i]) swapcontext(&scheduler, &threads[i]);
        running += !done[i];
      }
    }
  }
}

// Calls read(values) of all lanes of the caller's warp between two meetings.
template <class Read>
auto exchange(unsigned value, Read&& read) {
  Warp& warp = warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  meet(warp.meeting);
  const auto result = read(warp.values);
  meet(warp.meeting);
  return result;
}

}  // namespace card

inline void __syncthreads() { card::meet(card::cta); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  return card::exchange(vote, [](const unsigned* values) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= values[i] << i;
    return all;
  });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return card::exchange(value, [](const unsigned* values) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= values[i];
    return all;
  });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return card::exchange(static_cast<unsigned>(value),
                        [&](const unsigned* values) { return static_cast<T>(values[lane & 31]); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = threadIdx.x % 32;
  return card::exchange(static_cast<unsigned>(value), [&](const unsigned* values) {
    return static_cast<T>(values[lane < step ? lane : lane - step]);
  });
}
template <class T>
T atomicAdd(T* to, T amount) {
  const T before = *to;
  *to += amount;
  return before;
}
inline unsigned atomicAdd(unsigned* to, int amount) { return atomicAdd<unsigned>(to, amount); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
