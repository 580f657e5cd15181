// Appends of rows that are quantised to the formats of K and V (formats/format.h) as they are written. A lane has
// sixteen columns of a row, and neighbouring lanes have the others; a warp has the rows of some tokens and heads, first
// of K and then of V.
#pragma once
#include "flashpage/formats/format.h"
#include "flashpage/params/latent_format.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/ld_global.h"
#include "flashpage/ptx/quantise.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/trap.h"

namespace flashpage {

// The lane's part of one row: elements as floats, then their range, then their bits.
template <class Given, class Format, int columns>
struct QuantisedColumns {
  static constexpr int count = 16, lanes = power_of_two_from(ceil_div(columns, count));
  static_assert(columns % 8 == 0 && lanes <= 32);

  static constexpr int vectors = count * int(sizeof(Given)) / 16, per_vector = 16 / int(sizeof(Given));
  u32 given[vectors][4];  // as it was loaded
  float elements[count];

  // Issues the loads. Columns that the row does not have are zero.
  FP_DEVICE void load(const Given* row, int lane, bool exists) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) ptx::load_once(given[i], row + column_of(lane, i), has(lane, i, exists));
  }
  // As above, for rows that start anywhere.
  FP_DEVICE void load_apart(const Given* row, int lane, bool exists) {
#pragma unroll
    for (int i = 0; i < vectors; ++i)
#pragma unroll
      for (int n = 0; n < per_vector; ++n) {
        const u32 bits = has(lane, i, exists) ? bits_of_given(row[column_of(lane, i) + n]) : 0;
        u32& word = given[i][n * sizeof(Given) / 4];
        word = n * sizeof(Given) % 4 ? word | bits << 16 : bits;
      }
  }
  FP_DEVICE void unpack() {
#pragma unroll
    for (int i = 0; i < 4 * vectors; ++i) {
      const u32 word = given[i / 4][i % 4];
      if constexpr (sizeof(Given) == 4) {
        elements[i] = __uint_as_float(word);
      } else {
        const float2 two = ptx::unpack2<Given>(word);
        elements[2 * i] = two.x, elements[2 * i + 1] = two.y;
      }
    }
  }
  FP_DEVICE void multiply(float factor) {
#pragma unroll
    for (float& element : elements) element *= factor;
  }

  // Multiplies the row by a Hadamard matrix over the root of its size; all lanes of the row take part.
  FP_DEVICE void rotate(int lane) {
#pragma unroll
    for (int apart = 1; apart < min_of(count, columns); apart *= 2)
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (i & apart) continue;
        const float first = elements[i], second = elements[i + apart];
        elements[i] = first + second;
        elements[i + apart] = first - second;
      }
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2)
#pragma unroll
      for (float& element : elements) {
        const float other = __shfl_xor_sync(0xffffffff, element, apart);
        element = lane & apart ? other - element : element + other;
      }
    multiply(1.f / sqrtf(static_cast<float>(columns)));
  }

  // The scale of the lane's columns: of a group or, by all lanes of the row, of the whole row.
  FP_DEVICE typename Format::Scale find_scale() const {
    float least = 0.f, most = 0.f, widest = 0.f;  // fminf and fmaxf leave NaN out
#pragma unroll
    for (const float element : elements) {
      if constexpr (Format::has_zero) least = fminf(least, element), most = fmaxf(most, element);
      widest = larger_magnitude(widest, element);
    }
    constexpr int sharing = Format::scale_columns == count ? 1 : lanes;
    static_assert(Format::scale_columns == count || Format::scale_columns >= columns,
                  "a scale belongs to 16 columns (one lane) or to the whole row");
#pragma unroll
    for (int apart = 1; apart < sharing; apart *= 2) {
      const auto of_other = [&](float mine) { return __shfl_xor_sync(0xffffffff, mine, apart); };
      if constexpr (Format::has_zero) least = fminf(least, of_other(least)), most = fmaxf(most, of_other(most));
      widest = larger_magnitude(widest, of_other(widest));
    }
    if (!Format::has_zero || widest != widest) most = widest;
    return Format::scale_for(least, most);
  }

  // Writes the lane's numbers to a row that starts on eight bytes if `is_aligned`.
  FP_DEVICE void store(u8* row, int lane, typename Format::Scale scale, bool is_aligned) const {
    constexpr int words = Format::bits / 4;  // of eight numbers
    u32 packed[2 * words];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pack(reinterpret_cast<u32(&)[words]>(packed[i * words]), reinterpret_cast<const float (&)[8]>(elements[8 * i]),
           scale);
    const int there = min_of(count, columns - lane * count) * Format::bits / 8;  // bytes
    u8* to = row + row_bytes<Format>(lane * count);
    if (is_aligned) {
#pragma unroll
      for (int n = 0; n < words; ++n)
        if (columns % count == 0 || n * 8 < there)
          reinterpret_cast<uint2*>(to)[n] = make_uint2(packed[2 * n], packed[2 * n + 1]);
    } else {
#pragma unroll
      for (int n = 0; n < 8 * words; ++n)
        if (n < there) to[n] = static_cast<u8>(packed[n / 4] >> n % 4 * 8);
    }
  }

 private:
  FP_DEVICE static int column_of(int lane, int vector) { return lane * count + vector * per_vector; }
  FP_DEVICE static bool has(int lane, int vector, bool exists) {
    return exists && (columns % count == 0 ? lane * count < columns : column_of(lane, vector) < columns);
  }
  FP_DEVICE static u32 bits_of_given(Given element) {
    if constexpr (sizeof(Given) == 4) {
      return __float_as_uint(element);
    } else {
      return element.bits;
    }
  }
  // By the format's own function if it has one.
  template <int words>
  FP_DEVICE static void pack(u32 (&packed)[words], const float (&eight)[8], typename Format::Scale scale) {
    if constexpr (requires { Format::pack(packed, eight, scale); }) {
      Format::pack(packed, eight, scale);
    } else {
#pragma unroll
      for (u32& word : packed) word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        packed[i * Format::bits / 32] |= Format::stored(eight[i], scale) << i * Format::bits % 32;
    }
  }
};

template <class Traits>
struct AppendQuantised {
  using Given = typename Traits::StoredQuery;
  using Keys = QuantisedColumns<Given, KeyFormatOf<Traits>, Traits::head_dim_qk>;
  using Values = QuantisedColumns<Given, ValueFormatOf<Traits>, Traits::head_dim_vo>;
  static constexpr int warps = 8;
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 4, cluster_rows = 0;
  static constexpr int row_lanes = max_of(Keys::lanes, Values::lanes), warp_rows = 32 / row_lanes;

  FP_DEVICE static void run(const AppendQuantisedParams& params) {
    ptx::grid_dependency_wait();
    if (params.stops_at_bad_scales && !(is_scale(params.k_scale) && is_scale(params.v_scale))) ptx::trap();
    const float key_factor = factor_of(params.key_divisor, params.k_scale);
    const float value_factor = factor_of(params.value_divisor, params.v_scale);
    const bool is_aligned = reads_vectors(params);
    const u32 rows = static_cast<u32>(params.nnz) * params.num_kv_heads;
    for (u32 first = (blockIdx.x * warps + threadIdx.x / 32) * warp_rows; first < rows;
         first += gridDim.x * warps * warp_rows) {
      const u32 row = first + threadIdx.x % 32 / row_lanes;
      const bool exists = row < rows;
      const i32 token = static_cast<i32>(min_of(row, rows - 1) / params.num_kv_heads);
      const i32 head = static_cast<i32>(min_of(row, rows - 1) % params.num_kv_heads);
      const int lane = static_cast<int>(threadIdx.x) % row_lanes;
      Keys keys;
      Values values;
      const auto load = [&](auto& side, const void* given, i64 row_stride, i64 head_stride) {
        const Given* from = static_cast<const Given*>(given) + token * row_stride + head * head_stride;
        const bool is_mine = exists && lane < side.lanes;
        is_aligned ? side.load(from, lane, is_mine) : side.load_apart(from, lane, is_mine);
      };
      load(keys, params.append_key, params.key_row_stride, params.key_head_stride);
      load(values, params.append_value, params.value_row_stride, params.value_head_stride);
      const CacheSlot slot = find(params, token, exists);
      keys.unpack();
      if (params.rotates_keys) keys.rotate(lane);
      write(keys, key_factor, params.k, params.key_scales, slot, head, lane);
      values.unpack();
      write(values, value_factor, params.v, params.value_scales, slot, head, lane);
    }
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static bool is_scale(const float* scale) { return !scale || (*scale > 0.f && *scale <= 0x1.fffffep127f); }
  FP_DEVICE static float factor_of(float divisor, const float* scale) {
    return 1.f / (scale ? divisor * *scale : divisor);
  }
  // Whether every given row starts on 16 bytes.
  FP_DEVICE static bool reads_vectors(const AppendQuantisedParams& p) {
    const u64 strides = p.key_row_stride | p.key_head_stride | p.value_row_stride | p.value_head_stride;
    const u64 places = reinterpret_cast<u64>(p.append_key) | reinterpret_cast<u64>(p.append_value);
    return ((strides * sizeof(Given) | places) & 15) == 0;
  }

  // The token's place in the cache; page -1 if it has none.
  FP_DEVICE static CacheSlot find(const AppendQuantisedParams& p, i32 token, bool exists) {
    const i32 position = p.positions[token];
    const i32 request = p.batch_indices ? p.batch_indices[token] : 0;
    if (!exists || position < 0 || request < 0 || (!p.batch_indices && position >= p.num_slots)) return {-1, 0};
    u32 page, in_page;
    p.page.divmod(position, page, in_page);
    if (!p.batch_indices) return {page, in_page};
    return {p.kv_indices[p.kv_indptr[request] + static_cast<i32>(page)], in_page};
  }

  template <class Format, int columns>
  FP_DEVICE static void write(QuantisedColumns<Given, Format, columns>& row, float factor, const KvView& view,
                              const KvView& scales, const CacheSlot& slot, i32 head, int lane) {
    if (factor != 1.f) row.multiply(factor);
    const typename Format::Scale scale = find_scale(row);
    if (slot.page < 0 || lane * row.count >= columns) return;
    const auto place = [&](const KvView& of) {
      return static_cast<u8*>(const_cast<void*>(of.data)) + slot.page * of.page_stride +
             slot.in_page * of.token_stride + head * of.head_stride;
    };
    u8* to = place(view);
    row.store(to, lane, scale, (reinterpret_cast<u64>(to) & 7) == 0);
    if constexpr (!is_plain_format<Format>) {
      auto* of_row = reinterpret_cast<typename Format::Scale*>(place(scales));
      if (Format::scale_columns == row.count || lane == 0)
        of_row[Format::scale_columns == row.count ? lane : 0] = scale;
    }
  }
  template <class Format, int columns>
  FP_DEVICE static typename Format::Scale find_scale(const QuantisedColumns<Given, Format, columns>& row) {
    if constexpr (is_plain_format<Format>) {
      return {};
    } else {
      return row.find_scale();
    }
  }
};

}  // namespace flashpage
