// Loads V of a unit from a copy that lies by columns (kernels/helpers/value_columns.h), tile by tile, by one warp.
#pragma once
#include "flashpage/tile/load/prefill_boxes.h"

namespace flashpage {

// Has the interface of PrefillBoxes. Row c of head h holds column c of all tokens: of a ragged V in the order of its
// rows, of a paged one in the order of the page numbers. Of sixteen positions, tokens have the order of
// tile/load/transposed_values.h, so tiles begin at multiples of 16 positions. A tile may thus begin before its unit,
// and a request's last tile holds tokens of the next request: both are cleared.
//
// `Rows`: SwizzledRows of a tile, whose rows are columns of V.
template <class Traits, class Rows>
struct ColumnBoxes {
  static constexpr int tokens = Traits::tile_kv, columns = Traits::head_dim_vo;
  static constexpr int box_columns =
      columns / 2;  // of a box, which has all tokens of a tile; a CTA of a pair copies one
  static_assert(tokens == 128 && box_columns % 8 == 0);

  struct Source {
    i32 first_position;  // of the first tile
    i32 kv_head, first_token, kv_begin, kv_end;
    i32 tiles;
  };

  const AttentionParams& params;
  const TensorMap& map;

  FP_DEVICE ColumnBoxes(const AttentionParams& params, const TensorMap& map) : params(params), map(map) {}

  FP_DEVICE Source open(const Place& place) const {
    const TileExtent covered = PrefillBoxes<Traits, Rows, tokens>(params, map).extent(place);
    const i32 of_request = static_cast<i32>(place.item.kv_offset) * static_cast<i32>(params.page.divisor);
    return {of_request + covered.first_token,
            place.unit.kv_head,
            covered.first_token,
            place.unit.kv_begin,
            place.unit.kv_end,
            covered.tiles};
  }
  FP_DEVICE void look_ahead(Source&, int, int) const {}

  // Issues the copies of tile `now`. `barrier` expects one arrival plus the bytes.
  FP_DEVICE void load(Source& source, int now, int, u32 to, u32 barrier) const {
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect(barrier, Rows::tile_bytes);
      const i32 position = source.first_position + now * tokens;
      if constexpr (Traits::ctas == 1) {
#pragma unroll
        for (int first = 0; first < columns; first += box_columns)
          ptx::tensor_copy(to + first * Rows::stride, map, barrier, position, first, source.kv_head, 0);
      } else {
        const int first = static_cast<int>(ptx::cluster_rank()) * box_columns;
        ptx::tensor_copy_to_pair(to + first * Rows::stride, map, barrier, position, first, source.kv_head, 0);
      }
    }
    __syncwarp();
  }

  FP_DEVICE bool has_hidden(const Source& source, int tile) const {
    const i32 token = source.first_token + tile * tokens;
    return token < source.kv_begin || token + tokens > source.kv_end;
  }
  // Sets tokens that the unit does not see to zero.
  FP_DEVICE void clear_hidden(const Source& source, int tile, u8* to) const {
    const i32 token = source.first_token + tile * tokens;
    const i32 begin = source.kv_begin - token, end = source.kv_end - token;
#pragma unroll 1
    for (int chunk = 0; chunk < tokens / 16; ++chunk) {
      const i32 its_begin = begin - chunk * 16, its_end = end - chunk * 16;
      if (its_begin <= 0 && its_end >= 16) continue;
      u32 seen[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) seen[word] = bytes_seen(word, its_begin, its_end);
#pragma unroll 1
      for (int row = threadIdx.x % 32; row < columns; row += 32) {
        uint4& bytes = *reinterpret_cast<uint4*>(to + Rows::chunk_offset(row, chunk));
        const uint4 old = bytes;
        bytes = make_uint4(old.x & seen[0], old.y & seen[1], old.z & seen[2], old.w & seen[3]);
      }
    }
    ptx::fence_before_bulk_copies();
    __syncwarp();
  }

 private:
  // The bytes of a word whose tokens are in [begin, end), counted from the first of sixteen: a word has tokens 2 *
  // word, the next one, and both eight later.
  FP_DEVICE static u32 bytes_seen(int word, i32 begin, i32 end) {
    u32 seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * word + i % 2 + i / 2 * 8;
      if (token >= begin && token < end) seen |= 0xffu << 8 * i;
    }
    return seen;
  }
};

}  // namespace flashpage
