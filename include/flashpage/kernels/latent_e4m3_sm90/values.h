// The two warpgroups of latent_e4m3_sm90 that sum values: each has half of the columns of all rows. They compute the
// transposed product, of columns by packed rows, because its first factor may be in registers: a warp reads V from
// shared memory as it is stored, and converts it on the way.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct E4m3Values {
  using Shared = E4m3Shared<Traits>;
  using Block = typename Shared::Block;
  static constexpr int tokens = Shared::tokens, steps = tokens / 16;
  static constexpr int first_thread = 32 * WideRoles::first_of_values;
  static constexpr int tiles = Traits::head_dim_vo / 2 / 64;  // of 64 columns, of a warpgroup
  static constexpr int row_tiles = Shared::rows / 8;
  // A lane has two neighbouring columns of a tile (e / 2), and two neighbours of each eight packed rows (e % 2).
  using Values = float[tiles][row_tiles][4];
  using Stored = u32[2][4];         // a tile of V as it is stored: 32 tokens each
  using Fragments = u32[steps][4];  // a tile of V as a factor
  static_assert(tiles % 2 == 0, "two tiles share scales");

  Shared& shared;
  const AttentionParams& params;
  // Where the lane begins to read a block's columns and quotients. Opaque, because the compiler would otherwise read
  // the thread's number again and again, and wait for it.
  u32 own_columns = ptx::opaque(group() * tiles / 2 * Block::panel_bytes + Block::chunk_offset(lane(), warp()));
  u32 own_quotients = ptx::opaque((group() * tiles / 2 * tokens + TokenOrder::first_of_lane(lane())) * 2);

  FP_DEVICE E4m3Values(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() const {
    for_each_unit(shared, [&](const WidePlace& place) {
      Values values = {};
      for (int block = 0; block < place.blocks; ++block) add_block(place, values, block);
      if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::last_tile);
      write(place, values, Shared::message(place, place.blocks));
      if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::written);
    });
  }

 private:
  FP_DEVICE static int lane() { return static_cast<int>(ptx::opaque(threadIdx.x % 32)); }
  FP_DEVICE static int warp() { return static_cast<int>(ptx::opaque(threadIdx.x / 32 % 4)); }
  FP_DEVICE static int group() {
    return static_cast<int>(ptx::opaque(threadIdx.x / 128)) - WideRoles::first_of_values / 4;
  }

  FP_DEVICE void add_block(const WidePlace& place, Values& values, int block) const {
    const u32 use = place.use(block), message = Shared::message(place, block);
    const u32 slot = shared.block_ring.slot(use), at = shared.message_ring.slot(message);
    Stored stored;
    u32 quotients[2 * steps];
    Fragments columns;
    shared.block_ring.wait_full(use);
    read_tile(stored, quotients, slot, 0);
    shared.message_ring.wait_full(message);
    rescale(values, at);
    const ptx::Matrix weights(ptx::shared_address(shared.weights[at]), 0);
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      convert(columns, stored, quotients);
      issue(values[tile], columns, weights);
      // Registers are left for one converted tile, and the next one as it is stored.
      if (tile + 1 < tiles) {
        read_tile(stored, quotients, slot, tile + 1);
      } else {
        shared.block_ring.release(use);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(columns);
      ptx::wgmma_settle(values[tile]);
    }
    shared.message_ring.release(message);
  }
  FP_DEVICE static void issue(float (&values)[row_tiles][4], Fragments& columns, const ptx::Matrix& weights) {
    ptx::wgmma_settle(columns);
    ptx::wgmma_settle(values);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step)
      Traits::ValueProduct::multiply(values, columns[step], weights.at(step * 32), true);
    ptx::wgmma_commit();
  }
  // Reads the warp's 16 columns of a tile, and the quotients of tokens where those of the tile before are others. A
  // matrix of ldmatrix has pairs of columns as its elements, so that a register has two columns of two tokens.
  FP_DEVICE void read_tile(Stored& stored, u32 (&quotients)[2 * steps], u32 slot, int tile) const {
    const u32 from =
        ptx::shared_address(shared.blocks[slot]) + tile / 2 * Block::panel_bytes + (own_columns ^ tile % 2 * 64);
#pragma unroll
    for (int half = 0; half < 2; ++half) ptx::ldmatrix_x4_trans(stored[half], from + half * 32 * Block::stride);
    if (tile % 2 != 0) return;
    const u32 of_tokens = ptx::shared_address(shared.of_tokens[slot].quotients[tile / 2]) + own_quotients;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 four[4];
      ptx::load_shared(four, of_tokens + half * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) quotients[half * 4 + i] = four[i];
    }
  }
  // Converts a tile to fp16, times its quotients. The permutation makes two columns of two tokens two tokens of two
  // columns.
  FP_DEVICE static void convert(Fragments& columns, const Stored& stored, const u32 (&quotients)[2 * steps]) {
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      u32(&pairs)[4] = columns[i / 2];
      u32 first, second;
      ptx::widen4<Half, E4m3>(ptx::byte_permute(stored[i / 4][i % 4], 0, 0x3120), first, second);
      pairs[i % 2 * 2] = ptx::mul_half2(first, quotients[i]);
      pairs[i % 2 * 2 + 1] = ptx::mul_half2(second, quotients[i]);
    }
  }

  // Multiplies earlier values by the factors of maxima that moved. Few move at a time, so most rows are skipped.
  FP_DEVICE void rescale(Values& values, u32 at) const {
    const u32 moved = *reinterpret_cast<const u32*>(shared.moved[at]);
    if (moved == 0) return;
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      if ((moved >> n / 2 * 8 & 0xff) == 0) continue;
      const float2 factors = factors_of(at, n);
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[tile][n][e] *= e % 2 ? factors.y : factors.x;
    }
  }
  FP_DEVICE float2 factors_of(u32 at, int row_tile) const {
    return *reinterpret_cast<const float2*>(shared.factors[at] + row_tile * 8 + lane() % 4 * 2);
  }

  // Writes the unit's rows to the output or to the partials. `message` has their sums.
  FP_DEVICE void write(const WidePlace& place, const Values& values, u32 message) const {
    const WorkItem& item = place.place.item;
    const Unit& unit = place.place.unit;
    const float value_scale = latent_value_scale<Traits>(params, item, unit);
    const u32 at = shared.message_ring.slot(message);
    const int first_column = group() * tiles * 64 + warp() * 16 + lane() / 4 * 2;
    shared.message_ring.wait_full(message);
#pragma unroll
    for (int n = 0; n < row_tiles; ++n) {
      const float2 sums = factors_of(at, n);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n * 8 + lane() % 4 * 2 + e;
        if (row >= unit.num_rows) continue;
        const float total = e == 0 ? sums.x : sums.y;
        const float factor = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
        const i64 offset = out_offset<Traits>(params, item, unit, row) + first_column;
        if constexpr (is_same<typename Traits::Out, float>) {
          float* const to = fp32_rows<Traits>(params, item) + offset;
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile)
            *reinterpret_cast<float2*>(to + tile * 64) =
                make_float2(values[tile][n][e] * factor, values[tile][n][e + 2] * factor);
        } else {
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile)
            store_pair<Traits>(params, item.partial_row >= 0, offset + tile * 64, values[tile][n][e] * factor,
                               values[tile][n][e + 2] * factor);
        }
      }
    }
    shared.message_ring.release(message);
  }
};

}  // namespace flashpage
