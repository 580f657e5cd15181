// A tile of tokens: where its rows of K and V are, and how they are packed into the panels that products read.
#pragma once
#include "flashpage/cpu/product.h"
#include "flashpage/formats/format.h"
#include "flashpage/params/latent_format.h"

namespace flashpage::cpu {

inline constexpr int max_head_dim = 576;

// The row of slots that hold no token of the tile, so that packing needs no tail.
template <class Kv>
inline constexpr Kv zero_row[max_head_dim] = {};

template <class Traits>
struct KvTile {
  using Kv = typename Traits::StoredCache;
  static constexpr int tokens = Traits::tile_kv;
  static constexpr bool has_tails = is_latent<Traits::kv_source>, is_selected = reads_lists<Traits::kv_source>;
  i32 begin, count;  // tokens of the request
  const Kv* keys[tokens];
  const Kv* values[tokens];
  const Kv* key_tails[has_tails ? tokens : 1];               // latent: the columns of K that V lacks
  LatentParts parts[converts_latents<Traits> ? tokens : 1];  // in fp8, instead of keys, values and tails
  // Formats: the scales of each token, instead of which plain elements have null.
  const u8* key_scales[has_formats<Traits> ? tokens : 1];
  const u8* value_scales[has_formats<Traits> ? tokens : 1];
  u32 exists[is_selected ? ceil_div(tokens, num_lanes) : 1];  // a bit for each token
};

template <class Kv>
inline const Kv* kv_row(const KvView& view, i64 page, i64 token, i64 head) {
  return static_cast<const Kv*>(view.data) + page * view.page_stride + token * view.token_stride +
         head * view.head_stride;
}

// Finds the slot of a token of latent rows; false: it has none (selected).
template <KvSource source>
bool find_slot(const AttentionParams& params, const WorkItem& item, i32 token, CacheSlot& slot) {
  u32 number, in_page;
  if constexpr (source == KvSource::selected) {
    const i32 found = params.kv_indices[item.kv_offset + token];
    if (found < 0) return false;
    params.page.divmod(found, number, in_page);
    slot = {number, in_page};
  } else {
    params.page.divmod(token, number, in_page);
    slot = {params.kv_indices[item.kv_offset + number], in_page};
  }
  return true;
}

// Rows of two lists, whose format holds their scales.
template <class Traits>
void locate_entries(const AttentionParams& params, const WorkItem& item, KvTile<Traits>& tile) {
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  __builtin_memset(tile.exists, 0, sizeof tile.exists);
  const i32 first_length = first_list_length(params, item.q_begin);
  for (i32 i = 0; i < tile.count; ++i) {
    const i32 token = tile.begin + i;
    const bool is_used = token < first_length || is_in_second(params, token);
    const i32 entry = is_used ? *entry_of_lists(params, item.q_begin, token) : -1;
    tile.exists[i / num_lanes] |= u32{entry >= 0} << i % num_lanes;
    tile.parts[i] = entry >= 0 ? parts_of_entry<Format>(params, entry, token) : LatentParts{};
  }
}

// Latent rows that are in fp8 or listed one by one.
template <class Traits>
void locate_slots(const AttentionParams& params, const WorkItem& item, KvTile<Traits>& tile) {
  using Kv = typename Traits::StoredCache;
  if constexpr (Traits::kv_source == KvSource::two_lists) return locate_entries(params, item, tile);
  if constexpr (KvTile<Traits>::is_selected) __builtin_memset(tile.exists, 0, sizeof tile.exists);
  for (i32 i = 0; i < tile.count; ++i) {
    CacheSlot slot = {};
    const bool exists = find_slot<Traits::kv_source>(params, item, tile.begin + i, slot);
    if constexpr (KvTile<Traits>::is_selected) tile.exists[i / num_lanes] |= u32{exists} << i % num_lanes;
    if constexpr (converts_latents<Traits>) {
      using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
      tile.parts[i] = exists ? Format::find(params, slot) : LatentParts{};
    } else {
      tile.keys[i] = exists ? kv_row<Kv>(params.k, slot.page, slot.in_page, 0) : zero_row<Kv>;
      tile.key_tails[i] = exists ? kv_row<Kv>(params.v, slot.page, slot.in_page, 0) : zero_row<Kv>;
      tile.values[i] = tile.keys[i];
    }
  }
}

// The row of slots without a token.
template <class Traits>
void fill_rows(KvTile<Traits>& tile) {
  using Kv = typename Traits::StoredCache;
  for (i32 slot = tile.count; slot < round_up(tile.count, num_lanes); ++slot) {
    tile.keys[slot] = zero_row<Kv>;
    tile.values[slot] = zero_row<Kv>;
    if constexpr (KvTile<Traits>::has_tails) tile.key_tails[slot] = zero_row<Kv>;
  }
}

// Tokens that lie one stride apart, and the slot of the first one in a tile.
struct TokenRun {
  i64 page, in_page, kv_head;
  i32 count, slot;
};

// Finds the scales of a run's tokens. Strides are in bytes.
template <class Traits>
void locate_scales(const AttentionParams& params, const TokenRun& run, KvTile<Traits>& tile) {
  const auto fill = [&](const KvView& view, const u8*(&scales)[KvTile<Traits>::tokens]) {
    const u8* first = view.data ? kv_row<u8>(view, run.page, run.in_page, run.kv_head) : nullptr;
    for (i32 i = 0; i < run.count; ++i) scales[run.slot + i] = first ? first + i * view.token_stride : nullptr;
  };
  fill(params.key_scales, tile.key_scales);
  fill(params.value_scales, tile.value_scales);
}

// Latent rows: `params.k` has the columns that K and V share, `params.v` the tails of K.
template <class Traits>
void locate_rows(const AttentionParams& params, const WorkItem& item, i32 kv_head, KvTile<Traits>& tile) {
  using Kv = typename Traits::StoredCache;
  constexpr KvSource source = Traits::kv_source;
  constexpr bool has_tails = KvTile<Traits>::has_tails;
  if constexpr (converts_latents<Traits> || KvTile<Traits>::is_selected) {
    locate_slots(params, item, tile);
    return fill_rows(tile);
  }
  const i32 end = tile.begin + tile.count;
  for (i32 token = tile.begin; token < end;) {
    i64 page = 0, in_page = item.kv_offset + token;
    i32 run = end - token;  // tokens that lie one stride apart
    if constexpr (source != KvSource::ragged) {
      u32 number, slot;
      params.page.divmod(token, number, slot);
      page = params.kv_indices[item.kv_offset + number];
      in_page = slot;
      run = min_of(run, static_cast<i32>(params.page.divisor - slot));
    }
    const Kv* key = kv_row<Kv>(params.k, page, in_page, kv_head);
    const Kv* value = kv_row<Kv>(params.v, page, in_page, kv_head);
    if constexpr (has_formats<Traits>) locate_scales(params, {page, in_page, kv_head, run, token - tile.begin}, tile);
    for (i32 i = 0, slot = token - tile.begin; i < run; ++i, ++slot) {
      tile.keys[slot] = key + i * params.k.token_stride;
      if constexpr (has_tails) tile.key_tails[slot] = value + i * params.v.token_stride;
      tile.values[slot] = has_tails ? tile.keys[slot] : value + i * params.v.token_stride;
    }
    token += run;
  }
  fill_rows(tile);
}

// The rows that are packed next; they are prefetched while other rows are packed.
template <class Kv, int head_dim>
struct Ahead {
  const Kv* const* rows;
  i32 count;

  void prefetch(i32 first, i32 num_rows) const {
    for (i32 i = first; i < min_of(first + num_rows, count); ++i)
      for (int byte = 0; byte < head_dim * i32{sizeof(Kv)}; byte += 64)
        cpu::prefetch(reinterpret_cast<const u8*>(rows[i]) + byte);
  }
};

#if defined(__clang__)  // GCC 11 has no __builtin_shufflevector, and clang no __builtin_shuffle
template <class T, T... lane>
struct LaneNumbers {
  // Exchanges the odd blocks of `size` lanes of a with the even ones of b.
  template <int size>
  static void exchange(FloatLanes& a, FloatLanes& b) {
    const FloatLanes low = __builtin_shufflevector(a, b, (lane & size ? num_lanes + lane - size : lane)...);
    b = __builtin_shufflevector(a, b, (lane & size ? num_lanes + lane : lane + size)...);
    a = low;
  }
};
#endif

// Transposes a square of words. Each round exchanges the off-diagonal quarters of all squares of 2 * size.
template <int size = num_lanes / 2>
inline void transpose(FloatLanes (&square)[num_lanes]) {
#if defined(__clang__)
#pragma GCC unroll 16
  for (int i = 0; i < num_lanes; ++i)
    if (!(i & size))
      __make_integer_seq<LaneNumbers, int, num_lanes>::template exchange<size>(square[i], square[i + size]);
#else
  IntLanes low, high;
  for (int i = 0; i < num_lanes; ++i) {
    low[i] = i & size ? num_lanes + i - size : i;
    high[i] = i & size ? num_lanes + i : i + size;
  }
#pragma GCC unroll 16
  for (int i = 0; i < num_lanes; ++i) {
    if (i & size) continue;
    const FloatLanes a = square[i], b = square[i + size];
    square[i] = __builtin_shuffle(a, b, low);
    square[i + size] = __builtin_shuffle(a, b, high);
  }
#endif
  if constexpr (size > 1) transpose<size / 2>(square);
}

// Packs `head_dim` columns of keys into panels of tokens: a step is a word of K's row, which has `row_words`, and a
// column is a token. `panels` begins at the step of the first word.
template <class Operand, int head_dim, int row_words, class Source, class Ahead>
void pack_keys(const Source* const* rows, int count, u32* panels, const Ahead& ahead) {
  constexpr int words = head_dim / word_elements<Operand>;
  for (int token = 0; token < count; token += num_lanes) {
    ahead.prefetch(token, num_lanes);
    u32* panel = panels + (token / panel_width) * (row_words * panel_width) + token % panel_width;
    for (int word = 0; word < words; word += num_lanes) {
      FloatLanes square[num_lanes];
#pragma GCC unroll 16
      for (int i = 0; i < num_lanes; ++i)
        square[i] = load_words<Operand>(rows[token + i] + word * word_elements<Operand>, words - word);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < num_lanes; ++i)
        if (word + i < words) store_bits(panel + (word + i) * panel_width, square[i]);
    }
  }
}

// One column of a token, or of two tokens in the halves of each word.
template <class Operand, class Kv>
inline FloatLanes value_words(const Kv* const* rows, int column, int count) {
  const FloatLanes first = load_first(rows[0] + column, count);
  if constexpr (is_same<Operand, float>) {
    return first;
  } else {
    const FloatLanes second = load_first(rows[1] + column, count);
    return (FloatLanes)(((IntLanes)first >> 16 & 0xffff) | (IntLanes)second);
  }
}

// Packs values into panels of head_dim: a step is a token (or two), a column is an element.
template <class Operand, int head_dim, int max_steps, class Kv, class Ahead>
void pack_values(const Kv* const* rows, int count, u32* panels, const Ahead& ahead) {
  for (int step = 0; step * word_elements<Operand> < count; ++step) {
    ahead.prefetch(step * word_elements<Operand>, word_elements<Operand>);
    for (int column = 0; column < head_dim; column += num_lanes) {
      u32* panel = panels + (column / panel_width) * (max_steps * panel_width) + column % panel_width;
      store_bits(panel + step * panel_width,
                 value_words<Operand>(rows + step * word_elements<Operand>, column, head_dim - column));
    }
  }
}

}  // namespace flashpage::cpu
