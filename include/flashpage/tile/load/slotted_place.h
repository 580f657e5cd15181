// A unit in a ring of slots.
#pragma once
#include "flashpage/tile/unit.h"

namespace flashpage {

// A unit that the loading warps pass to the computing ones.
struct SlottedPlace {
  Place place;
  i32 first_token;  // of the first slot; may be before the unit's first token
  i32 slots;
  const MergeItem* merge;  // of a piece
  u32* arrivals;
  u32 others_are_done;  // 1: all other pieces of the unit were done shortly before this one ends
  u32 in_cluster;       // true if all pieces of this unit are in this cluster, which then merges them
};

}  // namespace flashpage
