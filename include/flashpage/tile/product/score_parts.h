// Scores of neighbouring warps that have the same rows and tokens: each multiplies a part of the columns of Q and K,
// and all of them get the sums of all parts.
#pragma once
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/product/scores.h"

namespace flashpage {

// A group of `warps_v` warps has the same rows; the warp of part p multiplies steps p, p + parts, ... of the columns.
// Its products are terms of all scores. They are added as follows: each warp owns an equal share of the score fragments
// (m16 x n8), gets the other warps' terms of these through shared memory, adds them, and writes the sums for the
// others.
template <class Traits>
struct ScoreParts {
  using S = Shape<Traits>;
  static constexpr int parts = Traits::warps_v, token_tiles = Traits::tile_kv / 8;
  static constexpr int fragments = S::row_tiles * token_tiles, own = fragments / parts;
  // Whether columns and fragments divide among the parts; without, this class is not used.
  static constexpr bool are_even = parts > 1 && S::key_steps % parts == 0 && fragments % parts == 0;

  // [group][warp that wrote them][warp that owns the fragments, without the writer][fragment][lane]. The owner's sums
  // take the place of terms that it has read (first_other).
  alignas(16) float4 terms[Traits::warps_q][parts][max_of(parts - 1, 1)][max_of(own, 1)][32];

  // The products of the warp's part of the columns. `rows`: shared address of the tile's first token; `query`: what
  // query_lane_address returns.
  FP_DEVICE static void multiply(float (&scores)[S::row_tiles][token_tiles][4], u32 rows, u32 query, int part,
                                 int lane) {
    clear_scores(scores);
    const u32 first = S::QueryRows::at_chunk(query, 2 * part);
    multiply_key_tiles<Traits, 0, token_tiles, parts>(
        scores, rows, lane,
        [&](u32(&a)[S::row_tiles][4], int step) { load_query_fragment<Traits>(a, ptx::opaque(first), step * parts); },
        [](int) {}, part);
  }

  // Replaces the warp's terms by the group's sums. Between two calls all warps must meet at a barrier of the CTA,
  // because the last loop reads what the next call's first loop overwrites.
  FP_DEVICE void add(float (&scores)[S::row_tiles][token_tiles][4], int group, int part, int lane) {
    // Loops over parts are unrolled, so that each index of `scores` is a constant: otherwise they would not be
    // registers.
#pragma unroll
    for (int to = 0; to < parts; ++to)
      if (to != part)
        each_fragment(scores, to, [&](float (&score)[4], int i) { write(terms_at(group, part, to, i, lane), score); });
    meet(group);
#pragma unroll
    for (int to = 0; to < parts; ++to) {
      if (to != part) continue;
      each_fragment(scores, to, [&](float (&score)[4], int i) {
#pragma unroll
        for (int other = 1; other < parts; ++other) {
          const float4 term = terms_at(group, (part + other) % parts, part, i, lane);
          score[0] += term.x, score[1] += term.y, score[2] += term.z, score[3] += term.w;
        }
        write(terms_at(group, first_other(part), part, i, lane), score);
      });
    }
    meet(group);
#pragma unroll
    for (int from = 0; from < parts; ++from)
      if (from != part)
        each_fragment(scores, from, [&](float (&score)[4], int i) {
          const float4 sum = terms_at(group, first_other(from), from, i, lane);
          score[0] = sum.x, score[1] = sum.y, score[2] = sum.z, score[3] = sum.w;
        });
  }

 private:
  // The group's warps meet. Barrier 0 is the CTA's.
  FP_DEVICE static void meet(int group) { ptx::named_barrier(1 + group, 32 * parts); }
  // The warp in whose place the owner of `part` writes its sums: `part` alone reads the terms there.
  FP_DEVICE static int first_other(int part) { return part == 0 ? 1 : 0; }
  FP_DEVICE static void write(float4& to, const float (&score)[4]) {
    to = make_float4(score[0], score[1], score[2], score[3]);
  }
  FP_DEVICE float4& terms_at(int group, int from, int to, int i, int lane) {
    return terms[group][from][to - (to > from)][i][lane];
  }
  template <class Visit>
  FP_DEVICE static void each_fragment(float (&scores)[S::row_tiles][token_tiles][4], int part, Visit&& visit) {
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int fragment = part * own + i;
      visit(scores[fragment / token_tiles][fragment % token_tiles], i);
    }
  }
};

}  // namespace flashpage
