// kernels/blocks/rotate_write.h on the host, for tests/engines/test_vllm_rotate.py, which sets SOURCE and CACHE.
#include "flashpage/kernels/blocks/rotate_write.h"

#include "hopper.h"

using namespace flashpage;

struct Traits {
  using StoredQuery = SOURCE;
  using StoredCache = CACHE;
};

extern "C" void rotate_write(const RotateWriteParams* params, int grid) {
  card::launch(grid, RotateWrite<Traits>::threads, [&] { RotateWrite<Traits>::run(*params); });
}
