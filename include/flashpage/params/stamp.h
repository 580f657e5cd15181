// The stamps of a CTA in kernels that are compiled with a trace.
#pragma once

namespace flashpage {

// flashpage/run/stamps.py has the same list.
enum class Stamp {
  start,       // the CTA runs and may read global memory
  plan_known,  // its first unit is known
  first_load,  // copies of its first K and V are issued
  first_tile,  // they have arrived
  last_tile,   // the last ones were used
  written,     // the last unit's rows are written
  end,         // merges are done
  sm,          // not a time: the number of the CTA's SM, or of the CPU's core
  count,
};

}  // namespace flashpage
