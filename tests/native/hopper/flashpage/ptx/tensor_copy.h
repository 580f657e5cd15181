// Boxes with rows of 128 or 64 bytes, which are swizzled; elements outside a tensor are zeros.
#pragma once
#include "flashpage/common/tensor_map.h"
#include "flashpage/ptx/cluster.h"
#include "hopper.h"

namespace hopper {

// A tensor map. Columns come first, as in the driver's. The number of columns (of the tensor and of boxes) and strides
// are in bytes.
struct Map {
  u8* data;
  i64 element_bytes;
  i64 sizes[4], strides[4];
  i64 box[4];
};
inline std::map<const TensorMap*, Map> maps;

// Calls visit(byte of shared memory, byte of the tensor or null if it has none) for all bytes of a box.
template <class Visit>
void for_each_byte(const Map& map, u32 shared, i32 column, i32 token, i32 head, i32 page, Visit&& visit) {
  const i64 rows = map.box[1] * map.box[2] * map.box[3], row_bytes = map.box[0];
  for (i64 i = 0; i < rows * row_bytes; ++i) {
    const i64 row = i / row_bytes;
    const i64 place[4] = {column * map.element_bytes + i % row_bytes, token + row % map.box[1],
                          head + row / map.box[1] % map.box[2], page + row / (map.box[1] * map.box[2])};
    i64 offset = 0;
    bool exists = true;
    for (int d = 0; d < 4; ++d) {
      exists = exists && place[d] >= 0 && place[d] < map.sizes[d];
      offset += place[d] * map.strides[d];
    }
    visit(row_bytes == 64 ? swizzled_64(shared + i) : swizzled(shared + i), exists ? map.data + offset : nullptr);
  }
}

// Number of stores of each thread that have not read shared memory yet.
inline std::map<unsigned, int> stores;

}  // namespace hopper

namespace flashpage::ptx {

inline void prefetch_tensor_map(const TensorMap&) {}
inline void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page) {
  hopper::land_later(hopper::lateness(), [=, &from = hopper::maps.at(&map)] {
    hopper::for_each_byte(from, shared, column, token, head, page,
                          [](u8& here, const u8* there) { here = there != nullptr ? *there : 0; });
    hopper::Barrier& here = hopper::barriers.at(barrier);
    here.bytes -= from.box[0] * from.box[1] * from.box[2] * from.box[3];
    here.settle();
  });
}
inline void tensor_copy(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head, i32 page, u64) {
  tensor_copy(shared, map, barrier, column, token, head, page);
}
inline void tensor_prefetch(const TensorMap& map, i32, i32, i32, i32) { hopper::maps.at(&map); }
inline void tensor_copy_to_pair(u32 shared, const TensorMap& map, u32 barrier, i32 column, i32 token, i32 head,
                                i32 page) {
  for (u32 rank = 0; rank < 2; ++rank)
    tensor_copy(peer_address(shared, rank), map, peer_address(barrier, rank), column, token, head, page);
}
inline void tensor_store(const TensorMap& map, u32 shared, i32 column, i32 token, i32 head, i32 page) {
  ++hopper::stores[card::fiber];
  hopper::copies.push_back([=, thread = card::fiber, &to = hopper::maps.at(&map)] {
    hopper::for_each_byte(to, shared, column, token, head, page, [](u8& here, u8* there) {
      if (there != nullptr) *there = here;
    });
    --hopper::stores[thread];
  });
}
inline void wait_stores() {
  card::wait_until([] { return hopper::stores[card::fiber] == 0; });
}
inline void wait_stores_have_read() { wait_stores(); }

}  // namespace flashpage::ptx
