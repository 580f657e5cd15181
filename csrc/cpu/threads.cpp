#include "cpu/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>

#include "errors.h"

namespace flashpage::host {
namespace {

constexpr int max_threads = 1024;  // MAX_COUNT in flashpage/base/env.py
constexpr int max_loops = 16;      // of different callers at a time; another caller runs its loop alone
constexpr int wakes_each =
    2;  // threads that one thread wakes, as a tree: a single waker would take a microsecond for each
// Pauses before a thread sleeps: some 10 us, more than the gap between attention and its merge.
constexpr int spin_pauses = 500;

// Tells the core that this thread waits, so that the core's other thread runs faster.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif __has_builtin(__builtin_arm_isb)  // clang's; "yield" does nothing on most Arm cores
  __builtin_arm_isb(15);
#endif
}

// An integer to wait for: the thread spins for a few microseconds, then sleeps in the kernel. Waking takes a system
// call only if a thread sleeps.
struct Word {
  std::atomic<int> value{0};
  std::atomic<int> sleepers{0};

  void wait_while(int seen) {
    for (int i = 0; i < spin_pauses; ++i) {
      if (value.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    sleepers.fetch_add(1);
    syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
  }

  void wake(int threads) {
    if (sleepers.load() > 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
  }
};

thread_local bool inside_loop = false;

// One caller's loop. Its memory belongs to the pool, so that a late worker finds a closed loop and never freed memory.
struct alignas(64) Loop {
  std::atomic<bool> taken{false};  // by a caller
  std::atomic<bool> open{false};   // workers may enter
  Word inside;                     // number of workers between entering and leaving
  LoopBody body = nullptr;
  void* context = nullptr;
  std::atomic<int> count{0};
  alignas(64) std::atomic<int> next{0};

  void work() {
    inside_loop = true;
    const int end = count.load(std::memory_order_relaxed);
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) body(context, i);
    inside_loop = false;
  }

  int indices_left() const {
    return open.load() ? count.load(std::memory_order_relaxed) - next.load(std::memory_order_relaxed) : 0;
  }

  // `inside` rises before `open` is read, and the caller clears `open` before it reads `inside`. Both are sequentially
  // consistent, so the caller sees every worker that saw the loop open.
  void help() {
    inside.value.fetch_add(1);
    if (open.load()) work();
    if (inside.value.fetch_sub(1) == 1) inside.wake(1);
  }

  void close_and_wait() {
    open.store(false);
    for (int left; (left = inside.value.load()) != 0;) inside.wait_while(left);
  }
};

struct Pool {
  explicit Pool(int threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // only the program's own threads handle signals
    for (size = 1; size < threads; ++size) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, [](void* pool) { return static_cast<Pool*>(pool)->serve(); }, this) != 0)
        break;
      pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void run(int count, LoopBody body, void* context) {
    Loop* loop = std::find_if(std::begin(loops), std::end(loops), [](Loop& l) { return !l.taken.exchange(true); });
    if (loop == std::end(loops)) {
      for (int i = 0; i < count; ++i) body(context, i);
      return;
    }
    loop->body = body;
    loop->context = context;
    loop->count.store(count, std::memory_order_relaxed);
    loop->next.store(0, std::memory_order_relaxed);
    loop->open.store(true);
    calls.value.fetch_add(1);
    calls.wake(std::min(count - 1, wakes_each));
    loop->work();
    loop->close_and_wait();
    loop->taken.store(false, std::memory_order_release);
  }

  void* serve() {
    while (!retired.load()) {
      const int seen = calls.value.load();
      for (Loop& loop : loops) {
        const int left = loop.indices_left();
        if (left <= 0) continue;
        if (left > 1) calls.wake(std::min(left - 1, wakes_each));
        loop.help();
      }
      calls.wait_while(seen);
    }
    return nullptr;
  }

  void retire() {
    retired.store(true);
    calls.value.fetch_add(1);
    calls.wake(INT_MAX);
  }

  int size;  // threads, the caller's included
  std::atomic<bool> retired{false};
  alignas(64) Word calls;  // rises with every loop; idle workers wait for it
  Loop loops[max_loops];
};

// A pool is never freed, because a worker or another caller may still read it. It has a few kilobytes, and a new one is
// made only after a fork or a change of the number of threads.
std::atomic<Pool*> current{nullptr};
std::mutex creation;
int wanted_threads = 0;  // fp_cpu_set_threads; 0: default. Guarded by `creation`.

int default_threads() {
  // On very large machines the mask is wider than cpu_set_t.
  for (int cpus = CPU_SETSIZE; cpus <= 64 * CPU_SETSIZE; cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    size_t bytes = CPU_ALLOC_SIZE(cpus);
    int n = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (n > 0) return std::min(n, max_threads);
  }
  return 1;
}

Pool& pool() {
  if (Pool* ready = current.load(std::memory_order_acquire)) return *ready;
  std::lock_guard lock(creation);
  if (Pool* ready = current.load(std::memory_order_acquire)) return *ready;
  // fork() copies the memory but not the workers, so the child forgets the pool and makes its own at first use. The
  // lock is held across the fork, so that the child's copy is not locked.
  static bool handlers = [] {
    pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                   [] {
                     current.store(nullptr);
                     creation.unlock();
                   });
    return true;
  }();
  (void)handlers;
  Pool* made = new (std::nothrow) Pool(wanted_threads > 0 ? wanted_threads : default_threads());
  if (made == nullptr) {
    static Pool alone(1);  // no memory for workers: callers work by themselves until there is some
    return alone;
  }
  current.store(made, std::memory_order_release);
  return *made;
}

}  // namespace

void parallel_for(int count, LoopBody body, void* context) {
  if (count > 1 && !inside_loop) {
    Pool& workers = pool();
    if (workers.size > 1) return workers.run(count, body, context);
  }
  for (int i = 0; i < count; ++i) body(context, i);
}

}  // namespace flashpage::host

using namespace flashpage::host;

int32_t fp_cpu_threads() { return pool().size; }

int32_t fp_cpu_set_threads(int32_t n) {
  if (n < 0 || n > max_threads)
    return fail(FP_INTERNAL, "threads is %d: give 1 to %d, or 0 for the default", n, max_threads);
  std::lock_guard lock(creation);
  wanted_threads = n;
  if (Pool* old = current.exchange(nullptr)) old->retire();
  return FP_OK;
}
