// widen_pages: copies pages of K and V in fp8 or in formats with scales (formats/format.h) to consecutive pages of
// 16-bit elements, for an attention kernel that loads boxes, and numbers these pages. A thread widens eight
// neighbouring columns of a few rows, whose loads are in flight together.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/st_global.h"
#include "flashpage/tile/load/format_rows.h"

namespace flashpage {

template <class Traits>
struct WidenPages {
  using To = typename Traits::StoredQuery;
  static constexpr int threads = 256;
  static constexpr int shared_bytes = 0, ctas_per_sm = 4, cluster_rows = 0;

  FP_DEVICE static void run(const WidenPagesParams& p) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const u32 first = blockIdx.x * threads + threadIdx.x, all = gridDim.x * threads;
    for (u32 i = first; i < static_cast<u32>(p.count); i += all) p.numbers[p.first + i] = p.first + i;
    Side<KeyFormatOf<Traits>, Traits::head_dim_qk>::widen(p, p.k, p.key_scales, p.k_pages, first, all);
    Side<ValueFormatOf<Traits>, Traits::head_dim_vo>::widen(p, p.v, p.value_scales, p.v_pages, first, all);
  }

 private:
  template <class Format, int columns>
  struct Side {
    using Scale = typename Format::Scale;
    static constexpr bool has_row_scale = Format::scale_columns == whole_row, has_scales = Format::scale_columns > 0;
    static constexpr int eights = columns / 8;  // of a row
    static constexpr int at_once = 4;           // whose loads a thread has in flight
    static_assert(columns % 8 == 0 && (Format::scale_columns % 8 == 0));

    // Eight columns of a row as they are stored, and where they go.
    struct Eight {
      u32 words[Format::bits / 4];
      Scale scale;
      i64 to;  // in units of eight elements
      bool exists;

      FP_DEVICE void load(const WidenPagesParams& p, const KvView& view, const KvView& scales, u32 i, bool is_wanted) {
        const u32 eight = i % eights;
        u32 token_of_all, head, entry, token;
        p.heads.divmod(i / eights, token_of_all, head);
        p.page.divmod(token_of_all, entry, token);
        const i32 page = is_wanted ? __ldg(p.kv_indices + p.first + entry) : -1;
        exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);  // not so for entries that no request uses
        to = static_cast<i64>(p.first) * p.page.divisor * p.heads.divisor * eights + i;
        const auto row_of = [&](const KvView& given) {
          return static_cast<const u8*>(given.data) + page * given.page_stride + token * given.token_stride +
                 head * given.head_stride;
        };
        const u32* from = reinterpret_cast<const u32*>(row_of(view) + eight * Format::bits);
#pragma unroll
        for (int w = 0; w < Format::bits / 4; ++w) words[w] = exists ? __ldg(from + w) : 0;
        if constexpr (has_scales) {
          const int at = has_row_scale ? 0 : static_cast<int>(eight) * 8 / Format::scale_columns * int(sizeof(Scale));
          scale = exists ? *reinterpret_cast<const Scale*>(row_of(scales) + at) : Scale{};
        }
      }
      FP_DEVICE void store(u8* pages) const {
        u32 pairs[4];
        widen_eight_of<Format, To>(pairs, words, scale);
        if constexpr (Format::left_out != 1.f) {
          const u32 left_out = ptx::pack2<To>(Format::left_out, Format::left_out);
#pragma unroll
          for (u32& pair : pairs)
            pair = is_same<To, Half> ? ptx::mul_half2(pair, left_out) : ptx::mul_bf162(pair, left_out);
        }
        if constexpr (has_row_scale) {
#pragma unroll
          for (u32& pair : pairs) {
            const float2 two = ptx::unpack2<To>(pair);
            pair = ptx::pack2<To>(two.x * Format::factor(scale), two.y * Format::factor(scale));
          }
        }
        ptx::store_global(pages + 16 * to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), exists);
      }
    };

    FP_DEVICE static void widen(const WidenPagesParams& p, const KvView& view, const KvView& scales, void* pages,
                                u32 first, u32 all) {
      const u32 count = p.heads.divisor * p.page.divisor * p.count * eights;  // plans have room for less than 2^31
      for (u32 i = first; i < count; i += at_once * all) {
        Eight found[at_once];
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          const u32 at = i + n * all;
          found[n].load(p, view, scales, at < count ? at : 0, at < count);
        }
#pragma unroll
        for (const Eight& one : found) one.store(static_cast<u8*>(pages));
      }
    }
  };
};

}  // namespace flashpage
