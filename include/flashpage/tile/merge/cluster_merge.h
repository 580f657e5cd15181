// Merges a cut unit among the CTAs of a cluster, which have a piece each. Each CTA sends every CTA a share of its rows
// and columns, and merges the shares that it receives in the plan's order, so that the result does not depend on which
// CTA was last. Nothing goes through global memory, and a CTA receives the same number of bytes for any number of
// pieces.
#pragma once
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/st_async.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// A parcel has 16 columns of a row, as four lanes hold them in two n8 tiles, not yet divided by the row's sum.
struct ClusterMailbox {
  static constexpr int log_parcels = 7, parcels = 1 << log_parcels;
  static constexpr int parcel_bytes = 16 * sizeof(float) + sizeof(float2);

  alignas(16) float4 columns[parcels][4];
  float2 states[parcels];  // maximum and sum of the parcel's row and piece
  u64 arrived;

  // Called by one thread, before mbarrier_init_fence and the cluster's barrier.
  FP_DEVICE void init() { ptx::mbarrier_init(ptx::shared_address(&arrived), 1); }
};

// Piece p of the unit belongs to CTA p of the cluster and is its only item, so a mailbox serves one unit. The number of
// pieces is a power of two.
template <class Traits>
struct ClusterMerge {
  using S = Shape<Traits>;
  static constexpr int pairs = S::value_tiles / 2;  // pairs of n8 tiles in a warp
  static constexpr int parcels_a_row = Traits::warps_v * pairs;
  static constexpr int max_rows = ClusterMailbox::parcels / parcels_a_row;
  static constexpr int max_pieces = 16;

  ClusterMailbox& mailbox;
  const AttentionParams& params;
  const WorkItem& item;
  const Unit& unit;
  int piece;  // this CTA's
  int log_pieces;

  // Called by one thread; parcels may arrive before.
  FP_DEVICE void expect() const {
    const u32 bytes = (own_parcels() << log_pieces) * ClusterMailbox::parcel_bytes;
    ptx::mbarrier_arrive_expect(ptx::shared_address(&mailbox.arrived), bytes);
  }

  // Called by each of four lanes, in the order of `quad`, with its columns of one pair of the row. Every CTA of the
  // cluster must be running.
  FP_DEVICE void send(int row, int pair, int quad, const float4& columns, float maximum, float sum) const {
    const int parcel = row * parcels_a_row + pair;
    const u32 to = parcel & ((1 << log_pieces) - 1);
    const int place = place_of(piece, parcel >> log_pieces);
    const u32 barrier = peer(&mailbox.arrived, to);
    ptx::store_async(peer(&mailbox.columns[place][quad], to), columns, barrier);
    if (quad == 0) ptx::store_async(peer(&mailbox.states[place], to), make_float2(maximum, sum), barrier);
  }

  // Called by all `threads` that compute. A CTA with parcels to merge exits after the last one has arrived, so that no
  // CTA writes to one that has exited.
  FP_DEVICE void run(int thread, int threads) const {
    const int own = own_parcels(), quad = thread % 4;
    int index = thread / 4;
    if (index >= own) return;
    Target target(*this, index);
    ptx::mbarrier_wait_for_peers(ptx::shared_address(&mailbox.arrived), 0);
    while (true) {
      merge(target, index, quad);
      index += threads / 4;
      if (index >= own) break;
      target = Target(*this, index);
    }
  }

 private:
  // The number of parcels that this CTA merges: every `pieces`-th one of the unit.
  FP_DEVICE int own_parcels() const {
    return (unit.num_rows * parcels_a_row + (1 << log_pieces) - 1 - piece) >> log_pieces;
  }
  // The parcels of a piece are consecutive, so that lanes which sum neighbouring ones read without bank conflicts.
  FP_DEVICE int place_of(int of_piece, int index) const {
    return (of_piece << (ClusterMailbox::log_parcels - log_pieces)) + index;
  }
  FP_DEVICE static u32 peer(const void* own, u32 rank) { return ptx::peer_address(ptx::shared_address(own), rank); }

  // Where a merged parcel goes, and what is known of it before it arrives.
  struct Target {
    int row;
    int part, column;  // part of the value columns, and column in the part
    PackedRow at;
    float value_scale;

    FP_DEVICE Target(const ClusterMerge& of, int index) {
      const u32 parcel = (static_cast<u32>(index) << of.log_pieces) + of.piece;
      const u32 pair = parcel % parcels_a_row;
      row = parcel / parcels_a_row;
      part = pair / pairs;
      column = pair % pairs * 16;
      at = unpack_row(of.params, of.unit.kv_head, of.unit.first_row + row);
      value_scale = out_factor_of<Traits>(of.params, of.item, of.unit.kv_head);
    }
  };

  FP_DEVICE void merge(const Target& target, int index, int quad) const {
    float2 states[max_pieces];
    float4 columns[max_pieces];
    float maximum = ptx::negative_infinity(), total = 0.f;
#pragma unroll
    for (int p = 0; p < max_pieces; ++p) {
      states[p] = make_float2(ptx::negative_infinity(), 0.f);
      columns[p] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (p < 1 << log_pieces) {
        states[p] = mailbox.states[place_of(p, index)];
        columns[p] = mailbox.columns[place_of(p, index)][quad];
      }
      maximum = fmaxf(maximum, states[p].x);
    }
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int p = 0; p < max_pieces; ++p) {
      const float weight = state_weight(states[p].x, maximum);
      total += weight * states[p].y;
      sum = add_scaled(sum, columns[p], weight);
    }
    const float inverse = total == 0.f ? 0.f : target.value_scale * ptx::reciprocal_approx(total);
    write(target, quad, scaled(sum, inverse));
    if (quad == 0 && target.part == 0 && target.column == 0 && params.lse) {
      params.lse[static_cast<i64>(item.q_begin + target.at.row) * params.num_q_heads + target.at.head] =
          row_lse(maximum, total);
    }
  }

  FP_DEVICE void write(const Target& target, int quad, const float4& v) const {
    const i64 row = (item.q_begin + target.at.row) * params.out_row_stride + target.at.head * params.out_head_stride;
    const int first = target.part * S::value_columns;
    const float tiles[2][4] = {{v.x, v.y}, {v.z, v.w}};
    for_each_column_of_pair<Traits>(tiles[0], tiles[1], target.column / 16, 0, quad,
                                    [&](int column, float even, float odd) {
                                      column += target.column;
                                      if (column >= S::value_columns || first + column >= Traits::head_dim_vo) return;
                                      store_pair<Traits>(params, false, row + first + column, even, odd);
                                    });
  }
};

}  // namespace flashpage
