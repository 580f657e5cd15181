// kernels/helpers/merge.h on the host, for tests/kernels/test_merge_kernel.py, which sets OUT.
#include "flashpage/kernels/helpers/merge.h"

#include "hopper.h"

using namespace flashpage;

struct Traits {
  using Out = OUT;
};

extern "C" void merge(const MergeParams* params, int grid) {
  card::launch(grid, Merge<Traits>::threads, [&] { Merge<Traits>::run(*params); });
}
