// All of a kernel over latent rows on the host: loading and computing warps as fibers, wgmma by the layouts of the PTX
// manual. For tests/support/latent_on_host.py, which sets HEADER, KERNEL, CACHE, OUT, TILE_Q, TILE_KV,
// WARPS_Q, WARPS_KV, WARPS_V, STAGES, CTAS, CTAS_OF_CLUSTER, HEAD_DIM_QK, HEAD_DIM_VO, VALUE_COLUMNS, KV_SOURCE,
// LATENT_FORMAT and LOADER; IN_E4M3 if K is multiplied as it is stored, and TAIL as the type of
// its tail.
#include HEADER

#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/tensor_copy.h"
#include "hopper.h"

using namespace flashpage;

namespace {

struct Variant {
  static constexpr bool has_logit = false, has_mask = false;
  static constexpr bool logit_loads_by_token = false, ends_in_soft_cap = false;
};

constexpr int row_bytes = 32;  // of the terms of a sum in one product

template <class Element>
float number(u32 bits) {
  if constexpr (is_same<Element, E4m3>) return hopper::of_e4m3(bits);
  return is_same<Element, Half> ? hopper::of_half(bits) : hopper::of_bf16(bits);
}
template <class Element = CACHE>
float element(u32 address) {
  u32 bits = 0;
  for (u32 i = 0; i < sizeof(Element); ++i) bits |= hopper::swizzled(address + i) << 8 * i;
  return number<Element>(bits);
}
// An element of a factor whose rows have the terms side by side.
template <class Element>
float element(u64 factor, int row, int column) {
  const u32 address = static_cast<u32>(factor) + column * sizeof(Element);
  if ((factor & hopper::is_narrow) == 0) return element<Element>(address + row * 128);
  return number<Element>(hopper::swizzled_64(address + row * 64) | hopper::swizzled_64(address + row * 64 + 1) << 8);
}

// c += a b: term(row, k) gives a factor of the lane's warp, and rows of b have the terms side by side.
template <class Element, int tiles, class Term>
void add(float (&c)[tiles][4], u64 b, bool accumulate, Term&& term) {
  const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  for (int n = 0; n < tiles; ++n)
    for (int e = 0; e < 4; ++e) {
      const int row = first + e / 2 * 8, column = n * 8 + threadIdx.x % 4 * 2 + e % 2;
      float sum = 0.f;
      for (int k = 0; k < row_bytes / static_cast<int>(sizeof(Element)); ++k)
        sum += term(row, k) * element<Element>(b, column, k);
      c[n][e] = (accumulate ? c[n][e] : 0.f) + sum;
    }
}

template <class Element>
struct RowProduct {
  template <int tiles>
  static void multiply(float (&c)[tiles][4], u64 a, u64 b, bool accumulate) {
    hopper::multiply_later(
        [=, &c] { add<Element>(c, b, accumulate, [&](int row, int k) { return element<Element>(a, row, k); }); });
  }
};

// A factor in registers: the lane's two rows. Called by all lanes of a warp.
template <class Element>
struct HeldRows {
  static constexpr int steps = row_bytes / sizeof(Element);
  float terms[2][steps];
  explicit HeldRows(const u32 (&a)[4]) {
    std::array<u32, 32> of_lanes[4];
    for (int i = 0; i < 4; ++i) of_lanes[i] = hopper::of_lanes(a[i]);
    for (int k = 0; k < steps; ++k)
      for (int row = 0; row < 2; ++row) {
        const u32 pair = of_lanes[k / 8 * 2 + row][threadIdx.x % 32 / 4 * 4 + k % 8 / 2];
        terms[row][k] = number<Element>(pair >> k % 2 * 16 & 0xffff);
      }
  }
};

template <class Element>
struct HeldProduct {
  template <int tiles>
  static void multiply(float (&c)[tiles][4], const u32 (&a)[4], u64 b, bool accumulate) {
    hopper::multiply_later([=, &c, &a] {
      const HeldRows<Element> held(a);
      add<Element>(c, b, accumulate, [&](int row, int k) { return held.terms[row / 8 % 2][k]; });
    });
  }
};

struct ValueProduct {
  static constexpr int columns = VALUE_COLUMNS;
  // Rows of a in shared memory are the terms: 64 columns of V, token by token.
  template <int tiles>
  static void multiply(float (&c)[tiles][4], u64 a, u64 b, bool accumulate) {
    const u32 values = static_cast<u32>(a), rows = static_cast<u32>(b);
    hopper::multiply_later([=, &c] {
      add<CACHE>(c, rows, accumulate, [&](int row, int k) { return element(values + k * 128 + row * 2); });
    });
  }
  // a is in registers, and rows of b in shared memory are the terms: columns of V, token by token.
  template <int tiles>
  static void multiply(float (&c)[tiles][4], const u32 (&a)[4], u64 b, bool accumulate) {
    const u32 values = static_cast<u32>(b), next_panel = static_cast<u32>(b >> 32);
    hopper::multiply_later([=, &c, &a] {
      const HeldRows<CACHE> held(a);
      for (int i = 0; i < tiles * 2; ++i) {
        const int column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        float sums[2] = {};
        for (int k = 0; k < held.steps; ++k) {
          const float value = element(values + column / 64 * next_panel + k * 128 + column % 64 * 2);
          for (int row = 0; row < 2; ++row) sums[row] += held.terms[row][k] * value;
        }
        for (int row = 0; row < 2; ++row) {
          float& total = c[i / 2][row * 2 + i % 2];
          total = (accumulate ? total : 0.f) + sums[row];
        }
      }
    });
  }
};

struct Traits {
  using StoredQuery = CACHE;
  using Query = CACHE;
  using StoredCache = CACHE;
  using Cache = CACHE;
  using Out = OUT;
  using Variant = ::Variant;
#ifdef IN_E4M3
  using KeyProduct = RowProduct<E4m3>;
  using TailProduct = RowProduct<TAIL>;
  using ValueProduct = HeldProduct<Half>;
#else
  using KeyProduct = RowProduct<CACHE>;
  using HeldKeyProduct = HeldProduct<CACHE>;
  using ValueProduct = ::ValueProduct;
#endif
  static constexpr int head_dim_qk = HEAD_DIM_QK, head_dim_vo = HEAD_DIM_VO;
  static constexpr LatentFormat latent_format = LatentFormat::LATENT_FORMAT;
  static constexpr KvSource kv_source = KvSource::KV_SOURCE;
  static constexpr Loader loader = Loader::LOADER;
  static constexpr MaskSource mask_source = MaskSource::implicit;
  static constexpr PositionEncoding position_encoding = PositionEncoding::none;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
  static constexpr int tile_q = TILE_Q, tile_kv = TILE_KV;
  static constexpr int warps_q = WARPS_Q, warps_kv = WARPS_KV, warps_v = WARPS_V;
  static constexpr int stages = STAGES, ctas = CTAS, ctas_per_sm = 1, shared_limit = 0, ring_bytes = 0;
  static constexpr bool trace = false;
};

}  // namespace

// Runs the plan's CTAs, or its pairs of CTAs, one after another. Returns the number of barriers at which arrivals or
// bytes are missing.
extern "C" i32 run_latent(const AttentionParams* params, const VariantArgs* args, const hopper::Map* of_maps,
                          i32 num_ctas) {
  const KvMaps maps{};
  hopper::maps = {{&maps.k, of_maps[0]}, {&maps.v, of_maps[1]}, {&maps.q, of_maps[2]}};
  hopper::stores.clear();
  hopper::barriers.clear();
  hopper::meetings.fill({});
  hopper::products.clear();
  card::meanwhile = hopper::land_some;
  std::memset(memory, 0x7f, sizeof memory);  // NaN
  using Kernel = KERNEL<Traits>;
  static_assert(Kernel::shared_bytes <= sizeof memory / 2);
  card::launch(num_ctas * CTAS, Kernel::threads, [&] { Kernel::run(*params, *args, maps); }, CTAS_OF_CLUSTER);
  return static_cast<i32>(std::count_if(hopper::barriers.begin(), hopper::barriers.end(),
                                        [](const auto& at) { return at.second.arrived > 0 || at.second.bytes != 0; }));
}
