// A unit's queries by four warps, through registers to the type that their products take.
#pragma once
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/half_query.h"
#include "flashpage/tile/query.h"

namespace flashpage {

// `To`: BlockRows of a tile. Sixteen rows at a time, those of one computing warp.
template <class Traits, class To>
struct ConvertedQuery {
  using Stored = typename Traits::StoredQuery;
  using Query = typename Traits::Query;
  static constexpr int warps = 4;
  static constexpr bool scales = is_same<Stored, Bf16> && is_same<Query, Half>;
  static constexpr int words = 2 * static_cast<int>(sizeof(Stored));  // of eight elements
  static constexpr int steps = 4 * To::blocks;                        // of four rows and 64 columns
  static constexpr int batch = scales && steps == 8 ? 8 : 4;          // steps that are in registers
  using Batch = u32[batch][words];                                    // eight elements of each

  const AttentionParams& params;
  const Place& place;
  const int lane = threadIdx.x % 32;

  FP_DEVICE ConvertedQuery(const AttentionParams& params, const Place& place) : params(params), place(place) {}

  // `factors`: for each sixteen rows, what their products must be multiplied by. Rows beyond the unit are
  // copies of its last one.
  FP_DEVICE void run(u32 to, float* factors) const {
#pragma unroll 1
    for (int sixteen = threadIdx.x / 32; sixteen < Traits::tile_q / 16; sixteen += warps) {
      Batch eights;
      u32 largest = 0;
#pragma unroll 1
      for (int first = 0; scales && first < steps; first += batch) {
        load(eights, sixteen, first);
        largest = raise(largest, eights);
      }
      const HalfScale scale(largest);
#pragma unroll 1
      for (int first = 0; first < steps; first += batch) {
        if (!scales || batch < steps) load(eights, sixteen, first);
        store(eights, to, sixteen, first, scale);
      }
      if (lane == 0) factors[sixteen] = scales ? scale.factor() : 1.f;
    }
  }

 private:
  FP_DEVICE int row_of(int sixteen, int step) const { return sixteen * 16 + step % 4 * 4 + lane / 8; }
  FP_DEVICE int column_of(int step) const { return step / 4 * 64 + lane % 8 * 8; }

  // By value: what addresses need stays in registers.
  FP_DEVICE void load(Batch& eights, int sixteen, int first) const {
    const WorkItem item = place.item;
    const Unit unit = place.unit;
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int row = row_of(sixteen, i), column = column_of(first + i);
      const i64 offset = query_offset(params, item, unit, row);
      const bool exists = Traits::head_dim_qk % 64 == 0 || column < Traits::head_dim_qk;
      ptx::load_once(eights[i], static_cast<const Stored*>(params.q) + offset + (exists ? column : 0));
    }
  }
  FP_DEVICE static u32 raise(u32 largest, const Batch& eights) {
#pragma unroll
    for (int i = 0; i < batch * words; ++i) largest = raise_magnitude(largest, eights[i / words][i % words]);
    return largest;
  }
  FP_DEVICE void store(const Batch& eights, u32 to, int sixteen, int first, const HalfScale& scale) const {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int column = column_of(first + i);
      if (To::padded_columns % 64 != 0 && column >= To::padded_columns) continue;
      u32 pairs[4];
      if constexpr (is_fp8<Stored>) {
        ptx::widen4<Query, Stored>(eights[i][0], pairs[0], pairs[1]);
        ptx::widen4<Query, Stored>(eights[i][1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = scales ? scale.of(eights[i][j]) : eights[i][j];
      }
      if (To::padded_columns > Traits::head_dim_qk && column == Traits::head_dim_qk)
        pairs[0] = pairs[1] = pairs[2] = pairs[3] = 0;
      ptx::store_shared(to + To::chunk_offset(row_of(sixteen, i), column / 8), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

}  // namespace flashpage
