// The masks between Q K^T and softmax: they set the scores of hidden tokens to -infinity.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/mask/visible_tiles.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// Bits of one row for 128 tokens, 32 in each lane of the row's quad.
struct MaskBits {
  u32 mine;

  MaskBits() = default;
  // Reads a packed custom mask. Lanes after the first `words` read the same word as the last of these.
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

// Hides the tokens of a row whose bit is 0. pair_of(n): the lane's two tokens of the n-th eight, in bits 0 and 1.
template <int token_tiles, class PairOf>
FP_DEVICE void hide_by_bits(float (&scores)[token_tiles][4], int half, PairOf&& pair_of) {
#pragma unroll
  for (int n = 0; n < token_tiles; ++n) {
    const auto pair = pair_of(n);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(pair >> e & 1)) scores[n][half * 2 + e] = ptx::negative_infinity();
  }
}

// Masks by causal and window alone. It masks one row after another, because each row's range takes two registers.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_range(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                             i32 first_token) {
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TokenRange range = rows.visible(rows.row(m, half));
      i32 mine = first_token + rows.lane % 4 * 2;  // the lane's first token: each compare has a constant offset from it
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool visible = mine + (n * 8 + e) >= range.begin && mine + (n * 8 + e) < range.end;
          if (!visible) scores[m][n][half * 2 + e] = ptx::negative_infinity();
        }
    }
}

// As mask_by_range, for kernels with registers to spare: a tile is rarely cut at both ends, and an end that is not cut
// takes no instructions.
template <class Traits, int token_tiles>
FP_DEVICE void mask_cut_ends(float (&scores)[1][token_tiles][4], const WarpRows& rows, i32 first_token) {
  const bool cuts_begin = first_token < rows.unit.all_begin;
  const bool cuts_end = first_token + token_tiles * 8 > rows.unit.all_end;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TokenRange range = rows.visible(rows.row(0, half));
    const i32 mine = first_token + rows.lane % 4 * 2;
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

// Masks by the bits of a packed custom mask. Each row's range by causal and window is folded into its bits.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_bits(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                            i32 first_token) {
  const PackedMask mask(rows.params.custom_mask, rows.item);
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow row = rows.row(m, half);
      const TokenRange range = rows.visible(row);
      MaskBits bits;
      hide_by_bits(scores[m], half, [&](int n) {
        if (n % 16 == 0) {
          const i32 first = first_token + n * 8;
          bits = MaskBits(mask, row.row, first, rows.lane, n == 0 ? 4 : ceil_div(token_tiles - n, 4));
          bits.clip(range.begin - first, range.end - first, rows.lane);
        }
        return bits.pair(n % 16, rows.lane);
      });
    }
}

// Masks by the bits that kernels/helpers/mask_tiles.h wrote for a tile that not all rows see. These know neither causal
// nor window.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_lane_bits(float (&scores)[1][token_tiles][4], const WarpRows& rows_of_unit, const LaneBits& bits,
                                 const VisitedTile& tile) {
  static_assert(Traits::tile_kv <= most_lane_tokens);
  const WarpRows rows = rows_of_unit.recomputed();
  using Word = LaneWord<Traits::tile_kv>;
  Word word[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = rows.row(0, half).row;
    if (tile.visibility == TileVisibility::some)
      word[half] = reinterpret_cast<const Word*>(bits.quad(row, tile.first_token / Traits::tile_kv))[rows.lane % 4];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) hide_by_bits(scores[0], half, [&](int n) { return word[half] >> n * 2; });
}

// Masks by a mask function, in tiles that mask_tiles found to be mixed. The warp calls the function once for the rows
// of all heads at one position (once for each row, if the function depends on the head), for four tokens in each lane.
// The answers become bits.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_function(float (&scores)[1][token_tiles][4], const WarpRows& rows_of_unit,
                                const VariantArgs& args, i32 first_token) {
  using Variant = typename Traits::Variant;
  static_assert(token_tiles <= 16);  // the tokens of MaskBits
  constexpr int words = ceil_div(token_tiles, 4);
  const WarpRows rows = rows_of_unit.recomputed();
  const WorkItem& item = rows.item;
  const int lane = rows.lane;
  // A call is numbered by its packed row, or by its row of the request.
  const auto call_of = [&](i32 packed_row) {
    return Variant::mask_has_head ? packed_row : static_cast<i32>(rows.params.group.div(packed_row));
  };
  const auto row_of = [&](i32 call) {
    return Variant::mask_has_head ? unpack_row(rows.params, rows.unit.kv_head, call) : PackedRow{call, 0};
  };
  // The function's arguments are read once, as the item lies in shared memory.
  const i32 request = item.request, first_position = query_position(item, 0), last_token = item.kv_len - 1;
  const i32 mine[2] = {call_of(rows.packed_row(0, 0)), call_of(rows.packed_row(0, 1))};
  const i32 end = call_of(rows.clamped(rows.first_row + 15));
  MaskBits bits[2]{};
#pragma unroll 1
  for (i32 call = call_of(rows.clamped(rows.first_row)); call <= end; ++call) {
    const PackedRow row = row_of(call);
    u32 answers = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const i32 token = min_of(first_token + i * 32 + lane, last_token);
      const bool sees = Variant::mask(args, request, row.head, first_position + row.row, token);
      const u32 word = __ballot_sync(0xffffffff, sees);
      if (lane % 4 == i) answers = word;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (mine[half] == call) bits[half].mine = answers;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TokenRange range = rows.visible(row_of(mine[half]));
    bits[half].clip(range.begin - first_token, range.end - first_token, lane);
    hide_by_bits(scores[0], half, [&](int n) { return bits[half].pair(n, lane); });
  }
}

// Masks by causal, window, packed bits and a mask function that is called for every row and token. The loop goes token
// by token, so that values which the function loads for a token serve all rows.
template <class Traits, int token_tiles>
FP_DEVICE void mask_by_token(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                             const VariantArgs& args, i32 first_token) {
  using Variant = typename Traits::Variant;
  constexpr int count = 2 * Shape<Traits>::row_tiles;
  constexpr bool custom = Traits::mask_source == MaskSource::packed_bits;
  const WorkItem& item = rows.item;
  i32 q_row[count], head[count], position[count];
  TokenRange range[count];
  MaskBits bits[count];
  const PackedMask mask = custom ? PackedMask(rows.params.custom_mask, item) : PackedMask{};
#pragma unroll
  for (int r = 0; r < count; ++r) {
    const PackedRow row = rows.row(r / 2, r % 2);
    head[r] = row.head;
    position[r] = query_position(item, row.row);
    range[r] = visible_range(rows.params, item, position[r]);
    q_row[r] = row.row;
  }
#pragma unroll
  for (int n = 0; n < token_tiles; ++n) {
    u32 pair[count];
#pragma unroll
    for (int r = 0; r < count; ++r) {
      if (custom && n % 16 == 0) bits[r] = MaskBits(mask, q_row[r], first_token + n * 8, rows.lane);
      pair[r] = custom ? bits[r].pair(n % 16, rows.lane) : 0;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      i32 token = first_token + n * 8 + rows.lane % 4 * 2 + e;
#pragma unroll
      for (int r = 0; r < count; ++r) {
        bool visible = token >= range[r].begin && token < range[r].end;
        if constexpr (custom) visible = visible && (pair[r] >> e & 1);
        visible = visible & Variant::mask(args, item.request, head[r], position[r], min_of(token, item.kv_len - 1));
        if (!visible) scores[r / 2][n][r % 2 * 2 + e] = ptx::negative_infinity();
      }
    }
  }
}

// Hides tokens of a tile that is not wholly visible. `has_room`: the kernel has a few registers to spare.
template <class Traits, bool has_room = false, int token_tiles>
FP_DEVICE void mask_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                           const VariantArgs& args, i32 first_token) {
  if constexpr (Traits::mask_source == MaskSource::function) {
    mask_by_function<Traits>(scores, rows, args, first_token);
  } else if constexpr (Traits::Variant::has_mask) {
    mask_by_token<Traits>(scores, rows, args, first_token);
  } else if constexpr (Traits::mask_source == MaskSource::packed_bits) {
    mask_by_bits<Traits>(scores, rows, first_token);
  } else if constexpr (has_room) {
    mask_cut_ends<Traits>(scores, rows, first_token);
  } else {
    mask_by_range<Traits>(scores, rows, first_token);
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
