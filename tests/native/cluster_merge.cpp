// tile/merge/cluster_merge.h on the host, with all CTAs of a cluster at once as fibers. For
// tests/kernels/test_cluster_merge.py, which sets CACHE, HEAD_DIM_VO and WARPS_V.
#include "flashpage/tile/merge/cluster_merge.h"

#include "hopper.h"

using namespace flashpage;

namespace {

struct Traits {
  using StoredQuery = Bf16;
  using Query = Bf16;
  using Cache = CACHE;
  using Out = Bf16;
  struct Variant {
    static constexpr bool has_logit = false, has_mask = false;
    static constexpr bool logit_loads_by_token = false, ends_in_soft_cap = false;
  };
  static constexpr int head_dim_qk = 64, head_dim_vo = HEAD_DIM_VO;
  static constexpr KvSource kv_source = KvSource::paged;
  static constexpr PositionEncoding position_encoding = PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
  static constexpr int tile_q = 16, tile_kv = 32, warps_q = 1, warps_kv = 8 / WARPS_V, warps_v = WARPS_V;
};
using Merge = ClusterMerge<Traits>;

constexpr int threads = 64;  // of a CTA: fewer than on a card, so that some merge several parcels
constexpr u32 cta_bytes = 16384;
static_assert(sizeof(ClusterMailbox) <= cta_bytes && 16 * cta_bytes <= sizeof memory);

void land_one() {
  if (hopper::copies.empty() || hopper::random_number() % 4 != 0) return;
  std::swap(hopper::copies[hopper::random_number() % hopper::copies.size()], hopper::copies.back());
  const auto land = std::move(hopper::copies.back());
  hopper::copies.pop_back();
  land();
  card::idle_switches = 0;
}

}  // namespace

extern "C" i32 max_rows() { return Merge::max_rows; }

// columns: [pieces, rows, HEAD_DIM_VO]; maxima and sums: [pieces, rows]; items: one for each piece. Returns the number
// of barriers at which arrivals or bytes are missing.
extern "C" i32 run_cluster(const AttentionParams* params, const WorkItem* items, const Unit* unit, i32 log_pieces,
                           const float* columns, const float* maxima, const float* sums) {
  const u32 pieces = 1 << log_pieces;
  hopper::cta_bytes = cta_bytes;
  hopper::barriers.clear();
  hopper::copies.clear();
  card::meanwhile = land_one;
  std::memset(memory, 0xff, sizeof memory);  // NaN
  const auto mailbox_of = [](u32 cta) -> ClusterMailbox& {
    return *reinterpret_cast<ClusterMailbox*>(memory + cta * cta_bytes);
  };
  for (u32 cta = 0; cta < pieces; ++cta) mailbox_of(cta).init();
  card::launch(1, pieces * threads, [&] {
    const u32 cta = threadIdx.x / threads, thread = threadIdx.x % threads;
    const WorkItem& item = items[cta];
    const Merge merge{mailbox_of(cta), *params, item, *unit, item.piece, log_pieces};
    if (thread == 0) merge.expect();
    for (int at = thread / 4; at < unit->num_rows * Merge::parcels_a_row; at += threads / 4) {
      const int row = at / Merge::parcels_a_row, pair = at % Merge::parcels_a_row, quad = thread % 4;
      const int state = item.piece * unit->num_rows + row;
      const int first = pair / Merge::pairs * Shape<Traits>::value_columns + pair % Merge::pairs * 16;
      float tiles[2][4] = {};
      const auto column = [&](int i) {
        return first + i < HEAD_DIM_VO ? columns[state * HEAD_DIM_VO + first + i] : NAN;
      };
      if constexpr (is_fp8<CACHE>) {  // even columns in one tile, odd ones in the next
        for (int i = 0; i < 2; ++i)
          for (int t = 0; t < 2; ++t) tiles[t][i] = column(quad * 4 + i * 2 + t);
      } else {
        for (int i = 0; i < 2; ++i)
          for (int t = 0; t < 2; ++t) tiles[t][i] = column(t * 8 + quad * 2 + i);
      }
      const float4 four = make_float4(tiles[0][0], tiles[0][1], tiles[1][0], tiles[1][1]);
      merge.send(row, pair, quad, four, maxima[state], sums[state]);
      if (at % 3 == 0) {  // lets other threads run
        bool has_yielded = false;
        card::wait_until([&] { return std::exchange(has_yielded, true); });
      }
    }
    merge.run(thread, threads);
  });
  if (!hopper::copies.empty()) hopper::stop("a CTA left before everything had come");
  return static_cast<i32>(std::count_if(hopper::barriers.begin(), hopper::barriers.end(),
                                        [](const auto& at) { return at.second.phase != 1; }));
}
