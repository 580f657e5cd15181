// Copies rows from global to shared memory by cp.async, in the largest chunks that divide a row.
#pragma once
#include "flashpage/ptx/cp_async.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/shared_rows.h"

namespace flashpage {

// Bytes of one copy: 16, or 8 for fp8 rows of an odd multiple of 8 elements.
template <class Element, int columns>
inline constexpr int copy_bytes = (columns * sizeof(Element)) % 16 ? 8 : 16;

// The share of one of `threads` threads in copying a tile. The chunks of a row are copied in bands, whose `width`
// divides the threads: a thread has one chunk of each band, in every `threads / width`-th row, so that the column
// arithmetic is done once. A row is one band if its chunks divide the threads; the 24 chunks of 192 columns are three
// bands. If bands would be narrow, the chunks of all rows are counted through.
template <class Element, int columns, int threads, int chunk_bytes = copy_bytes<Element, columns>>
struct RowCopy {
  using Rows = SharedRows<Element, columns>;
  static constexpr int chunks = Rows::used_bytes / chunk_bytes;
  static constexpr int divisor = greatest_common_divisor(chunks, threads);
  static constexpr int width = divisor >= 8 ? divisor : chunks;  // chunks of a band
  static constexpr int bands = chunks / width;
  static_assert(Rows::used_bytes % chunk_bytes == 0);

  // source(row) returns the row's first element. Rows from `count` on do not exist and become zero. Every thread calls
  // source at every step, with a row below num_rows, so it may contain warp-wide operations.
  template <int num_rows, class Source>
  FP_DEVICE static void run(u32 destination, int thread, int count, Source&& source) {
    run_part<num_rows, 1>(destination, thread, count, 0, source);
  }

  // As `run`, but only one of `parts` equal parts, so that the copies can be spread over other work.
  template <int num_rows, int parts, class Source>
  FP_DEVICE static void run_part(u32 destination, int thread, int count, int part, Source&& source) {
    constexpr int passes =
        fixed_chunk ? ceil_div(num_rows, threads / width) * bands : ceil_div(num_rows * chunks, threads);
    constexpr int most = ceil_div(passes, parts);
    constexpr int batch = fixed_chunk ? min_of(most, 8) : 1;  // more copies would take registers of the accumulators
    int begin = passes * part / parts, end = passes * (part + 1) / parts;
    constexpr int unroll = fixed_chunk ? most : 2;
#pragma unroll unroll
    for (int first = 0; first < most; first += batch)
      run_batch<num_rows, batch>(destination, thread, count, begin + first, end, source);
  }

 private:
  static constexpr bool fixed_chunk = threads % width == 0;

  // Reads all sources before it issues the copies: ptxas places three idle shared loads before a cp.async that follows
  // another shared access.
  template <int num_rows, int batch, class Source>
  FP_DEVICE static void run_batch(u32 destination, int thread, int count, int begin, int end, Source&& source) {
    constexpr bool whole = fixed_chunk ? num_rows % (threads / width) == 0 : (num_rows * chunks) % threads == 0;
    const u8* from[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      if (begin + n >= end) continue;
      u32 row = row_of(begin + n, thread);
      from[n] = reinterpret_cast<const u8*>(source(whole ? row : min_of<u32>(row, num_rows - 1)));
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      u32 row = row_of(begin + n, thread);
      u32 byte = chunk_of(begin + n, thread) * chunk_bytes;
      if (begin + n >= end || (!whole && row >= num_rows)) continue;
      ptx::cp_async<chunk_bytes>(destination + Rows::byte_offset(row, byte), from[n] + byte,
                                 static_cast<int>(row) < count);
    }
  }

  FP_DEVICE static u32 row_of(int pass, int thread) {
    return fixed_chunk ? pass / bands * (threads / width) + thread / width : (pass * threads + thread) / chunks;
  }
  FP_DEVICE static u32 chunk_of(int pass, int thread) {
    return fixed_chunk ? pass % bands * width + thread % width : (pass * threads + thread) % chunks;
  }
};

// Copies 16 bytes of an address on 16 or 8 bytes. A policy of cache_policy.h may follow.
FP_DEVICE void copy_on_eight(u32 to, const void* from, bool exists, auto... policy) {
  if (reinterpret_cast<u64>(from) % 16 == 0) {
    ptx::cp_async<16>(to, from, exists, policy...);
  } else {
    ptx::cp_async<8>(to, from, exists, policy...);
    ptx::cp_async<8>(to + 8, static_cast<const u8*>(from) + 8, exists, policy...);
  }
}

// Writes zeros to the columns between a row's end and its padding to whole k16 steps, because they take part in Q K^T.
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
