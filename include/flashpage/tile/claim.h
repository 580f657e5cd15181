// Plans by SM: which CTA takes which list. List i is weighted for SM i; a CTA claims the list of the SM that it runs
// on, and the next free one where another CTA of the launch ran there before (while other work held some SM).
#pragma once
#include "flashpage/plan/work_item.h"
#include "flashpage/ptx/atomic.h"

namespace flashpage {

// One thread of each CTA; `claims` is plan_claims() of a plan whose claims_offset is not 0, and num_lists its num_ctas,
// which is also the grid. `preferred`: the SM's index.
FP_DEVICE i32 claim_list(u32* claims, i32 num_lists, i32 preferred) {
  i32 list = preferred % num_lists;
  while (ptx::exchange(claims + list, 1) != 0) list = list + 1 < num_lists ? list + 1 : 0;
  return list;
}

// The same thread, at any time after its claim: best where nothing waits for it. The last CTA to come leaves the claims
// at zero for the next launch; before that, a late one could take a list twice.
FP_DEVICE void release_claims(u32* claims, i32 num_lists) {
  if (ptx::add_acquire_release(claims + num_lists, 1) != static_cast<u32>(num_lists) - 1) return;
  for (i32 i = 0; i <= num_lists; ++i) claims[i] = 0;
}

}  // namespace flashpage
