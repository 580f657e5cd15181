// fp8 K and V of a unit, tile by tile, as four warps: rows come into registers, become the products' type there, and go
// to shared memory as the copy engine would lay them down.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/shape.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// A lane has a piece of the same 64 columns of some rows, block by block of those columns. While one piece is widened,
// `ahead` others are on their way: those of a tile's keys, then of its values, then of the next tile's keys.
template <class Traits, int tokens>
struct ConvertedTiles {
  using S = Shape<Traits>;
  using Stored = typename Traits::StoredCache;
  using Keys = typename S::KeyRows;
  using Values = typename S::ValueRows;
  static constexpr bool paged = Traits::kv_source == KvSource::paged;
  static constexpr int warps = 4;
  // Rows of an odd multiple of 8 bytes come in pieces of 8.
  static constexpr int piece_bytes = Traits::head_dim_qk % 16 || Traits::head_dim_vo % 16 ? 8 : 16;
  static constexpr int block_lanes = 64 / piece_bytes;        // of one row
  static constexpr int warp_rows = 32 / block_lanes;          // of one pass
  static constexpr int pass_rows = warps * warp_rows;         // of all warps
  static constexpr int passes = ceil_div(tokens, pass_rows);  // rows of a lane
  static constexpr int key_pieces = passes * Keys::blocks, value_pieces = passes * Values::blocks;
  static constexpr int pieces = key_pieces + value_pieces;
  static_assert(passes * warp_rows <= 32 && pass_rows % 8 == 0);

  static constexpr int most_ahead(int most) { return pieces % most == 0 ? most : most_ahead(most - 1); }
  // As registers allow; a piece's place follows from its number.
  static constexpr int ahead = most_ahead(Traits::head_dim_vo > 192 ? 4 : 8);

  struct Piece {
    u32 words[piece_bytes / 4];
  };
  // One unit's K and V.
  struct Source {
    i64 offset;  // paged: of the first page number; ragged: of the first row
    i32 kv_head, kv_end, tiles;
    i32 token;           // the first of the tile that is asked for
    i32 found;           // of a warp's rows of that tile a lane looks up one: its page
    u64 mine;            // and where that begins
    const u8* row;       // that is asked for
    Piece piece[ahead];  // on their way
  };
  struct Extent {
    i32 first_token;
    i32 tiles;  // at least one: a unit that sees nothing has a tile of hidden tokens
  };

  const AttentionParams& params;
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * warp_rows + lane / block_lanes;
  const int first_column = lane % block_lanes * piece_bytes;  // of a block; an element is a byte
  // In a tile; another pass is a multiple of eight rows further, which are swizzled alike.
  const u32 first_chunk = first_row * 128 + ((first_column / 8 ^ first_row) & 7) * 16;

  FP_DEVICE explicit ConvertedTiles(const AttentionParams& params) : params(params) {}

  FP_DEVICE static Extent extent(const Unit& unit) {
    return {unit.kv_begin, max_of(1, ceil_div(unit.kv_end - unit.kv_begin, tokens))};
  }

  // Its first look-ups begin.
  FP_DEVICE void open(Source& source, const Place& place) const {
    const Extent covered = extent(place.unit);
    source.offset = place.item.kv_offset;
    source.kv_head = place.unit.kv_head;
    source.token = covered.first_token;
    source.kv_end = place.unit.kv_end;
    source.tiles = covered.tiles;
    source.found = look_up(source);
  }
  // So do the first pieces, of a unit that sees something.
  FP_DEVICE void begin(Source& source) const {
#pragma unroll
    for (int i = 0; i < ahead; ++i) ask(source, i);
  }

  FP_DEVICE static bool is_empty(const Place& place) { return place.unit.kv_begin >= place.unit.kv_end; }
  // Of a unit that sees nothing: a probability of zero would not hide NaN.
  FP_DEVICE static void clear_values(u32 to) {
    for (int at = threadIdx.x * 16; at < Values::tile_bytes; at += warps * 32 * 16)
      ptx::store_shared(to + at, 0, 0, 0, 0);
  }

  // Tile by tile, of each the keys first. Tokens that the unit does not see are copies of the last one it sees.
  FP_DEVICE void convert_keys(Source& source, u32 to) const {
#pragma unroll
    for (int i = 0; i < key_pieces; ++i) {
      store<Keys, Traits::head_dim_qk>(source.piece[i % ahead], to, i);
      ask(source, i + ahead);
    }
  }
  FP_DEVICE void convert_values(Source& source, u32 to) const {
#pragma unroll
    for (int i = 0; i < value_pieces; ++i) {
      store<Values, Traits::head_dim_vo>(source.piece[(key_pieces + i) % ahead], to, i);
      ask(source, key_pieces + i + ahead);
    }
  }

 private:
  // The lane's row of those that the warp has of a tile. Computed where it is used: registers are few.
  FP_DEVICE static i32 mine_in_tile() {
    const u32 thread = ptx::opaque(threadIdx.x), lane = thread % 32;
    return lane / warp_rows * pass_rows + thread / 32 * warp_rows + lane % warp_rows;
  }
  // Its token of the tile that is asked for, or the last one there is.
  FP_DEVICE i32 my_token(const Source& source) const {
    return min_of(source.token + mine_in_tile(), source.kv_end - 1);
  }
  FP_DEVICE i32 look_up(const Source& source) const {
    return paged ? __ldg(params.kv_indices + source.offset + params.page.div(my_token(source))) : 0;
  }
  FP_DEVICE u64 place_of_mine(const Source& source, const KvView& view) const {
    const i32 token = my_token(source);
    i64 offset = static_cast<i32>(ptx::opaque(source.kv_head)) * view.head_stride;
    if constexpr (paged) {
      const i32 in_page = token - params.page.div(token) * params.page.divisor;
      offset += source.found * view.page_stride + in_page * view.token_stride;
    } else {
      offset += (source.offset + token) * view.token_stride;
    }
    return reinterpret_cast<u64>(view.data) + offset;
  }

  // Pieces are numbered on into the next tile.
  FP_DEVICE void ask(Source& source, int number) const {
    const int i = number % pieces;
    if (i == 0) source.mine = place_of_mine(source, params.k);
    if (i == key_pieces) {
      source.mine = place_of_mine(source, params.v);
      source.token += tokens;
      source.found = look_up(source);
    }
    if (i < key_pieces) {
      ask<Keys, Traits::head_dim_qk>(source, number, i);
    } else {
      ask<Values, Traits::head_dim_vo>(source, number, i - key_pieces);
    }
  }
  template <class To, int columns>
  FP_DEVICE void ask(Source& source, int number, int i) const {
    const int pass = i / To::blocks, column = i % To::blocks * 64;
    if (column == 0)
      source.row =
          reinterpret_cast<const u8*>(__shfl_sync(0xffffffff, source.mine, pass * warp_rows + lane / block_lanes));
    const int wanted = is_in_row<columns>(column) ? column + first_column : 0;
    ptx::load_once(source.piece[number % ahead].words, source.row + wanted);
  }
  template <int columns>
  FP_DEVICE bool is_in_row(int column) const {
    return column + 64 <= columns || column + first_column < columns;
  }

  template <class To, int columns>
  FP_DEVICE void store(const Piece& piece, u32 to, int i) const {
    const int pass = i / To::blocks, block = i % To::blocks;
    const bool is_in_tile = tokens % pass_rows == 0 || pass + 1 < passes || pass * pass_rows + first_row < tokens;
    if (!is_in_tile || !is_in_row<columns>(block * 64)) return;
#pragma unroll
    for (int chunk = 0; chunk < piece_bytes / 8; ++chunk) {
      u32 pairs[4];
      ptx::widen4<typename S::Cache, Stored>(piece.words[2 * chunk], pairs[0], pairs[1]);
      ptx::widen4<typename S::Cache, Stored>(piece.words[2 * chunk + 1], pairs[2], pairs[3]);
      ptx::store_shared(to + (first_chunk ^ chunk * 16) + block * To::block_bytes + pass * pass_rows * 128, pairs[0],
                        pairs[1], pairs[2], pairs[3]);
    }
  }
};

}  // namespace flashpage
