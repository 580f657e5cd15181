// Boxes of 128 bytes a row; outside of a tensor there are zeros.
#pragma once
#include "flashpage/common/tensor_map.h"
#include "hopper.h"

namespace hopper {

// Columns first, as the driver has them. Sizes of columns, and of boxes' columns, and strides are bytes.
struct Map {
  const u8* data;
  i64 element_bytes;
  i64 sizes[4], strides[4];
  i64 box[4];
};
inline std::map<const TensorMap*, Map> maps;

}  // namespace hopper

namespace flashpage::ptx {

inline void prefetch_tensor_map(const TensorMap&) {}
inline void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page) {
  hopper::copies.push_back([=, &from = hopper::maps.at(&map)] {
    const i64 rows = from.box[1] * from.box[2] * from.box[3];
    for (i64 i = 0; i < rows * 128; ++i) {
      const i64 row = i / 128;
      const i64 place[4] = {column * from.element_bytes + i % 128, token + row % from.box[1],
                            head + row / from.box[1] % from.box[2], page + row / (from.box[1] * from.box[2])};
      i64 offset = 0;
      bool exists = true;
      for (int d = 0; d < 4; ++d) {
        exists = exists && place[d] >= 0 && place[d] < from.sizes[d];
        offset += place[d] * from.strides[d];
      }
      hopper::swizzled(shared + i) = exists ? from.data[offset] : 0;
    }
    hopper::Barrier& here = hopper::barriers.at(barrier);
    here.bytes -= rows * 128;
    here.settle();
  });
}
inline void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page, u64) {
  tensor_copy(shared, map, barrier, column, token, head, page);
}
inline void tensor_copy_to_pair(u32, const TensorMap&, u32, i32, i32, i32, i32) { hopper::stop("no pair is there"); }

}  // namespace flashpage::ptx
