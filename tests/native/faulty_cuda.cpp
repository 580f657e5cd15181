// A library between the host library and libcuda.so.1 (a card's driver, or tests/native/fake_cuda.cpp): counts calls
// and living handles, and lets one call fail, or one allocation of the library's. Preloaded; the rest of the process
// (torch) keeps the driver as it is.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/cuda_api.h"

using namespace flashpage::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

constexpr Result injected = 999;  // CUDA_ERROR_UNKNOWN
constexpr int num_kinds = 4;

enum Id {
#define ID(member, symbol, parameters) id_##member,
  FP_CUDA_FUNCTIONS(ID)
#undef ID
      num_ids
};

const char* const symbols[] = {
#define SYMBOL(member, symbol, parameters) #symbol,
    FP_CUDA_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

// The calls that make and that end a handle of each kind: events, streams, libraries, pinned memory.
constexpr int makes[num_kinds][2] = {{id_event_create, id_event_create},
                                     {id_stream_create, id_stream_create_with_priority},
                                     {id_library_load_data, id_library_load_data},
                                     {id_mem_host_alloc, id_mem_host_alloc}};
constexpr int ends[num_kinds] = {id_event_destroy, id_stream_destroy, id_library_unload, id_mem_free_host};

std::atomic<int> calls_left{-1};  // before one fails; -1: none does
std::atomic<int> allocations_left{-1};
std::atomic<int> failed{-1};  // which call did
std::atomic<int> failed_allocations{0};
std::atomic<int> alive[num_kinds];
std::atomic<int> failures[num_ids];  // of each function

void* real_library() {
  static void* const library = [] {
    using Dlopen = void* (*)(const char*, int);
    return reinterpret_cast<Dlopen>(dlsym(RTLD_NEXT, "dlopen"))("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  }();
  return library;
}

// Never refused: without them an error has no text; and what ends a handle, whose failure leaves nothing to do.
bool may_fail(int id) {
  for (int end : ends) {
    if (id == end) return false;
  }
  return id != id_get_error_name && id != id_get_error_string;
}

template <int id, class Function>
struct Forward;

template <int id, class... Arguments>
struct Forward<id, Result(Arguments...)> {
  static Result call(Arguments... arguments) {
    using Function = Result (*)(Arguments...);
    static const auto real = reinterpret_cast<Function>(dlsym(real_library(), symbols[id]));
    if (may_fail(id)) {
      if (calls_left >= 0 && calls_left-- == 0) {
        failed = id;
        ++failures[id];
        return injected;
      }
    }
    const Result result = real(arguments...);
    for (int kind = 0; kind < num_kinds; ++kind) {
      if (result == success && (id == makes[kind][0] || id == makes[kind][1])) ++alive[kind];
      if (id == ends[kind]) --alive[kind];
    }
    return result;
  }
};

// Whether the library made the call that returns to `address`.
bool is_of_library(const void* address) {
  static thread_local bool asking = false;  // dladdr itself may allocate
  if (asking) return false;
  asking = true;
  Dl_info info{};
  const bool found = dladdr(const_cast<void*>(address), &info) != 0 && info.dli_fname != nullptr &&
                     strstr(info.dli_fname, "libflashpage") != nullptr;
  asking = false;
  return found;
}

bool refuses_memory(const void* caller) {
  if (allocations_left < 0 || !is_of_library(caller)) return false;
  if (allocations_left-- != 0) return false;
  ++failed_allocations;
  return true;
}

}  // namespace

// A function of the driver's name, which the library finds by dlsym.
#define DEFINE(member, symbol, parameters)                                                                 \
  extern "C" {                                                                                             \
  static Result(*resolve_##symbol()) parameters { return &Forward<id_##member, Result parameters>::call; } \
  __attribute__((visibility("default"), ifunc("resolve_" #symbol))) Result symbol parameters;              \
  }
FP_CUDA_FUNCTIONS(DEFINE)

EXPORT void* dlopen(const char* name, int flags) {
  using Dlopen = void* (*)(const char*, int);
  static const auto real = reinterpret_cast<Dlopen>(dlsym(RTLD_NEXT, "dlopen"));
  if (name != nullptr && strcmp(name, "libcuda.so.1") == 0 && is_of_library(__builtin_return_address(0))) {
    Dl_info self{};
    dladdr(reinterpret_cast<void*>(&dlopen), &self);
    return real_library() == nullptr ? nullptr : real(self.dli_fname, flags);
  }
  return real(name, flags);
}

EXPORT void* malloc(size_t bytes) {
  return refuses_memory(__builtin_return_address(0)) ? (errno = ENOMEM, nullptr) : __libc_malloc(bytes);
}
EXPORT void* aligned_alloc(size_t alignment, size_t bytes) {
  return refuses_memory(__builtin_return_address(0)) ? (errno = ENOMEM, nullptr) : __libc_memalign(alignment, bytes);
}

// The call (allocation) after so many others fails; negative: none does.
EXPORT void faulty_fail_call(int after) {
  if (after >= 0) failed = -1;
  calls_left = after;
}
EXPORT const char* faulty_failed() { return failed < 0 ? "" : symbols[failed]; }
EXPORT void faulty_fail_allocation(int after) {
  if (after >= 0) failed_allocations = 0;
  allocations_left = after;
}
EXPORT int faulty_failed_allocations() { return failed_allocations; }
EXPORT int faulty_alive(int kind) { return alive[kind]; }

// Number of the functions; and of each its name, how often it failed, and whether its calls may fail.
EXPORT int faulty_functions() { return num_ids; }
EXPORT const char* faulty_name(int id) { return symbols[id]; }
EXPORT int faulty_failures(int id) { return failures[id]; }
EXPORT int faulty_may_fail(int id) { return may_fail(id); }
