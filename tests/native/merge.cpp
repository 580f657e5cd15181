// kernels/helpers/merge.h on the host, for tests/kernels/test_merge_kernel.py, which sets OUT and BY_COLUMNS.
#include "flashpage/kernels/helpers/merge.h"

#include "hopper.h"

using namespace flashpage;

struct Traits {
  using Out = OUT;
  static constexpr bool by_columns = BY_COLUMNS;
};

extern "C" void merge(const MergeParams* params, int grid) {
  card::launch(grid, Merge<Traits>::threads, [&] { Merge<Traits>::run(*params); });
}
