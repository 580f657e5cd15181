// Tensor maps of K, V, q and out, encoded at every run (45 ns each): a map holds its tensor's address.
#pragma once
#include "cuda/driver.h"
#include "flashpage.h"

namespace flashpage::cuda {

// Where the driver refuses a map, fp_last_error says which and with what numbers.
int32_t encode_maps(const Driver&, const fp_kv_boxes&, const AttentionParams&, KvMaps&);

}  // namespace flashpage::cuda
