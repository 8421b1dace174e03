// SPDX-License-Identifier: Apache-2.0
//
// From S and dP to P and dS, vector by vector.
#ifndef JAXFLASH_CSRC_CPU_SOFTMAX_GRADIENT_H_
#define JAXFLASH_CSRC_CPU_SOFTMAX_GRADIENT_H_

#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/dbias_tile.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// The words of a vector that enter the products, still as floats.
struct Weights {
  Floats p;   // P, as dropout keeps it
  Floats ds;  // dS slope
};

// Where scores are scaled products.
template <class M, bool kHidden, bool kTotals>
struct PlainGradient {
  static constexpr bool kSums = kTotals;
  const BackwardHead<M>& head;

  Weights operator()(int64_t row, Floats s, Floats dp, Ints visible,
                     RowSums* sums) const {
    // The product is rounded as it was in lse: where one key holds all the mass, the
    // two must cancel, however large they are.
    Floats p = exp2((s * head.scores.scale - head.lse[row]) * kLog2E);
    Floats ds = p * (dp - head.delta[row] + head.d_lse[row]);
    if constexpr (kHidden) {
      p = bit_and(p, visible);
      ds = bit_and(ds, visible);
      s = bit_and(s, visible);
    }
    if constexpr (kTotals) {
      sums->ds_s = fma(ds, s, sums->ds_s);
      sums->ds += ds;
      sums->p_s = fma(p, s, sums->p_s);
    }
    return {p, ds};
  }

  void add(int64_t row, const RowSums& sums) const { head.totals[row].add_plain(sums); }
};

// Where they are more, or where more is wanted of them.
template <class M>
struct FullGradient {
  static constexpr bool kSums = true;
  const BackwardHead<M>& head;
  const DbiasTile* dbias;

  // term: what is added to the score; kept: what dropout keeps.
  Weights operator()(int64_t row, int64_t key, Floats s, Floats dp, Floats term,
                     Ints visible, Ints kept, RowSums* sums) const {
    const Floats score = head.scores.value(s) + term;
    Floats p = exp2((score - head.lse[row] - head.lse_low[row]) * kLog2E);
    p = bit_and(p, visible);
    Floats p_kept = p;
    if (head.kept.any()) {
      p_kept = bit_and(p, kept) * head.kept.factor();
      dp = bit_and(dp, kept) * head.kept.factor();
    }
    const Floats ds = bit_and(p * (dp - head.delta[row] + head.d_lse[row]), visible);
    if (dbias != nullptr) dbias->add(row, key, ds);
    s = bit_and(s, visible);
    // With a scale that is not finite not even that of 0 is.
    const Floats slope = bit_and(head.scores.slope(s), visible);
    const Floats ds_slope = ds * slope;
    if (head.wants_totals) {
      sums->ds += ds;
      sums->ds_s = fma(ds_slope, s, sums->ds_s);
      sums->p_s = fma(p * slope, s, sums->p_s);
      sums->ds_slope += ds_slope;
      sums->p_slope = fma(p, slope, sums->p_slope);
      if (head.wants_distances) {
        const Floats distance = head.terms.distance(row, key);
        sums->ds_distance = fma(ds, distance, sums->ds_distance);
        sums->p_distance = fma(p, distance, sums->p_distance);
      }
    }
    return {p_kept, ds_slope};
  }

  void add(int64_t row, const RowSums& sums) const {
    if (head.wants_totals) head.totals[row].add(sums);
  }
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_SOFTMAX_GRADIENT_H_
