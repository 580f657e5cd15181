// Tiles of latent rows in shared memory: copied row by row, and converted if the cache stores them in fp8.
#pragma once
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// Copies `bytes` of one part of the rows; place(row, byte) returns the shared address. A warp copies whole rows if each
// lane has a chunk of them, and looks up their addresses once.
template <int bytes, int tokens, int threads, class Place>
FP_DEVICE void copy_latent_part(const u8* const (&from)[tokens], const bool (&exists)[tokens], int thread,
                                Place&& place) {
  if constexpr (bytes > 0) {
    constexpr int chunk = bytes % 8 ? 4 : bytes % 16 ? 8 : 16, chunks = bytes / chunk;
    static_assert(bytes % chunk == 0);
    if constexpr (chunks % 32 == 0 && tokens % (threads / 32) == 0) {
#pragma unroll
      for (int row = thread / 32; row < tokens; row += threads / 32) {
        const u8* source = from[row] + thread % 32 * chunk;
        const bool is_there = exists[row];
#pragma unroll
        for (int byte = 0; byte < bytes; byte += 32 * chunk)
          ptx::cp_async<chunk>(place(row, thread % 32 * chunk + byte), source + byte, is_there);
      }
    } else {
#pragma unroll 4
      for (int i = thread; i < tokens * chunks; i += threads) {
        const u32 row = i / chunks, byte = i % chunks * chunk;
        ptx::cp_async<chunk>(place(row, byte), from[row] + byte, exists[row]);
      }
    }
  }
}

// The addresses of the tokens' rows, for three tiles alternately: one is computed, one is copied, one is looked up.
template <int tokens, int parts>
struct LatentAddresses {
  alignas(16) const u8* part[3][parts][tokens];
  bool exists[3][tokens];
};

// Hides the scores of tokens that do not exist.
template <int row_tiles, int token_tiles, int tokens>
FP_DEVICE void hide_missing_tokens(float (&scores)[row_tiles][token_tiles][4], const bool (&exists)[tokens], int lane) {
#pragma unroll
  for (int n = 0; n < token_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (exists[n * 8 + lane % 4 * 2 + e]) continue;
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) scores[m][n][e] = scores[m][n][e + 2] = ptx::negative_infinity();
    }
}

// Rows of the queries' type.
template <class Traits, bool converts>
struct LatentTilesOf {
  using S = Shape<Traits>;
  using Rows = typename S::CacheKeyRows;
  static constexpr int tokens = Traits::tile_kv, size = sizeof(typename S::Cache);
  static constexpr int shared_bytes = Traits::head_dim_vo * size,
                       tail_bytes = Traits::head_dim_qk * size - shared_bytes;

  alignas(128) u8 tile[2][Rows::bytes(tokens)];
  LatentAddresses<tokens, 2> rows_of;

  FP_DEVICE u8* rows(int tile_index) { return tile[tile_index % 2]; }
  // Notes where token `token` of a tile is, by the number that rows.look_up found for the request's token `at`.
  FP_DEVICE void note(const AttentionParams& params, int tile_index, int token, const auto& rows, i32 found, i32 at,
                      bool exists) {
    const CacheSlot slot = rows.slot(found, at);
    const auto row = [&](const KvView& view) {
      return static_cast<const u8*>(view.data) +
             (slot.page * view.page_stride + slot.in_page * view.token_stride) * size;
    };
    rows_of.part[tile_index % 3][0][token] = row(params.k);
    rows_of.part[tile_index % 3][1][token] = row(params.v);
    rows_of.exists[tile_index % 3][token] = exists;
  }
  FP_DEVICE void copy(const AttentionParams&, int tile_index, int thread) {
    const u32 to = ptx::shared_address(rows(tile_index));
    const auto& part = rows_of.part[tile_index % 3];
    const auto& exists = rows_of.exists[tile_index % 3];
    copy_latent_part<shared_bytes, tokens, S::threads>(
        part[0], exists, thread, [=](u32 row, u32 byte) { return to + Rows::byte_offset(row, byte); });
    copy_latent_part<tail_bytes, tokens, S::threads>(
        part[1], exists, thread, [=](u32 row, u32 byte) { return to + Rows::byte_offset(row, shared_bytes + byte); });
  }
  FP_DEVICE void convert(const AttentionParams&, int, int) {}
  template <int row_tiles, int token_tiles>
  FP_DEVICE void hide_missing(float (&scores)[row_tiles][token_tiles][4], int tile_index, int lane) const {
    hide_missing_tokens(scores, rows_of.exists[tile_index % 3], lane);
  }
};

// Rows in fp8: two tiles as they are stored, and one of the queries' type.
template <class Traits>
struct LatentTilesOf<Traits, true> {
  using S = Shape<Traits>;
  using Rows = typename S::CacheKeyRows;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  using Rest = typename Format::Rest;
  using Scale = typename Format::Scale;
  static constexpr int tokens = Traits::tile_kv;
  static constexpr int rest_bytes = Format::rest * sizeof(Rest), scale_bytes = Format::num_scales * sizeof(Scale);
  static constexpr int rest_at = Format::quantised, scales_at = rest_at + rest_bytes;
  // An odd number of 16 bytes spreads rows over banks.
  static constexpr int pitch = (ceil_div(scales_at + scale_bytes, 16) | 1) * 16;
  static_assert(Format::quantised + Format::rest == Traits::head_dim_qk);

  alignas(128) u8 tile[Rows::bytes(tokens)];
  alignas(128) u8 stored[2][tokens * pitch];
  LatentAddresses<tokens, 3> rows_of;

  FP_DEVICE u8* rows(int) { return tile; }
  FP_DEVICE void note(const AttentionParams& params, int tile_index, int token, const auto& rows, i32 found, i32 at,
                      bool exists) {
    const LatentParts parts = rows.template parts<Format>(params, found, at);
    rows_of.part[tile_index % 3][0][token] = parts.quantised;
    rows_of.part[tile_index % 3][1][token] = parts.rest;
    rows_of.part[tile_index % 3][2][token] = parts.scales;
    rows_of.exists[tile_index % 3][token] = exists;
  }
  FP_DEVICE void copy(const AttentionParams& params, int tile_index, int thread) {
    const u32 to = ptx::shared_address(stored[tile_index % 2]);
    const auto& part = rows_of.part[tile_index % 3];
    const auto& exists = rows_of.exists[tile_index % 3];
    const auto at = [=](u32 first) { return [=](u32 row, u32 byte) { return to + row * pitch + first + byte; }; };
    copy_latent_part<Format::quantised, tokens, S::threads>(part[0], exists, thread, at(0));
    copy_latent_part<rest_bytes, tokens, S::threads>(part[1], exists, thread, at(rest_at));
    if (Format::has_scales(params))
      copy_latent_part<scale_bytes, tokens, S::threads>(part[2], exists, thread, at(scales_at));
  }

  // Converts eight columns at a time; a barrier of the CTA follows.
  FP_DEVICE void convert(const AttentionParams& params, int tile_index, int thread) {
    constexpr int eights = Traits::head_dim_qk / 8;
    const u8* from = stored[tile_index % 2];
    const bool has_scales = Format::has_scales(params);
    const float common = Format::common_scale(params), rest = Format::rest_scale(params);
#pragma unroll 2
    for (int i = thread; i < tokens * eights; i += S::threads) {
      const int row = i / eights, column = i % eights * 8;
      const u8* stored_row = from + row * pitch;
      u32 pairs[4];
      if (column < Format::quantised) {
        const Scale* scales = reinterpret_cast<const Scale*>(stored_row + scales_at);
        const float scale = has_scales ? latent_scale(scales[column / Format::scale_columns]) : common;
        widen_eight<typename S::Cache, E4m3>(pairs, stored_row + column, scale);
      } else {
        const u8* eight = stored_row + rest_at + (column - Format::quantised) * sizeof(Rest);
        widen_eight<typename S::Cache, Rest>(pairs, eight, rest);
      }
      ptx::store_shared(ptx::shared_address(tile) + Rows::byte_offset(row, column * 2), pairs[0], pairs[1], pairs[2],
                        pairs[3]);
    }
    __syncthreads();
  }
  template <int row_tiles, int token_tiles>
  FP_DEVICE void hide_missing(float (&scores)[row_tiles][token_tiles][4], int tile_index, int lane) const {
    hide_missing_tokens(scores, rows_of.exists[tile_index % 3], lane);
  }
};

template <class Traits>
using LatentTiles = LatentTilesOf<Traits, converts_latents<Traits>>;

}  // namespace flashpage
