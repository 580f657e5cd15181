// Latent rows in fp8: where their parts are, and how many columns share a scale. One struct describes a format for the
// CPU and for cards; flashpage/kernels/latent_formats.py has a row for it.
//
// A stored row has `quantised` columns of e4m3, each `scale_columns` of which share a scale, and `rest` columns of
// another type. An element is its stored number times its scale, rounded to the type of the queries. Tensors of scales
// are applied to elements; a number for the shared columns is already in params.score_scale and value_scale, and
// tail_scale is relative to it.
#pragma once
#include "flashpage/params/params.h"

namespace flashpage {

// Where a token is in a paged cache.
struct CacheSlot {
  i64 page;
  u32 in_page;  // token of the page
};

// A scale of 2^(exponent - 127).
struct PowerOfTwo {
  u8 exponent;
};

// The addresses of a token's parts. Each part is copied as a whole, so it starts on 16 bytes (scales: on 8).
struct LatentParts {
  const u8* quantised;
  const u8* rest;
  const u8* scales;
};

FP_HOST_DEVICE const u8* byte_row(const KvView& view, const CacheSlot& slot) {
  return static_cast<const u8*>(view.data) + slot.page * view.page_stride + slot.in_page * view.token_stride;
}

// All e4m3 in the two views of the cache. The shared columns have one scale (params.k_scale_stride is 0) or, for each
// token, one for 128 columns: k_scale is [pages, page_size, head_dim_vo / 128].
template <class Traits>
struct ScaledLatent {
  static constexpr int quantised = Traits::head_dim_vo, rest = Traits::head_dim_qk - Traits::head_dim_vo;
  static constexpr int scale_columns = 128, num_scales = ceil_div(quantised, scale_columns);
  using Rest = E4m3;
  using Scale = float;

  template <class Params>
  FP_HOST_DEVICE static LatentParts find(const Params& params, const CacheSlot& slot) {
    const float* scales = params.k_scale;
    if (params.k_scale_stride) scales += (slot.page * params.page.divisor + slot.in_page) * num_scales;
    return {byte_row(params.k, slot), byte_row(params.v, slot), reinterpret_cast<const u8*>(scales)};
  }
  template <class Params>
  FP_HOST_DEVICE static bool has_scales(const Params& params) {
    return params.k_scale_stride != 0;
  }
  template <class Params>
  FP_HOST_DEVICE static float common_scale(const Params& params) {
    return params.k_scale && !params.k_scale_stride ? *params.k_scale : 1.f;
  }
  template <class Params>
  FP_HOST_DEVICE static float rest_scale(const Params& params) {
    return params.v_scale ? params.tail_scale * *params.v_scale : params.tail_scale;
  }
};

// Formats whose rows hold all of their parts.
struct SelfContainedLatent {
  template <class Params>
  FP_HOST_DEVICE static bool has_scales(const Params&) {
    return true;
  }
  template <class Params>
  FP_HOST_DEVICE static float common_scale(const Params&) {
    return 1.f;
  }
  template <class Params>
  FP_HOST_DEVICE static float rest_scale(const Params&) {
    return 1.f;
  }
};

// DeepSeek V3.2 and GLM-5, 656 bytes: 512 e4m3, four fp32 scales, 64 bf16.
template <class Traits>
struct DeepseekV32Latent : SelfContainedLatent {
  static constexpr int quantised = 512, rest = 64, scale_columns = 128, num_scales = 4;
  using Rest = Bf16;
  using Scale = float;

  template <class Params>
  FP_HOST_DEVICE static LatentParts find(const Params& params, const CacheSlot& slot) {
    const u8* row = byte_row(params.k, slot);
    return {row, row + 528, row + 512};
  }
};

// DeepSeek V4: a page has rows of 448 e4m3 and 64 bf16, and then eight bytes a token: seven scales and one
// that is unused.
template <class Traits>
struct DeepseekV4Latent : SelfContainedLatent {
  static constexpr int quantised = 448, rest = 64, scale_columns = 64, num_scales = 8;
  using Rest = Bf16;
  using Scale = PowerOfTwo;

  template <class Params>
  FP_HOST_DEVICE static LatentParts find(const Params& params, const CacheSlot& slot) {
    const u8* page = static_cast<const u8*>(params.k.data) + slot.page * params.k.page_stride;
    const u8* row = page + slot.in_page * 576;
    return {row, row + 448, page + params.page.divisor * 576 + slot.in_page * 8};
  }
};

template <class Traits, LatentFormat format>
struct LatentFormatOf {
  using type = ScaledLatent<Traits>;
};
template <class Traits>
struct LatentFormatOf<Traits, LatentFormat::deepseek_v32> {
  using type = DeepseekV32Latent<Traits>;
};
template <class Traits>
struct LatentFormatOf<Traits, LatentFormat::deepseek_v4> {
  using type = DeepseekV4Latent<Traits>;
};

// Two lists of a row of q: entries of the first one that are used, and the place of a token's entry.
FP_HOST_DEVICE i32 first_list_length(const AttentionParams& params, i32 row) {
  return params.second.first_lengths ? params.second.first_lengths[row] : params.second.first_columns;
}
FP_HOST_DEVICE const i32* entry_of_lists(const AttentionParams& params, i32 row, i32 token) {
  const SecondLists& second = params.second;
  const i32* const of_first = params.kv_indices + i64{row} * second.first_columns;
  const i32* const of_second = second.indices + (i64{row} * second.columns - second.first_columns);
  return (token < second.first_columns ? of_first : of_second) + token;
}

// One of two caches, as formats read it.
struct ListedCache {
  KvView k;
  FastDiv page;
};
FP_HOST_DEVICE bool is_in_second(const AttentionParams& params, i32 token) {
  return token >= params.second.first_columns;
}
FP_HOST_DEVICE ListedCache cache_of_token(const AttentionParams& params, i32 token) {
  if (is_in_second(params, token)) return {params.second.k, params.second.page};
  return {params.k, params.page};
}

// The parts of the token of an entry that is not negative.
template <class Format>
FP_HOST_DEVICE LatentParts parts_of_entry(const AttentionParams& params, i32 entry, i32 token) {
  const ListedCache cache = cache_of_token(params, token);
  u32 page, in_page;
  cache.page.divmod(entry, page, in_page);
  return Format::find(cache, CacheSlot{page, in_page});
}

template <class Traits>
inline constexpr bool converts_latents = Traits::latent_format != LatentFormat::plain;

}  // namespace flashpage
