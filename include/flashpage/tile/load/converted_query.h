// Loads a unit's queries by four warps and converts them to the type of the products.
#pragma once
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/load/half_query.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

// `To`: SwizzledRows of a tile. A warp loads sixteen rows at a time, which are those of one computing warp. 16-bit
// queries are copied to shared memory and scaled there; fp8 queries are widened in registers.
template <class Traits, class To>
struct ConvertedQuery {
  using Stored = typename Traits::StoredQuery;
  using Query = typename Traits::Query;
  static constexpr int warps = 4;
  static constexpr bool scales = is_same<Stored, Bf16> && is_same<Query, Half>;
  static constexpr int chunks = Traits::head_dim_qk / 8;  // in a row: 16 bytes in the products' type
  static constexpr int pieces = 16 * chunks;
  static constexpr int batch = scales ? 2 : 4;  // pieces that a lane holds in registers

  const AttentionParams& params;
  const Place& place;

  FP_DEVICE ConvertedQuery(const AttentionParams& params, const Place& place) : params(params), place(place) {}

  // `factors`: for each sixteen rows, the factor of their products. Rows beyond the unit are copies of its last one.
  FP_DEVICE void run(u32 to, float* factors) const {
#pragma unroll 1
    for (int first = first_row(); first < Traits::tile_q; first += warps * 16) bring(to, first);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
#pragma unroll 1
    for (int first = first_row(); first < Traits::tile_q; first += warps * 16) {
      float factor = 1.f;
      if constexpr (scales) factor = scale_rows(to, first);
      if (threadIdx.x % 32 == 0) factors[first / 16] = factor;
    }
  }

 private:
  // Computed where they are used, because few registers are free.
  FP_DEVICE static int lane() { return ptx::opaque(threadIdx.x) % 32; }
  FP_DEVICE static int first_row() { return ptx::opaque(threadIdx.x) / 32 * 16; }
  FP_DEVICE static u32 piece_offset(int first, int piece) {
    return To::chunk_offset(first + piece / chunks, piece % chunks);
  }

  FP_DEVICE const Stored* source_of(int first, int piece) const {
    const i64 offset = query_offset(params, place.item, place.unit, first + piece / chunks) + piece % chunks * 8;
    return static_cast<const Stored*>(params.q) + offset;
  }
  FP_DEVICE void bring(u32 to, int first) const {
    if constexpr (is_fp8<Stored>) {
      widen_rows(to, first);
    } else {
#pragma unroll 1
      for (int i = lane(); i < pieces; i += 32)
        ptx::cp_async<16>(to + piece_offset(first, i), source_of(first, i), true);
    }
  }
  FP_DEVICE void widen_rows(u32 to, int first) const {
    const int lane = ConvertedQuery::lane();
#pragma unroll 1
    for (int begin = 0; begin < pieces; begin += 32 * batch) {
      u32 words[batch][2];
#pragma unroll
      for (int i = 0; i < batch; ++i)
        ptx::load_once(words[i], source_of(first, min_of(begin + i * 32 + lane, pieces - 1)));
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (begin + i * 32 + lane >= pieces) continue;
        u32 pairs[4];
        ptx::widen4<Query, Stored>(words[i][0], pairs[0], pairs[1]);
        ptx::widen4<Query, Stored>(words[i][1], pairs[2], pairs[3]);
        ptx::store_shared(to + piece_offset(first, begin + i * 32 + lane), pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  // Scales sixteen rows and returns the factor of their products that undoes it.
  FP_DEVICE static float scale_rows(u32 to, int first) {
    u32 largest = 0;
    for_each_batch(to, first, [&](u32, const u32(&pairs)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = raise_magnitude(largest, pairs[j]);
    });
    const HalfScale scale(largest);
    for_each_batch(to, first, [&](u32 at, const u32(&pairs)[4]) {
      ptx::store_shared(at, scale.of(pairs[0]), scale.of(pairs[1]), scale.of(pairs[2]), scale.of(pairs[3]));
    });
    return scale.factor();
  }
  template <class Visit>
  FP_DEVICE static void for_each_batch(u32 to, int first, Visit&& visit) {
    const int lane = ConvertedQuery::lane();
#pragma unroll 1
    for (int begin = 0; begin < pieces; begin += 32 * batch) {
      u32 pairs[batch][4];
#pragma unroll
      for (int i = 0; i < batch; ++i)  // lanes without a piece repeat the last one
        ptx::load_shared(pairs[i], to + piece_offset(first, min_of(begin + i * 32 + lane, pieces - 1)));
#pragma unroll
      for (int i = 0; i < batch; ++i)
        if (begin + i * 32 + lane < pieces) visit(to + piece_offset(first, begin + i * 32 + lane), pairs[i]);
    }
  }
};

}  // namespace flashpage
