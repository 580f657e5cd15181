// The two halves of a slot of tokens, which come from two views of the cache and follow each other in shared memory.
#pragma once
#include "flashpage/tile/layout/narrow_rows.h"
#include "flashpage/tile/layout/stored_formats.h"

namespace flashpage {

// K and V; of latent rows, the columns that K and V share, and the other columns of K. As panels of both follow each
// other, a latent slot is a tile of K's rows, whose first panels are V.
template <class Traits, int tokens>
struct SlotHalves {
  static constexpr bool is_latent = flashpage::is_latent<Traits::kv_source>;
  using Formats = StoredFormats<Traits>;
  static constexpr int first_columns = is_latent ? Traits::head_dim_vo : Formats::key_columns;
  static constexpr int second_columns = is_latent ? Traits::head_dim_qk - Traits::head_dim_vo : Formats::value_columns;
  using First = LineRows<Traits::layout, typename Traits::Cache, first_columns, tokens>;
  using Second = LineRows<Traits::layout, typename Traits::Cache, second_columns, tokens>;
};

}  // namespace flashpage
