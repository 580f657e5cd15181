// Runs the threads of a CTA or of a cluster's CTAs as fibers of one host thread, for the headers of small kernels, with
// the parts of CUDA that they use. A thread runs until it waits for others.
#pragma once
#include <setjmp.h>
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
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float number) { return std::bit_cast<unsigned>(number); }

namespace card {

// A barrier: the last thread to arrive releases all.
struct Meeting {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Meeting meeting;
  unsigned values[32];
};

// A point in the program at which a fiber continues. _setjmp does not save the signal mask, which swapcontext sets by a
// system call at every switch.
struct Place {
  jmp_buf registers;
};

inline std::vector<ucontext_t> beginnings;  // of threads that have not begun
inline std::vector<Place> places;           // of threads that have begun
inline std::vector<char> begun, done;
inline std::vector<std::function<bool()>> waits;  // the condition that each waiting thread waits for
inline Place scheduler;
inline std::vector<Warp> warps;
inline std::vector<Meeting> ctas;  // barriers of each CTA's threads
inline Meeting cluster;
inline unsigned fiber, cta_threads;  // the running thread among those of all CTAs, and the threads of each
inline std::function<void()> body;

// The rank of the running thread's CTA in its cluster.
inline unsigned cta_rank() { return fiber / cta_threads; }

// Switches from the scheduler to the thread that `fiber` names, and back.
inline void enter() {
  if (_setjmp(scheduler.registers) != 0) return;
  if (begun[fiber]) _longjmp(places[fiber].registers, 1);
  begun[fiber] = true;
  setcontext(&beginnings[fiber]);
}
inline void leave() {
  if (_setjmp(places[fiber].registers) == 0) _longjmp(scheduler.registers, 1);
}

inline std::function<void()> meanwhile;  // called between threads, for example to let copies land
inline long long idle_switches = 0;
// Called when a thread has nothing to do. If no thread has made progress for long, all of them wait for each other. The
// process then ends, because fibers cannot be unwound.
inline void pass() {
  if (++idle_switches > 50'000'000) {
    std::fprintf(stderr, "a kernel on the host: everyone waits, thread %u too\n", fiber);
    std::abort();
  }
  if (meanwhile) meanwhile();
}
// Lets other threads run until is_over() is true. The scheduler calls is_over() itself, because it mostly returns false
// and a switch costs far more.
template <class IsOver>
void wait_until(IsOver&& is_over) {
  if (is_over()) return;
  pass();
  waits[fiber] = std::ref(is_over);
  leave();
}
inline void meet(Meeting& meeting) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    idle_switches = 0;
    return;
  }
  wait_until([&] { return meeting.generation != generation; });
}

inline void thread_main() {
  body();
  done[fiber] = true;
  leave();
}

// Runs the thread that `fiber` names until it waits.
inline void resume_thread() {
  std::function<bool()>& is_over = waits[fiber];
  if (is_over) {
    if (!is_over()) return pass();
    is_over = nullptr;
  }
  enter();
}

// Warps that fall asleep at random, some of them for long, as warps of a card may: FLASHPAGE_HOST_SEED, 0 for none.
struct Sleep {
  unsigned long long state;
  std::vector<unsigned> sweeps;  // that each warp still sleeps

  explicit Sleep(unsigned warps) : state(0), sweeps(warps) {
    if (const char* seed = std::getenv("FLASHPAGE_HOST_SEED")) state = std::strtoull(seed, nullptr, 10) % 2147483647;
  }
  unsigned draw(unsigned below) { return (state = state * 48271 % 2147483647) % below; }  // std::minstd_rand
  void next_sweep() {
    if (state == 0) return;
    for (unsigned& left : sweeps) {
      if (left > 0) {
        --left;
      } else if (draw(8) == 0) {
        left = draw(16) == 0 ? 400 : 2;
      }
    }
  }
};

// Runs `kernel` in each cluster of a grid, one after another; most kernels have clusters of one CTA.
inline void launch(unsigned grid, unsigned threads_of_cta, std::function<void()> kernel, unsigned cluster_ctas = 1) {
  constexpr size_t stack_bytes = 1 << 16;
  static std::vector<char> stacks;
  const unsigned num_threads = threads_of_cta * cluster_ctas;
  stacks.resize(num_threads * stack_bytes);
  body = std::move(kernel);
  gridDim.x = grid;
  cta_threads = threads_of_cta;
  for (unsigned first_cta = 0; first_cta < grid; first_cta += cluster_ctas) {
    beginnings.assign(num_threads, {});
    places.assign(num_threads, {});
    begun.assign(num_threads, false);
    done.assign(num_threads, false);
    waits.assign(num_threads, {});
    warps.assign((num_threads + 31) / 32, Warp{{32}, {}});
    ctas.assign(cluster_ctas, {threads_of_cta});
    cluster = {num_threads};
    for (unsigned i = 0; i < num_threads; ++i) {
      getcontext(&beginnings[i]);
      beginnings[i].uc_stack.ss_sp = stacks.data() + i * stack_bytes;
      beginnings[i].uc_stack.ss_size = stack_bytes;
      makecontext(&beginnings[i], thread_main, 0);
    }
    Sleep sleep((num_threads + 31) / 32);
    for (unsigned running = num_threads; running > 0; sleep.next_sweep()) {
      running = 0;
      for (unsigned i = 0; i < num_threads; ++i) {
        if (done[i]) continue;
        if (sleep.sweeps[i / 32] == 0) {
          fiber = i;
          threadIdx.x = i % threads_of_cta;
          blockIdx.x = first_cta + i / threads_of_cta;
          resume_thread();
        }
        running += !done[i];
      }
    }
  }
}

// Calls read(values) with the values of all lanes of the caller's warp, between two barriers of the warp.
template <class Read>
auto exchange(unsigned value, Read&& read) {
  Warp& warp = warps[fiber / 32];
  warp.values[threadIdx.x % 32] = value;
  meet(warp.meeting);
  const auto result = read(warp.values);
  meet(warp.meeting);
  return result;
}

}  // namespace card

inline void __syncthreads() { card::meet(card::ctas[card::cta_rank()]); }
inline int __syncthreads_or(int vote) {
  static bool any;
  any |= vote != 0;
  __syncthreads();
  const bool found = any;
  __syncthreads();
  any = false;
  __syncthreads();  // before the next vote
  return found;
}
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
inline unsigned atomicInc(unsigned* to, unsigned last) {
  const unsigned before = *to;
  *to = before >= last ? 0 : before + 1;
  return before;
}
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
