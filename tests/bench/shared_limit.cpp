// Tells a library that chooses its tiles by cudaDeviceGetAttribute that the card has less shared memory, such as the
// 100 KiB a multiprocessor, 99 a block, of an RTX 4090:
//     c++ -O2 -shared -fPIC tests/bench/shared_limit.cpp -o shared_limit.so
//     LD_PRELOAD=$PWD/shared_limit.so SHARED_KIB=100 python tests/bench/gpu.py prefill --libraries 'flashinfer fa2'
#include <dlfcn.h>

#include <cstdlib>

namespace {
constexpr int OF_MULTIPROCESSOR = 81, OF_BLOCK = 97;  // cudaDevAttrMaxSharedMemoryPerMultiprocessor and -PerBlockOptin
constexpr int KIB = 1024, RESERVED = 1024;            // the driver keeps 1 KiB of each block
using GetAttribute = int(int*, int, int);
}  // namespace

extern "C" int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  static auto* const original =
      reinterpret_cast<GetAttribute*>(dlsym(dlopen("libcudart.so.13", RTLD_LAZY), "cudaDeviceGetAttribute"));
  static const char* const limit = std::getenv("SHARED_KIB");
  if (limit == nullptr || (attribute != OF_MULTIPROCESSOR && attribute != OF_BLOCK)) {
    return original(value, attribute, device);
  }
  *value = std::atoi(limit) * KIB - (attribute == OF_BLOCK ? RESERVED : 0);
  return 0;
}
