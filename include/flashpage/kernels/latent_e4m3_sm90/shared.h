// The shared memory between the warps of latent_e4m3_sm90.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/kernels/wide_units.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// The scales of a slot's tokens, and which of them exist. The 16 tokens of a product's step have a power of two, that
// of their largest scale, by which their values are divided.
template <int groups, int tokens>
struct E4m3Tokens {
  alignas(16) float scales[groups][tokens];   // of a group of columns, in the order of TokenOrder
  alignas(16) u16 quotients[groups][tokens];  // those scales, divided by the step's power, in fp16 and the same order
  alignas(16) float exponents[tokens / 16];   // log2 of a step's power
  alignas(16) float inverses[tokens / 16];    // 1 / power
  u32 present[tokens / 32];                   // a bit for each token: whether it exists
  float of_tail;                              // the scale of a tail in e4m3
};

// The order of the scales of 64 tokens. In products a lane has two neighbours of each eight tokens; these 16 tokens of
// a lane follow each other, those of lanes l % 4 == 0 first.
struct TokenOrder {
  FP_HOST_DEVICE static constexpr int index_of(int token) { return token % 8 / 2 * 16 + token / 8 * 2 + token % 2; }
  FP_HOST_DEVICE static constexpr int first_of_lane(int lane) { return lane % 4 * 16; }
};

template <class Traits>
struct E4m3Shared {
  using Cache = typename Traits::Cache;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  static constexpr int tokens = 64;            // of a block
  static constexpr int rows = Traits::tile_q;  // packed rows of a CTA: 16 or 32 (token_scores.h), or 64 (scores.h)
  static constexpr int unit_rows = rows;
  static constexpr int places_ahead = 2;
  static constexpr int loaders = 2;  // warps that load rows or boxes
  static constexpr bool has_boxes = Traits::loader == Loader::boxes;
  static constexpr int scales_warp = loaders;                     // the warp after them
  using Tile = SwizzledRows<Cache, Traits::head_dim_qk, rows>;    // Q as it arrives
  using Block = SwizzledRows<E4m3, Traits::head_dim_vo, tokens>;  // the value columns
  using Weights = SwizzledRows<Half, tokens, rows>;               // probabilities
  // Columns of a panel of a block. Q has two panels for them, one for each term.
  static constexpr int panel_columns = 128, panels = Traits::head_dim_vo / panel_columns;
  // Columns that share a scale. Scores, values and scales are written for one such group in each panel.
  static constexpr int group_columns = Format::scale_columns, groups = Traits::head_dim_vo / group_columns;
  static constexpr int tail_panels = Tile::panels - 2 * panels;
  // A tail in e4m3 has 64 bytes, the first half of its panel's rows, and products read only these. Rows copied one by
  // one leave the other half as it is; a box is a whole panel, and its columns outside of the tensor become zero. Q's
  // panel of the tail has the first terms in its first half, and the second terms in its second half.
  static constexpr bool has_e4m3_tail = tail_panels > 0 && is_fp8<typename Format::Rest>;
  static constexpr int tail_pieces = 64 * static_cast<int>(sizeof(typename Format::Rest)) / 16;  // of 16 bytes
  static constexpr bool rows_are_whole = Traits::latent_format != LatentFormat::scaled;          // in one view, not two
  using Tokens = E4m3Tokens<groups, tokens>;
  static_assert(Traits::ctas == 1 && Traits::tile_kv == tokens && (rows == 16 || rows == 32 || rows == 64));
  static_assert(Traits::head_dim_vo % panel_columns == 0 && panels % 2 == 0 && tail_panels >= 0 && tail_panels <= 1);
  static_assert(Format::quantised == Traits::head_dim_vo);
  static_assert(groups == panels, "a warp multiplies a panel by one scale");
  static_assert(is_same<typename Format::Scale, float>);
  static_assert(is_same<Cache, Bf16>, "two terms in e4m3 have fewer significant bits than fp16");
  static_assert(tail_panels == 0 || has_e4m3_tail || is_same<typename Format::Rest, Cache>);

  static constexpr int panel_bytes = Block::panel_bytes, tail_bytes = tail_panels * panel_bytes;
  static constexpr int scales_ahead = 4;  // blocks whose scales are requested before they are needed
  static constexpr int messages = 2;
  // Probabilities in fp16 are below 2^(above + headroom), and fp16 ends at 65,504: a maximum is moved to 2^above below
  // a row's largest probability, and again when that exceeds 2^(above + headroom). `above` keeps bits of small
  // probabilities, which matter where a sink, or tokens with another power, have most of the sum.
  static constexpr float above = 7.f, headroom = 8.f;
  // The power of a step is 2^-least_exponent or more. A maximum that begins with a sink, which no power multiplies, is
  // lowered by as much, so that tokens with the least power still have probabilities next to it.
  static constexpr int least_exponent = 64;
  static constexpr int other_bytes = 2048;  // at least those of factors, maxima, sums, places and barriers
  static constexpr int free_bytes = cta_shared_bytes(1) - Tile::tile_bytes - messages * Weights::tile_bytes -
                                    scales_ahead * tokens * groups * 4 - other_bytes;
  static constexpr int slots =
      min_of(Traits::stages, free_bytes / (Block::tile_bytes + tail_bytes + static_cast<int>(sizeof(Tokens))));
  // Registers of a thread. 128 of a value warp's hold its sums of 256 columns of 64 rows, 16 a converted tile, and 16
  // the next one as it is stored and its quotients; loading warps spill with 40. Scoring warps take what is left,
  // because a warpgroup that takes more waits for ever.
  static constexpr int loading_registers = 48;
  static constexpr int value_registers = rows < 64 ? 136 : Traits::head_dim_vo > 256 ? 176 : 144;
  static constexpr int scoring_registers = 4 * WideRoles::first_registers - loading_registers - 2 * value_registers;
  static_assert(slots >= 2);

  alignas(1024) u8 query[Tile::tile_bytes];
  alignas(1024) u8 blocks[slots][Block::tile_bytes];
  alignas(1024) u8 tails[slots][max_of(tail_bytes, 16)];
  // Scoring warps pass on a block's probabilities, and the factors of earlier values; at a unit's end its sums.
  alignas(1024) u8 weights[messages][Weights::tile_bytes];
  alignas(16) float factors[messages][rows];
  alignas(16) float row_scales[rows];               // of scores, in base 2; positive
  alignas(4) u8 moved[messages][WideRoles::group];  // whether the factors of 16 rows are not all 1
  // Maxima, and sums, of the scoring warps' tokens, if each has some tokens of all rows (token_scores.h).
  static constexpr int shared_rows = rows < 64 ? rows : 1;
  float tops[WideRoles::group][shared_rows], sums[WideRoles::group][shared_rows];
  alignas(16) u32 copied_scales[scales_ahead][tokens][groups];
  Tokens of_tokens[slots];
  WidePlace places[places_ahead];
  PlaceCursor cursor;
  u64 converted;  // Q
  // Single rows: all copies of a block, for which the warp of scales waits. Boxes: those of a unit's last block, if it
  // has rows missing, which that warp clears; other boxes complete the block's full barrier themselves.
  u64 loaded[slots];
  SlotRing<slots> block_ring;
  SlotRing<messages> message_ring;
  SlotRing<places_ahead> place_ring;
  SlotRing<1> query_ring;

  // Called by one thread. All lanes of a warp arrive, or the one lane that writes places, because racecheck follows an
  // arrival for its thread alone.
  FP_DEVICE void init() {
    ptx::mbarrier_init(ptx::shared_address(&converted), 32 * WideRoles::group);
    for (u64& barrier : loaded) ptx::mbarrier_init(ptx::shared_address(&barrier), has_boxes ? loaders : 32 * loaders);
    block_ring.init(32 + (has_boxes ? loaders : 0), 32 * WideRoles::computing);
    message_ring.init(32 * WideRoles::group, 2 * 32 * WideRoles::group);
    place_ring.init(1, 32 * (WideRoles::computing + loaders + 1));
    query_ring.init(32, 32 * WideRoles::group);
    ptx::mbarrier_init_fence();
  }

  FP_DEVICE static int first_row() { return 0; }  // of a unit
  // The messages of all units before this block's: one a block, and one a unit.
  FP_DEVICE static u32 message(const WidePlace& place, int block) { return place.use(block) + place.units_before; }
};

}  // namespace flashpage
