// The number of stages of kernels of given shapes, for tests/kernels/test_stages.py, which sets SHAPES: the name of a
// file with one row for each shape.
#include "hopper.h"

#include "flashpage/kernels/attention_sm80/few_rows.h"
#include "flashpage/kernels/blocks/decode.h"
#include "flashpage/kernels/decode_sm90/shared.h"
#include "flashpage/kernels/prefill_sm90/shared.h"

using namespace flashpage;

namespace {

struct NoVariant {
  static constexpr bool has_logit = false, has_mask = false, mask_has_head = false, mask_is_causal = false;
  static constexpr bool logit_loads_by_token = false, ends_in_soft_cap = false;
};

struct Common {
  using Out = Bf16;
  using Variant = NoVariant;
  static constexpr KvSource kv_source = KvSource::paged;
  static constexpr MaskSource mask_source = MaskSource::implicit;
  static constexpr int ctas = 1, ctas_per_sm = 1, warps_q = 1, warps_kv = 1, warps_v = 1;
};

template <class CacheType, int qk, int vo, int rows, int tokens>
struct Tile : Common {
  using StoredQuery = Bf16;
  using Query = Bf16;
  using StoredCache = CacheType;
  using Cache = CacheType;
  static constexpr int head_dim_qk = qk, head_dim_vo = vo, tile_q = rows, tile_kv = tokens;
};

template <class CacheType, int qk, int vo, int rows, int tokens, int teams, int columns, Loader of, bool rotates>
struct DecodeTraits : Tile<CacheType, qk, vo, rows, tokens> {
  static constexpr Loader loader = of;
  static constexpr PositionEncoding position_encoding = rotates ? PositionEncoding::rope : PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
  static constexpr int warps_q = rows / 16, warps_kv = teams, warps_v = columns, stages = 64;
};

template <Loader of, int qk, int vo, int tokens>
struct PrefillTraits : Tile<E4m3, qk, vo, 128, tokens> {
  using Query = typename select_type<of == Loader::transposed, E4m3, Half>::type;
  using StoredQuery = typename select_type<of == Loader::transposed, E4m3, Bf16>::type;
  using Cache = Query;
  static constexpr Loader loader = of;
  static constexpr PositionEncoding position_encoding = PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
  static constexpr int warps_q = 8, stages = 3;
};

template <class CacheType, int qk, int vo, int rows, int tokens, int warps, int most, int ring>
struct FewRowsTraits : Tile<CacheType, qk, vo, rows, tokens> {
  static constexpr int warps_kv = warps, stages = most, ring_bytes = ring;
};

template <class CacheType, int dim, int rows, int tokens, int warps, int most, int ring, int limit>
struct BlockTraits : Tile<CacheType, dim, dim, rows, tokens> {
  static constexpr PositionEncoding position_encoding = PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::pieces;
  static constexpr int warps_kv = warps, stages = most, ring_bytes = ring, shared_limit = limit;
};

// Number of stages, and bytes of shared memory.
struct Found {
  i32 stages, bytes;
};

template <class Given>
constexpr Found decode_sm90() {
  using Traits = typename DecodeStages<Given>::Traits;
  return {Traits::stages, sizeof(DecodeShared<Traits>)};
}
template <class Given>
constexpr Found prefill_sm90() {
  using Traits = typename PrefillStages<Given>::Traits;
  return {Traits::stages, sizeof(PrefillShared<Traits>)};
}
template <class Given>
constexpr Found few_rows() {
  return {stages_in_flight<Given>(Given::tile_kv), 0};
}
template <class Given>
constexpr Found blocks() {
  return {BlockDecode<Given>::stages, BlockDecode<Given>::shared_bytes};
}

}  // namespace

extern "C" const Found found[] = {
#include SHAPES
};
