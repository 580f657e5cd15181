// The CPU backend's thread pool: a parallel loop with dynamic scheduling.
#pragma once
#include <type_traits>

namespace flashpage::host {

using LoopBody = void (*)(void* context, int index);

// Calls body(context, i) once for every i in [0, count), on the pool and on the caller's thread; returns when all calls
// have returned. May be called from any thread at any time: loops of several callers share the pool, and a loop inside
// a loop runs on its own thread.
void parallel_for(int count, LoopBody body, void* context);

template <class F>
void parallel_for(int count, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_for(count, [](void* context, int index) { (*static_cast<Body*>(context))(index); }, &body);
}

}  // namespace flashpage::host
