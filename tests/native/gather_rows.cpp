// The kernel that gathers rows, on the host, for tests/kernels/test_gather_rows.py.
#include "flashpage/kernels/helpers/gather_rows.h"

#include "hopper.h"

using namespace flashpage;

extern "C" void gather_rows(const GatherRowsParams* params, int grid) {
  card::launch(grid, GatherRows::threads, [&] { GatherRows::run(*params); });
}
