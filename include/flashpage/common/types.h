// Fixed-width integers and storage-only element types. This header includes nothing, because NVRTC has no standard
// headers.
#pragma once

#if defined(__CUDACC__)
#define FP_HOST_DEVICE __host__ __device__ __forceinline__
#define FP_HOT __host__ __device__ __forceinline__
#define FP_DEVICE __device__ __forceinline__
#else
#define FP_HOST_DEVICE inline
#define FP_HOT [[gnu::always_inline]] inline  // FP_HOST_DEVICE leaves inlining to the host compiler
#define FP_DEVICE inline
#endif

namespace flashpage {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// Element types that only hold bits; conversions live in ptx/convert.h (device) and cpu/convert.h (host).
struct Half {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};
struct E4m3 {
  u8 bits;
};
struct E5m2 {
  u8 bits;
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

template <class T>
inline constexpr bool is_fp8 = is_same<T, E4m3> || is_same<T, E5m2>;

template <bool condition, class A, class B>
struct select_type {
  using type = A;
};
template <class A, class B>
struct select_type<false, A, B> {
  using type = B;
};

// latent: pages of rows that all query heads read; K is the whole row, V its first head_dim_vo columns. selected: such
// rows, but each row of q lists the tokens that it reads. two_lists: each row of q has a list for each of two caches.
enum class KvSource { paged, ragged, latent, selected, two_lists };
template <KvSource source>
inline constexpr bool reads_lists = source == KvSource::selected || source == KvSource::two_lists;
template <KvSource source>
inline constexpr bool is_latent = source == KvSource::latent || reads_lists<source>;
// How the cache stores latent rows: params/latent_format.h.
enum class LatentFormat { plain, scaled, deepseek_v32, deepseek_v4 };
// Masks in addition to causal and window, which are run-time values. `function` is a variant's mask; a kernel evaluates
// it for each tile before the attention kernel runs.
enum class MaskSource { implicit, packed_bits, function };
enum class PositionEncoding { none, rope };
// Layout of K and V in shared memory: tile/layout/shared_rows.h, tile/layout/swizzled_rows.h; `pieces` is for K alone:
// tile/layout/piece_rows.h.
enum class RowsLayout { pitched, swizzled, pieces, narrow };
// How K and V come to shared memory. boxes: the copy engine, box by box; rows: threads, row by row; converted: threads
// that convert elements on the way; transposed: the copy engine, then threads that transpose V; columns: the copy
// engine, from a copy of V that an earlier launch transposed; none: the kernel has only one way. For block_write it is
// the layout of the cache: blocks (K in pieces of 16 bytes, V by column) or rows (both by row).
enum class Loader { none, boxes, rows, converted, transposed, columns, blocks };

}  // namespace flashpage
