// K or V of a unit by the copy engine as some warps, token by token: pages of any size, each row in boxes of 128 bytes.
// CTAs of a pair bring each other half of the tokens.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/elect.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/tensor_copy.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// `Rows`: BlockRows of a tile. Each warp takes its share of the CTA's tokens, side by side. Its lanes look them up and
// tell one lane where they are through shared memory: four words in one load, where shuffles would take eight
// instructions.
template <class Traits, class Rows, int tokens, int warps>
struct TokenBoxes {
  static constexpr int cta_tokens = tokens / Traits::ctas, warp_tokens = cta_tokens / warps;
  static constexpr int groups = ceil_div(warp_tokens, 32);  // of tokens that the lanes look up at once
  static_assert(warp_tokens * warps * Traits::ctas == tokens && warp_tokens % 2 == 0);
  static_assert(Traits::kv_source == KvSource::paged);  // ragged K and V have larger boxes

  // Where a token is, as coordinates of the tensor map.
  struct Found {
    u32 row, page;
  };
  struct alignas(16) Table {
    Found places[warp_tokens];
  };
  // One unit's K or V, beside what its rows' Source (tile/row_tiles.h) knows.
  struct Source {
    i32 kv_head;
    Found found[groups];
  };

  const AttentionParams& params;
  const TensorMap& map;
  Table& table;  // the warp's

  FP_DEVICE TokenBoxes(const AttentionParams& params, const TensorMap& map, Table& table)
      : params(params), map(map), table(table) {}

  // The look-ups of a tile begin.
  FP_DEVICE void look_ahead(Source& source, const auto& of_rows, int warp, int tile) const {
    constexpr u32 nowhere = 0x7fffffff;  // outside the tensor: the box is filled with zeros
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const int number = group * 32 + lane();
      const i32 token = of_rows.first_token + tile * tokens + first_of_tile(warp) + number;
      Found& found = source.found[group];
      u32 page;
      params.page.divmod(token, page, found.row);
      found.page = nowhere;
      if (number < warp_tokens && token < of_rows.kv_end) found.page = __ldg(of_rows.pages + page);
    }
  }
  // They end, and the warp knows where its tokens are.
  FP_DEVICE void find(const Source& source) const {
    __syncwarp();  // who reads the table has read it
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const int number = group * 32 + lane();
      if (number < warp_tokens)
        ptx::store_shared(ptx::shared_address(&table) + number * 8, source.found[group].row, source.found[group].page);
    }
    __syncwarp();
  }

  // Who expects the tile's bytes in this CTA, one lane.
  FP_DEVICE static void expect(u32 barrier) { ptx::mbarrier_arrive_expect(barrier, Rows::tile_bytes); }
  // The warp's tokens that have been found, from number `first` to `end`, to a tile. By one lane.
  template <int first, int end>
  FP_DEVICE void load(const Source& source, int warp, u32 to, u32 barrier) const {
    static_assert(first % 2 == 0 && end % 2 == 0);
    const u32 of_warp = to + first_of_tile(warp) * 128, from = ptx::shared_address(&table);
#pragma unroll
    for (int number = first; number < end; number += 2) {
      u32 words[4];
      ptx::load_shared(words, from + number * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int block = 0; block < Rows::blocks; ++block)
          copy(of_warp + block * Rows::block_bytes + (number + i) * 128, barrier, block * Rows::block_columns,
               words[i * 2], source.kv_head, words[i * 2 + 1]);
    }
  }

 private:
  FP_DEVICE static int lane() { return threadIdx.x % 32; }
  // Of a tile, the warp's.
  FP_DEVICE static int first_of_tile(int warp) {
    if constexpr (Traits::ctas == 1) return warp * warp_tokens;
    return static_cast<int>(ptx::cluster_rank()) * cta_tokens + warp * warp_tokens;
  }
  FP_DEVICE void copy(u32 to, u32 barrier, int column, u32 row, i32 kv_head, u32 page) const {
    if constexpr (Traits::ctas == 1) {
      ptx::tensor_copy(to, map, barrier, column, row, kv_head, page);
    } else {
      ptx::tensor_copy_to_pair(to, map, barrier, column, row, kv_head, page);
    }
  }
};

}  // namespace flashpage
