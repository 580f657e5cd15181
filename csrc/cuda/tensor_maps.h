// Tensor maps of K, V, q and out. They contain the tensor's address, so they are encoded at every run (45 ns each).
#pragma once
#include "cuda/driver.h"
#include "flashpage.h"

namespace flashpage::cuda {

// If the driver refuses a map, fp_last_error names the tensor and its numbers.
int32_t encode_maps(const Driver&, const fp_kv_boxes&, const AttentionParams&, KvMaps&);

}  // namespace flashpage::cuda
