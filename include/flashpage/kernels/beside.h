// Two launches of one run side by side on the SMs of a card, each with fewer CTAs than there are SMs.
//
// All CTAs of the first have waited for whatever came before the run when they let the second begin: it need not wait
// for that again, and of the first it reads nothing. But who comes after the run waits for the second alone. So that
// one waits for the first too, when it has done its own work.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

// Before a CTA's first access to global memory.
FP_DEVICE void wait_for_inputs(Beside beside) {
  if (beside != Beside::second) ptx::grid_dependency_wait();
  if (beside == Beside::first) ptx::grid_dependency_launch();
}

// When a CTA reads no more: what follows the run may begin to be launched.
FP_DEVICE void end_reading(Beside beside) {
  if (beside != Beside::first) ptx::grid_dependency_launch();
  if (beside == Beside::second) ptx::grid_dependency_wait();
}

}  // namespace flashpage
