// The loaders that fill the rings of prefill_sm90, and the role of each of the four loading warps:
//
//   loader        warp 0        warp 1                 warp 2           warp 3
//   boxes         keys          values                 query, output    plan
//   rows          keys, even    keys, odd              values           values, query, output, plan
//   transposed    keys          values, query, plan    transpose V      transpose V
//   columns       keys          values                 query            plan
//   converted     query, keys and values, a quarter each                and plan
//   rotated       keys          values                 query            plan
//   rotated rows  keys          keys                   values, query    values, plan
//
// In the rotated loaders each warp also rotates a quarter of each tile of K, and of Q. "keys, even": half of each
// tile's rows. Output that leaves by boxes is stored by the warp that loads Q, from the slot that the next Q needs.
#pragma once
#include "flashpage/kernels/prefill_sm90/loaders/boxes.h"
#include "flashpage/kernels/prefill_sm90/loaders/converted.h"
#include "flashpage/kernels/prefill_sm90/loaders/rotated.h"
#include "flashpage/kernels/prefill_sm90/loaders/rows.h"
#include "flashpage/kernels/prefill_sm90/loaders/transposed.h"

namespace flashpage {

template <class Traits, Loader loader, bool rotates>
struct PrefillLoaderOf {
  using type = RotatedLoading<Traits>;
};
template <class Traits>
struct PrefillLoaderOf<Traits, Loader::boxes, false> {
  using type = BoxLoading<Traits>;
};
template <class Traits>
struct PrefillLoaderOf<Traits, Loader::columns, false> {
  using type = BoxLoading<Traits>;
};
template <class Traits>
struct PrefillLoaderOf<Traits, Loader::rows, false> {
  using type = RowLoading<Traits>;
};
template <class Traits>
struct PrefillLoaderOf<Traits, Loader::transposed, false> {
  using type = TransposedLoading<Traits>;
};
template <class Traits>
struct PrefillLoaderOf<Traits, Loader::converted, false> {
  using type = ConvertedLoading<Traits>;
};
template <class Traits>
using PrefillLoader = typename PrefillLoaderOf<Traits, Traits::loader, Shape<Traits>::rotate>::type;

}  // namespace flashpage
