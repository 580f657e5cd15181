// append_paged_mla_kv_cache in fp8: quantises new tokens and writes them to their slots. One warp for each token.
#pragma once
#include "flashpage/params/latent_format.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

// The exponent of the least power of two by which numbers up to `most` fit e4m3. Such scales change no digit.
FP_DEVICE u32 scale_exponent(float most) {
  const u32 bits = __float_as_uint(most / 448.f);
  return max_of<u32>((bits + 0x7fffff) >> 23, 1);
}
FP_DEVICE void store_scale(u8* to, float, u32 exponent) {
  *reinterpret_cast<float*>(to) = __uint_as_float(exponent << 23);
}
FP_DEVICE void store_scale(u8* to, PowerOfTwo, u32 exponent) { *to = static_cast<u8>(exponent); }

template <class Traits>
struct AppendLatent {
  using Given = typename Traits::StoredQuery;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  using Scale = typename Format::Scale;
  using Rest = typename Format::Rest;
  static constexpr int warps = 8;
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;

  FP_DEVICE static void run(const AppendLatentParams& params) {
    ptx::grid_dependency_wait();
    for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < static_cast<u32>(params.nnz); i += gridDim.x * warps)
      append_one(params, i);
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static float element(const AppendLatentParams& p, i64 token, int column) {
    if (column < Traits::head_dim_vo)
      return ptx::to_float(static_cast<const Given*>(p.ckv)[token * p.ckv_row_stride + column]);
    return ptx::to_float(static_cast<const Given*>(p.kpe)[token * p.kpe_row_stride + column - Traits::head_dim_vo]);
  }

  FP_DEVICE static void append_one(const AppendLatentParams& p, i32 token) {
    const i32 request = p.batch_indices[token];
    if (request < 0) return;  // get_batch_indices_positions fills unused entries with -1
    u32 page_of_request, in_page;
    p.page.divmod(p.positions[token], page_of_request, in_page);
    const LatentParts parts = Format::find(p, {p.kv_indices[p.kv_indptr[request] + page_of_request], in_page});
    constexpr int blocks = ceil_div(Format::quantised, Format::scale_columns);
    for (int block = 0; block < blocks; ++block) quantise(p, parts, token, block);
    const float scale = Format::rest_scale(p);
    for (int i = threadIdx.x % 32; i < Format::rest; i += 32) {
      const float value = element(p, token, Format::quantised + i);
      if constexpr (is_fp8<Rest>) {
        const_cast<u8*>(parts.rest)[i] = ptx::narrow<Rest>(value / scale).bits;
      } else {
        reinterpret_cast<Rest*>(const_cast<u8*>(parts.rest))[i] = ptx::from_float<Rest>(value);
      }
    }
  }

  // Writes the columns that share a scale, and the scale.
  FP_DEVICE static void quantise(const AppendLatentParams& p, const LatentParts& parts, i32 token, int block) {
    constexpr int of_lane = Format::scale_columns / 32;
    const int lane = threadIdx.x % 32, first = block * Format::scale_columns + lane;
    float values[of_lane], most = 0.f;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      values[i] = first + i * 32 < Format::quantised ? element(p, token, first + i * 32) : 0.f;
      most = fmaxf(most, fabsf(values[i]));
    }
    float scale = Format::common_scale(p) * p.shared_scale;
    if (Format::has_scales(p)) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, other));
      const u32 exponent = scale_exponent(most);
      scale = __uint_as_float(exponent << 23);
      if (lane == 0) store_scale(const_cast<u8*>(parts.scales) + block * sizeof(Scale), Scale{}, exponent);
    }
#pragma unroll
    for (int i = 0; i < of_lane; ++i)
      if (first + i * 32 < Format::quantised)
        const_cast<u8*>(parts.quantised)[first + i * 32] = ptx::narrow<E4m3>(values[i] / scale).bits;
  }
};

}  // namespace flashpage
