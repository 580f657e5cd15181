// The kernel of mask tiles, the tiles that loading warps visit, and the mask of a mixed tile, all on the host, for
// tests/kernels/test_mask_tiles.py. With VARIANT, the name of a file: the kernel that evaluates this variant, for
// tests/kernels/test_function_tiles.py.
#include "card.h"
#include "flashpage/kernels/helpers/mask_tiles.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/mask/visible_tiles.h"

using namespace flashpage;

#ifdef VARIANT
#include VARIANT

template <int tokens>
struct FunctionTraits {
  using Variant = ::Variant;
  static constexpr MaskSource mask_source = MaskSource::function;
  static constexpr int tile_kv = tokens;
};
template <int tokens>
static void find(const MaskTilesParams& params, const VariantArgs& args, int grid) {
  using Kernel = MaskTiles<FunctionTraits<tokens>>;
  card::launch(grid, Kernel::threads, [&] { Kernel::run(params, args); });
}
extern "C" void find_function_tiles(const MaskTilesParams* params, const VariantArgs* args, int grid) {
  if (params->tile_kv == 48) return find<48>(*params, *args, grid);
  if (params->tile_kv == 64) return find<64>(*params, *args, grid);
  if (params->tile_kv == 80) return find<80>(*params, *args, grid);
  if (params->tile_kv == 96) return find<96>(*params, *args, grid);
  if (params->tile_kv == 112) return find<112>(*params, *args, grid);
  find<128>(*params, *args, grid);
}
#endif

struct NoVariant {
  static constexpr bool has_logit = false, has_mask = false, mask_has_head = false, mask_is_causal = false;
  static constexpr bool logit_loads_by_token = false, ends_in_soft_cap = false;
};
struct BitTraits {
  using Variant = NoVariant;
  static constexpr MaskSource mask_source = MaskSource::packed_bits;
  static constexpr int tile_kv = 0;  // the parameters give it
};
extern "C" void find_mask_tiles(const MaskTilesParams* params, int grid) {
  card::launch(grid, MaskTiles<BitTraits>::threads, [&] { MaskTiles<BitTraits>::run(*params, VariantArgs{}); });
}

extern "C" u32 tile_cell(const MaskTilesParams* params, const WorkItem* item, i32 row_tile, i32 kv_head) {
  return RequestTiles(*params, *item).cell(row_tile, kv_head);
}

static LaneBits lanes_of(const MaskTilesParams& params, const WorkItem& item) {
  u8* of_all = reinterpret_cast<u8*>(params.cells + params.lanes_begin);
  return LaneBits(LaneBits::begin_of(of_all, item, params.tile_kv), item.kv_len, params.tile_kv);
}
// The offset in bytes of the words that the four lanes of a row and tile read.
extern "C" i64 quad_at(const MaskTilesParams* params, const WorkItem* item, i32 row, i32 tile) {
  return lanes_of(*params, *item).quad(row, tile) - reinterpret_cast<const u8*>(params->cells);
}

// The tiles of tokens [begin, end) as each loading warp visits them. Returns -1 if its lanes do not agree, or look up a
// tile that is not visited.
extern "C" i32 visit_tiles(const MaskTilesParams* params, u32 cell, i32 begin, i32 end, VisitedTile* visited) {
  Unit unit{};
  unit.kv_begin = begin;
  unit.kv_end = end;
  std::vector<std::vector<VisitedTile>> found(32);
  const i32 tokens = params->tile_kv;
  bool right = true;
  card::launch(1, 32, [&] {
    std::vector<VisitedTile>& mine = found[threadIdx.x];
    VisibleTiles tiles(*params, cell, unit, tokens, 0);
    int next = tiles.now(), ahead = tiles.next();
    for (; tiles.more(); tiles.step()) {
      right = right && tiles.now() == next && tiles.next() == ahead;
      next = ahead;
      ahead = tiles.ahead();
      right = right && (ahead > next || (ahead * tokens >= end && next * tokens >= end));
      mine.push_back(tiles.visited());
    }
    right = right && next * tokens >= end;
  });
  for (const std::vector<VisitedTile>& lane : found) {
    right = right && lane.size() == found[0].size();
    for (size_t i = 0; right && i < lane.size(); ++i)
      right = lane[i].first_token == found[0][i].first_token && lane[i].is_last == found[0][i].is_last &&
              lane[i].visibility == found[0][i].visibility;
  }
  std::copy(found[0].begin(), found[0].end(), visited);
  return right ? static_cast<i32>(found[0].size()) : -1;
}

template <int tokens>
struct MaskTraits {
  using Query = Bf16;
  using Cache = Bf16;
  using Variant = NoVariant;
  static constexpr int head_dim_qk = 64, head_dim_vo = 64, tile_q = 128, tile_kv = tokens;
  static constexpr int warps_q = 8, warps_kv = 1, warps_v = 1;
  static constexpr KvSource kv_source = KvSource::paged;
  static constexpr MaskSource mask_source = MaskSource::packed_bits;
  static constexpr PositionEncoding position_encoding = PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
};

// visible [16, tokens]: which scores of a warp's 16 rows the mask of a tile leaves. `lanes`: reads the bits in the
// order of computing lanes; null: reads the packed mask.
template <int tokens>
static void mask_tile(const AttentionParams& params, const WorkItem& item, const Unit& unit, const LaneBits* lanes,
                      i32 first_row, i32 first_token, u8* visible) {
  using Traits = MaskTraits<tokens>;
  card::launch(1, 32, [&] {
    const int lane = threadIdx.x;
    const WarpRows rows{params, item, unit, first_row, lane};
    float scores[1][tokens / 8][4] = {};
    if (lanes != nullptr) {
      mask_by_lane_bits<Traits>(scores, rows, *lanes, {first_token, 0, TileVisibility::some});
    } else {
      mask_scores<Traits>(scores, rows, VariantArgs{}, first_token);
    }
    for (int n = 0; n < tokens / 8; ++n)
      for (int e = 0; e < 4; ++e)
        visible[(lane / 4 + e / 2 * 8) * tokens + n * 8 + lane % 4 * 2 + e % 2] = scores[0][n][e] == 0.f;
  });
}

// `cells`: the mask's tiles; null: `params` has the packed mask.
extern "C" void mask_tile_of(const AttentionParams* params, const MaskTilesParams* cells, const WorkItem* item,
                             i32 tile_q, i32 first_packed_row, i32 kv_head, i32 first_row, i32 first_token, i32 tokens,
                             u8* visible) {
  const Unit unit = make_unit(*params, *item, tile_q, first_packed_row, kv_head);
  const LaneBits lanes = cells != nullptr ? lanes_of(*cells, *item) : LaneBits(nullptr, 0, tokens);
  (tokens == 160   ? mask_tile<160>
   : tokens == 128 ? mask_tile<128>
   : tokens == 80
       ? mask_tile<80>
       : mask_tile<48>)(*params, *item, unit, cells != nullptr ? &lanes : nullptr, first_row, first_token, visible);
}
