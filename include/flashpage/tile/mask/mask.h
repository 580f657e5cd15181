// What happens to a score between Q K^T and softmax: the variant's transform, then everything that hides a token.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// The packed custom mask of one row for 128 tokens, 32 a lane of the row's quad.
struct MaskBits {
  u32 mine;

  MaskBits() = default;
  // Lanes behind those of `words` read what the last of these reads.
  FP_DEVICE MaskBits(const PackedMask& mask, i32 row, i32 first_token, int lane, int words = 4)
      : mine(mask.bits(row, first_token + (words < 4 ? min_of(lane % 4, words - 1) : lane % 4) * 32)) {}
  // This lane's two tokens of the n-th eight, in bits 0 and 1.
  FP_DEVICE u32 pair(int n, int lane) const {
    u32 other = __shfl_sync(0xffffffff, mine, (lane & ~3) + n / 4);
    return other >> (n % 4 * 8 + lane % 4 * 2);
  }
  // Hides all but tokens [begin, end), counted from the first of the 128.
  FP_DEVICE void clip(i32 begin, i32 end, int lane) {
    const i32 before = lane % 4 * 32;
    mine &= below(end - before) & ~below(begin - before);
  }

 private:
  FP_DEVICE static u32 below(i32 bit) { return static_cast<u32>((1ull << max_of(0, min_of(bit, 32))) - 1); }
};

// Causal and window alone. Row by row: one row's range takes two registers.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_range(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const AttentionParams& params,
                             const WorkItem& item, const Unit& unit, int first_row, i32 first_token, int lane) {
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PackedRow row = lane_row(params, unit, first_row, m, half, lane);
      TokenRange range = visible_range(params, item, query_position(item, row.row));
      i32 mine = first_token + lane % 4 * 2;  // this lane's first token, so that each compare has a constant offset
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool visible = mine + (n * 8 + e) >= range.begin && mine + (n * 8 + e) < range.end;
          if (!visible) scores[m][n][half * 2 + e] = ptx::negative_infinity();
        }
    }
}

// The same where registers are many: a tile is rarely cut at both ends, and an end that is not takes no instructions.
template <class Traits, int token_tiles>
FP_DEVICE void mask_cut_ends(float (&scores)[1][token_tiles][4], const AttentionParams& params, const WorkItem& item,
                             const Unit& unit, int first_row, i32 first_token, int lane) {
  const bool cuts_begin = first_token<unit.all_begin, cuts_end = first_token + token_tiles * 8> unit.all_end;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    PackedRow row = lane_row(params, unit, first_row, 0, half, lane);
    TokenRange range = visible_range(params, item, query_position(item, row.row));
    const i32 mine = first_token + lane % 4 * 2;
    const auto hide = [&](auto&& is_hidden) {
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (is_hidden(n * 8 + e)) scores[0][n][half * 2 + e] = ptx::negative_infinity();
    };
    const i32 begin = range.begin - mine, end = range.end - mine;
    if (cuts_end) hide([&](int token) { return token >= end; });
    if (cuts_begin) hide([&](int token) { return token < begin; });
  }
}

// The same beside a custom mask: a row's range is folded into its bits.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_bits(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const AttentionParams& params,
                            const WorkItem& item, const Unit& unit, int first_row, i32 first_token, int lane) {
  const PackedMask mask(params.custom_mask, item);
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PackedRow row = lane_row(params, unit, first_row, m, half, lane);
      TokenRange range = visible_range(params, item, query_position(item, row.row));
      MaskBits bits;
#pragma unroll
      for (int n = 0; n < token_tiles; ++n) {
        if (n % 16 == 0) {
          const i32 first = first_token + n * 8;
          bits = MaskBits(mask, row.row, first, lane, n == 0 ? 4 : ceil_div(token_tiles - n, 4));
          bits.clip(range.begin - first, range.end - first, lane);
        }
        const u32 pair = bits.pair(n % 16, lane);
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(pair >> e & 1)) scores[m][n][half * 2 + e] = ptx::negative_infinity();
      }
    }
}

// The bits of a tile that not all rows see. Causal and window count elsewhere.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_lane_bits(float (&scores)[1][token_tiles][4], const AttentionParams& params,
                                 const LaneBits& bits, const Unit& unit, int of_warp, const VisitedTile& tile,
                                 int of_thread) {
  static_assert(Traits::tile_kv <= most_lane_tokens);
  // Nothing that is computed from these is kept from tile to tile.
  const int first_row = static_cast<int>(ptx::opaque(of_warp)), lane = static_cast<int>(ptx::opaque(of_thread));
  using Word = LaneWord<Traits::tile_kv>;
  Word word[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = lane_row(params, unit, first_row, 0, half, lane).row;
    if (tile.seen == Seen::some)
      word[half] = reinterpret_cast<const Word*>(bits.quad(row, tile.first_token / Traits::tile_kv))[lane % 4];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(word[half] >> (n * 2 + e) & 1)) scores[0][n][half * 2 + e] = ptx::negative_infinity();
}

// The same beside a mask function in a tile that it has a say in. A warp asks once for the rows of all heads that stand
// at one position (for each row where the function looks at the head): four tokens a lane, whose answers make the bits.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_function(float (&scores)[1][token_tiles][4], const AttentionParams& params,
                                const VariantArgs& args, const WorkItem& item, const Unit& unit, int of_warp,
                                i32 first_token, int of_thread) {
  using Variant = typename Traits::Variant;
  static_assert(token_tiles <= 16);  // what MaskBits has
  constexpr int words = ceil_div(token_tiles, 4);
  // Nothing that is computed from these is kept from tile to tile.
  const int first_row = static_cast<int>(ptx::opaque(of_warp)), lane = static_cast<int>(ptx::opaque(of_thread));
  const auto asked_for = [&](int row) {
    const i32 packed_row = unit.first_row + min_of(first_row + row, unit.num_rows - 1);
    return Variant::mask_has_head ? packed_row : static_cast<i32>(params.group.div(packed_row));
  };
  const auto place_of = [&](i32 asked) {
    return Variant::mask_has_head ? unpack_row(params, unit.kv_head, asked) : PackedRow{asked, 0};
  };
  // What the function is asked with, read once: the item lies in shared memory.
  const i32 request = item.request, first_position = query_position(item, 0), last_token = item.kv_len - 1;
  const i32 mine[2] = {asked_for(lane / 4), asked_for(lane / 4 + 8)}, end = asked_for(15);
  MaskBits bits[2]{};
#pragma unroll 1
  for (i32 asked = asked_for(0); asked <= end; ++asked) {
    const PackedRow place = place_of(asked);
    u32 answers = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const i32 token = min_of(first_token + i * 32 + lane, last_token);
      const bool sees = Variant::mask(args, request, place.head, first_position + place.row, token);
      const u32 word = __ballot_sync(0xffffffff, sees);
      if (lane % 4 == i) answers = word;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (mine[half] == asked) bits[half].mine = answers;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TokenRange range = visible_range(params, item, query_position(item, place_of(mine[half]).row));
    bits[half].clip(range.begin - first_token, range.end - first_token, lane);
#pragma unroll
    for (int n = 0; n < token_tiles; ++n) {
      const u32 pair = bits[half].pair(n, lane);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(pair >> e & 1)) scores[0][n][half * 2 + e] = ptx::negative_infinity();
    }
  }
}

// Hides tokens of a tile that is not wholly visible. Token by token, so that what a mask loads for a token serves all
// rows.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_token(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const AttentionParams& params,
                             const VariantArgs& args, const WorkItem& item, const Unit& unit, int first_row,
                             i32 first_token, int lane) {
  using Variant = typename Traits::Variant;
  constexpr int rows = 2 * Shape<Traits>::row_tiles;
  constexpr bool custom = Traits::mask_source == MaskSource::packed_bits;
  i32 q_row[rows], head[rows], position[rows];
  TokenRange range[rows];
  MaskBits bits[rows];
  const PackedMask mask = custom ? PackedMask(params.custom_mask, item) : PackedMask{};
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    PackedRow row = lane_row(params, unit, first_row, r / 2, r % 2, lane);
    head[r] = row.head;
    position[r] = query_position(item, row.row);
    range[r] = visible_range(params, item, position[r]);
    q_row[r] = row.row;
  }
#pragma unroll
  for (int n = 0; n < token_tiles; ++n) {
    u32 pair[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      if (custom && n % 16 == 0) bits[r] = MaskBits(mask, q_row[r], first_token + n * 8, lane);
      pair[r] = custom ? bits[r].pair(n % 16, lane) : 0;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      i32 token = first_token + n * 8 + lane % 4 * 2 + e;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        bool visible = token >= range[r].begin && token < range[r].end;
        if constexpr (custom) visible = visible && (pair[r] >> e & 1);
        if constexpr (Variant::has_mask) {
          visible = visible & Variant::mask(args, item.request, head[r], position[r], min_of(token, item.kv_len - 1));
        }
        if (!visible) scores[r / 2][n][r % 2 * 2 + e] = ptx::negative_infinity();
      }
    }
  }
}

// Hides tokens of a tile that is not wholly visible. `has_room`: for a few registers more.
template <class Traits, bool has_room = false, int token_tiles>
FP_DEVICE void mask_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const AttentionParams& params,
                           const VariantArgs& args, const WorkItem& item, const Unit& unit, int first_row,
                           i32 first_token, int lane) {
  if constexpr (Traits::mask_source == MaskSource::function) {
    mask_by_function<Traits>(scores, params, args, item, unit, first_row, first_token, lane);
  } else if constexpr (Traits::Variant::has_mask) {
    mask_by_token<Traits>(scores, params, args, item, unit, first_row, first_token, lane);
  } else if constexpr (Traits::mask_source == MaskSource::packed_bits) {
    mask_by_bits<Traits>(scores, params, item, unit, first_row, first_token, lane);
  } else if constexpr (has_room) {
    mask_cut_ends<Traits>(scores, params, item, unit, first_row, first_token, lane);
  } else {
    mask_by_range<Traits>(scores, params, item, unit, first_row, first_token, lane);
  }
}

// Whether every tile has to be masked, wherever it lies.
template <class Traits>
inline constexpr bool masks_all_tiles = Traits::mask_source == MaskSource::packed_bits || Traits::Variant::has_mask;

// Whether some row of the unit does not see some token of the tile.
template <class Traits>
FP_DEVICE bool needs_mask(const Unit& unit, i32 first_token, int tokens) {
  return masks_all_tiles<Traits> || first_token < unit.all_begin || first_token + tokens > unit.all_end;
}

}  // namespace flashpage
