// All of prefill_sm90 on the host: loading and computing warps as fibers, wgmma by the layouts of the PTX manual. For
// tests/kernels/test_prefill_kernel.py, which sets QUERY, CACHE, PRODUCT, OUT, TILE_Q, TILE_KV, STAGES, HEAD_DIM_QK,
// HEAD_DIM_VO, LOADER, MASK_SOURCE and POSITION_ENCODING, and, if there is a variant, VARIANT: the name of the file
// with the rendered variant.
#include "flashpage/kernels/prefill_sm90/kernel.h"
#include "hopper.h"

using namespace flashpage;

namespace {

#ifdef VARIANT
#include VARIANT
#else
struct Variant {
  static constexpr bool has_logit = false, has_mask = false;
  static constexpr bool logit_loads_by_token = false, ends_in_soft_cap = false;
};
#endif

constexpr int element_bytes = sizeof(PRODUCT), steps = 32 / element_bytes;  // steps: terms of a sum in one product

float number(u32 bits) {
  if constexpr (is_same<PRODUCT, E4m3>) {
    return hopper::of_e4m3(bits);
  } else {
    return is_same<PRODUCT, Half> ? hopper::of_half(bits) : hopper::of_bf16(bits);
  }
}
float element(u32 address) {
  return number(element_bytes == 1 ? hopper::swizzled(address)
                                   : hopper::swizzled(address) | hopper::swizzled(address + 1) << 8);
}

// The factors of a row, or of a column, in one product.
using Factors = std::array<float, steps>;

// Adds a product to the sums of a lane: two rows, 8 apart, of its warp's 16, in the lane's columns. factors_of(column)
// returns the column's factors.
template <int tiles, class FactorsOf>
void add(float (&c)[tiles][4], bool accumulate, const Factors (&rows)[2], FactorsOf&& factors_of) {
  for (int i = 0; i < tiles * 2; ++i) {
    const Factors column = factors_of(i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2);
    for (int row = 0; row < 2; ++row) {
      float sum = 0.f;
      for (int k = 0; k < steps; ++k) sum += rows[row][k] * column[k];
      float& total = c[i / 2][row * 2 + i % 2];
      total = (accumulate ? total : 0.f) + sum;
    }
  }
}

// The factors of a row of keys or queries, whose columns are consecutive.
Factors factors_at(u32 address) {
  Factors factors;
  for (int k = 0; k < steps; ++k) factors[k] = element(address + k * element_bytes);
  return factors;
}

struct KeyProduct {
  static constexpr int columns = TILE_KV;
  template <int tiles>
  static void multiply(float (&c)[tiles][4], u64 a, u64 b, bool accumulate) {
    const u32 first_row = static_cast<u32>(a) + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * 128;
    const u32 keys = static_cast<u32>(b);
    hopper::multiply_later([=, &c] {
      const Factors rows[2] = {factors_at(first_row), factors_at(first_row + 8 * 128)};
      add(c, accumulate, rows, [&](int column) { return factors_at(keys + column * 128); });
    });
  }
};

struct ShortKeyProduct : KeyProduct {
  static constexpr int columns = SHORT_TOKENS;
};

struct ValueProduct {
  template <int tiles>
  static void multiply(float (&c)[tiles][4], const u32 (&a)[4], u64 b, bool accumulate) {
    const u32 values = static_cast<u32>(b), next_panel = static_cast<u32>(b >> 32);
    hopper::multiply_later([=, &c, &a] {
      std::array<u32, 32> of_lanes[4];
      for (int i = 0; i < 4; ++i) of_lanes[i] = hopper::of_lanes(a[i]);
      Factors rows[2];
      for (int k = 0; k < steps; ++k) {
        constexpr int together = steps / 8;  // terms of the sum in a register
        const int lane = threadIdx.x % 32 / 4 * 4 + k % (steps / 2) / together;
        for (int row = 0; row < 2; ++row) {
          const u32 bits = of_lanes[k / (steps / 2) * 2 + row][lane] >> k % together * 8 * element_bytes;
          rows[row][k] = number(bits & (element_bytes == 1 ? 0xff : 0xffff));
        }
      }
      add(c, accumulate, rows, [&](int column) {
        if (element_bytes == 1) return factors_at(values + column * 128);
        Factors factors;
        for (int k = 0; k < steps; ++k)
          factors[k] = element(values + column / 64 * next_panel + k * 128 + column % 64 * 2);
        return factors;
      });
    });
  }
};

template <KvSource source>
struct Traits {
  using StoredQuery = QUERY;
  using Query = PRODUCT;
  using StoredCache = CACHE;
  using Cache = PRODUCT;
  using Out = OUT;
  using Variant = ::Variant;
  using KeyProduct = ::KeyProduct;
  using ShortKeyProduct = ::ShortKeyProduct;
  using ValueProduct = ::ValueProduct;
  static constexpr int head_dim_qk = HEAD_DIM_QK, head_dim_vo = HEAD_DIM_VO;
  static constexpr KvSource kv_source = source;
  static constexpr Loader loader = Loader::LOADER;
  static constexpr MaskSource mask_source = MaskSource::MASK_SOURCE;
  static constexpr PositionEncoding position_encoding = PositionEncoding::POSITION_ENCODING;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
  static constexpr int tile_q = TILE_Q, tile_kv = TILE_KV, warps_q = TILE_Q / 16, warps_kv = 1, warps_v = 1;
  static constexpr int stages = STAGES, ctas = 1, ctas_per_sm = TILE_Q == 64 ? 2 : 1;
  static constexpr bool trace = false;
};

template <KvSource source>
void run(const AttentionParams& params, const VariantArgs& args, const KvMaps& maps,
         const MaskTilesParams& mask_tiles) {
  using Kernel = PrefillSm90<Traits<source>>;
  card::launch(1, Kernel::threads, [&] { Kernel::run(params, args, maps, mask_tiles); });
}

}  // namespace

// Runs one CTA. Returns the number of barriers at which arrivals or bytes are missing.
extern "C" i32 run_prefill(const AttentionParams* params, const VariantArgs* args, const hopper::Map* of_maps,
                           const MaskTilesParams* mask_tiles) {
  const KvMaps maps{};
  hopper::maps = {{&maps.k, of_maps[0]}, {&maps.v, of_maps[1]}, {&maps.q, of_maps[2]}, {&maps.out, of_maps[3]}};
  hopper::stores.clear();
  hopper::barriers.clear();
  hopper::meetings.fill({});
  hopper::products.clear();
  card::meanwhile = hopper::land_some;
  std::memset(memory, 0x7f, sizeof memory);  // NaN
  run<KvSource::KV_SOURCE>(*params, *args, maps, *mask_tiles);
  return static_cast<i32>(std::count_if(hopper::barriers.begin(), hopper::barriers.end(),
                                        [](const auto& at) { return at.second.arrived > 0 || at.second.bytes != 0; }));
}
