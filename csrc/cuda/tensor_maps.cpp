#include "cuda/tensor_maps.h"

#include <cstdio>

namespace flashpage::cuda {
namespace {

constexpr int rank = 4;

int32_t refused(Result result, const char* name, const void* address, const fp_box_form& form) {
  char what[512];
  std::snprintf(what, sizeof(what),
                "encoding the tensor map of %s: address %p, %d-byte elements, box %d x %d x %d x %d of %lld columns x "
                "%lld tokens x %lld heads x %lld pages, strides of %lld, %lld and %lld bytes",
                name, address, form.element_bytes, form.box[0], form.box[1], form.box[2], form.box[3],
                static_cast<i64>(form.dims[0]), static_cast<i64>(form.dims[1]), static_cast<i64>(form.dims[2]),
                static_cast<i64>(form.dims[3]), static_cast<i64>(form.strides[0]), static_cast<i64>(form.strides[1]),
                static_cast<i64>(form.strides[2]));
  return fail(result, what);
}

Result encode(const Driver& cuda, const fp_box_form& form, const void* address, TensorMap& map) {
  static constexpr unsigned element_strides[rank] = {1, 1, 1, 1};
  const int data_type = form.element_bytes == 1 ? tensor_map_uint8 : tensor_map_uint16;
  const auto* dims = reinterpret_cast<const uint64_t*>(form.dims);
  const auto* strides = reinterpret_cast<const uint64_t*>(form.strides);
  const auto* box = reinterpret_cast<const unsigned*>(form.box);
  const bool is_narrow = form.box[0] * form.element_bytes <= 64;
  const int swizzle = is_narrow ? tensor_map_swizzle_64b : tensor_map_swizzle_128b;
  // L2 promotion to 256 bytes would cost 5 to 7% of the bandwidth.
  return cuda.tensor_map_encode_tiled(&map, data_type, rank, const_cast<void*>(address), dims, strides, box,
                                      element_strides, tensor_map_interleave_none, swizzle,
                                      tensor_map_l2_promotion_none, tensor_map_fill_zeros);
}

}  // namespace

int32_t encode_maps(const Driver& cuda, const fp_kv_boxes& boxes, const AttentionParams& params, KvMaps& maps) {
  const struct {
    const char* name;
    const fp_box_form& form;
    const void* data;
    TensorMap& map;
  } tensors[] = {{"K", boxes.k, params.k.data, maps.k},
                 {"V", boxes.v, params.v.data, maps.v},
                 {"q", boxes.q, params.q, maps.q},
                 {"out", boxes.out, params.out, maps.out}};
  for (const auto& [name, form, data, map] : tensors) {
    if (form.element_bytes == 0) continue;
    // An empty tensor has no address. Nothing is loaded through its map, but a kernel may prefetch the map.
    const void* address = data != nullptr ? data : params.plan;
    if (const Result result = encode(cuda, form, address, map)) return refused(result, name, address, form);
  }
  return FP_OK;
}

}  // namespace flashpage::cuda
