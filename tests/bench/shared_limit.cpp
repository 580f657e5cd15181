// Tells a library that chooses its tiles by cudaDeviceGetAttribute that the card has less shared memory, such as the
// 100 KiB a multiprocessor, 99 a block, of an RTX 4090:
//     c++ -O2 -shared -fPIC tests/bench/shared_limit.cpp -o shared_limit.so
//     LD_PRELOAD=$PWD/shared_limit.so SHARED_KIB=100 python tests/bench/gpu.py prefill --libraries 'flashinfer fa2'
//
// The choice alone leaves the card's own shared memory to the blocks: as many are resident as fit 228 KiB. With
// SHARED_HELD=1 each launch of at least 16 KiB reserves so much more that no more of its blocks fit a
// multiprocessor than fit the limit.
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>

namespace {
constexpr int OF_MULTIPROCESSOR = 81, OF_BLOCK = 97;  // cudaDevAttrMaxSharedMemoryPerMultiprocessor and -PerBlockOptin
constexpr int MOST_DYNAMIC = 8;                       // cudaFuncAttributeMaxDynamicSharedMemorySize
constexpr std::size_t KIB = 1024, RESERVED = 1024;    // the driver keeps 1 KiB of each block
constexpr std::size_t OWN = 228 * KIB;                // a Hopper multiprocessor's

struct Dim {
  unsigned x, y, z;
};
struct LaunchConfig {  // cudaLaunchConfig_t
  Dim grid, block;
  std::size_t dynamic_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(dlopen("libcudart.so.13", RTLD_LAZY), name));
}
int number(const char* name) {
  const char* const text = std::getenv(name);
  return text ? std::atoi(text) : 0;
}
const int limit_kib = number("SHARED_KIB"), is_held = number("SHARED_HELD");

// The dynamic bytes with which as many blocks fit this card as fit the limit without more.
std::size_t held_bytes(const void* kernel, std::size_t bytes) {
  if (!limit_kib || !is_held || bytes < 16 * KIB) return bytes;
  const std::size_t fitting = limit_kib * KIB / (bytes + RESERVED);
  if (fitting == 0 || OWN / (bytes + RESERVED) <= fitting) return bytes;
  const std::size_t most = OWN / fitting - RESERVED;
  // Fewer bytes than `most`, as blocks are counted in steps, but too many for another block.
  const std::size_t enough = (OWN / (fitting + 1) + 2 * KIB) / KIB * KIB;
  const std::size_t held = enough < most ? enough : most;
  static auto* const set = original<int(const void*, int, int)>("cudaFuncSetAttribute");
  return set(kernel, MOST_DYNAMIC, static_cast<int>(held)) == 0 ? held : bytes;
}
}  // namespace

extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  static auto* const get = original<int(int*, int, int)>("cudaDeviceGetAttribute");
  if (!limit_kib || (attribute != OF_MULTIPROCESSOR && attribute != OF_BLOCK)) return get(value, attribute, device);
  *value = static_cast<int>(limit_kib * KIB - (attribute == OF_BLOCK ? RESERVED : 0));
  return 0;
}

extern "C" int cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** arguments, std::size_t bytes,
                                void* stream) {
  static auto* const launch = original<int(const void*, Dim, Dim, void**, std::size_t, void*)>("cudaLaunchKernel");
  return launch(kernel, grid, block, arguments, held_bytes(kernel, bytes), stream);
}

extern "C" int cudaLaunchKernelExC(const LaunchConfig* config, const void* kernel, void** arguments) {
  static auto* const launch = original<int(const LaunchConfig*, const void*, void**)>("cudaLaunchKernelExC");
  LaunchConfig changed = *config;
  changed.dynamic_bytes = held_bytes(kernel, config->dynamic_bytes);
  return launch(&changed, kernel, arguments);
}
