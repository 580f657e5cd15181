// Rows from global to shared memory by cp.async, cut into the largest chunks that rows divide into.
#pragma once
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/shared_rows.h"

namespace flashpage {

// 16 bytes a copy; fp8 rows of an odd multiple of 8 elements take 8.
template <class Element, int columns>
inline constexpr int copy_bytes = (columns * sizeof(Element)) % 16 ? 8 : 16;

// The part that one thread of `threads` copies of a tile: the same column chunk of every `rows_a_pass`-th row, so that
// the column arithmetic is done once.
template <class Element, int columns, int threads, int chunk_bytes = copy_bytes<Element, columns>>
struct RowCopy {
  using Rows = SharedRows<Element, columns>;
  static constexpr int chunks = Rows::used_bytes / chunk_bytes;
  static_assert(Rows::used_bytes % chunk_bytes == 0);

  // source(row) gives the row's first element; rows from `count` on do not exist and become zero. source is called by
  // every thread at every step with a row below num_rows, so it may be warp-wide.
  template <int num_rows, class Source>
  FP_DEVICE static void run(u32 destination, int thread, int count, Source&& source) {
    run_part<num_rows, 1>(destination, thread, count, 0, source);
  }

  // One of `parts` of the same, to be spread over other work.
  template <int num_rows, int parts, class Source>
  FP_DEVICE static void run_part(u32 destination, int thread, int count, int part, Source&& source) {
    constexpr int passes = ceil_div(num_rows * chunks, threads);
    constexpr int most = ceil_div(passes, parts);
    constexpr int batch = fixed_chunk ? min_of(most, 8) : 1;  // more costs the registers of the accumulators
    int begin = passes * part / parts, end = passes * (part + 1) / parts;
    constexpr int unroll = fixed_chunk ? most : 2;
#pragma unroll unroll
    for (int first = 0; first < most; first += batch)
      run_batch<num_rows, batch>(destination, thread, count, begin + first, end, source);
  }

 private:
  static constexpr bool fixed_chunk = threads % chunks == 0;

  // Sources first, then the copies: ptxas puts three idle shared loads before a cp.async that follows another shared
  // access.
  template <int num_rows, int batch, class Source>
  FP_DEVICE static void run_batch(u32 destination, int thread, int count, int begin, int end, Source&& source) {
    constexpr bool whole = (num_rows * chunks) % threads == 0;
    const u8* from[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      u32 row = row_of(begin + n, thread);
      from[n] = reinterpret_cast<const u8*>(source(whole ? row : min_of<u32>(row, num_rows - 1)));
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      u32 row = row_of(begin + n, thread);
      u32 byte = (fixed_chunk ? thread % chunks : ((begin + n) * threads + thread) % chunks) * chunk_bytes;
      if (begin + n >= end || (!whole && row >= num_rows)) continue;
      ptx::cp_async<chunk_bytes>(destination + Rows::byte_offset(row, byte), from[n] + byte,
                                 static_cast<int>(row) < count);
    }
  }

  FP_DEVICE static u32 row_of(int pass, int thread) {
    return fixed_chunk ? pass * (threads / chunks) + thread / chunks : (pass * threads + thread) / chunks;
  }
};

// The columns between a row's end and its padding to whole k16 steps take part in Q K^T: they must be zero.
template <class Element, int columns, class Rows = SharedRows<Element, columns>>
FP_DEVICE void zero_padding(u8* tile, int num_rows, int thread, int threads) {
  constexpr int words = (Rows::padded_bytes - Rows::used_bytes) / 8;
  if constexpr (words > 0) {
    for (int i = thread; i < num_rows * words; i += threads) {
      u32 offset = Rows::byte_offset(i / words, Rows::used_bytes + (i % words) * 8);
      *reinterpret_cast<u64*>(tile + offset) = 0;
    }
  }
}

}  // namespace flashpage
