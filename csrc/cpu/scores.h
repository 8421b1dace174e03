// SPDX-License-Identifier: Apache-2.0
//
// From a product q k to its score, before terms are added to it.
#ifndef JAXFLASH_CSRC_CPU_SCORES_H_
#define JAXFLASH_CSRC_CPU_SCORES_H_

#include <cstdint>

#include "cpu/problem.h"
#include "cpu/simd.h"
#include "formula/score.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// The arithmetic of csrc/formula.
struct VectorMath {
  using Float = Floats;
  using Word = Words;

  // To about 1 ulp, and exactly 1 from where that is nearest. The polynomial is that of
  // Cephes, minimax in x^2 below 0.625.
  static Floats tanh(Floats x) {
    const Floats size = bit_and(x, broadcast(int32_t{0x7fffffff}));
    const Floats square = x * x;
    Floats small =
        fma(square, broadcast(-5.70498872745e-3f), broadcast(2.06390887954e-2f));
    small = fma(small, square, broadcast(-5.37397155531e-2f));
    small = fma(small, square, broadcast(1.33314422036e-1f));
    small = fma(small, square, broadcast(-3.33332819422e-1f));
    small = fma(small * square, x, x);
    constexpr float kSaturated = 10.0f;
    const Floats bounded = select(size < kSaturated, size, broadcast(kSaturated));
    const Floats large = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2E)) + 1.0f);
    const Floats result = select(size < 0.625f, small, select(x < 0.0f, -large, large));
    return select(x == x, result, x);
  }

  static Words high_product(uint32_t a, Words b) {
    typedef uint64_t Wide __attribute__((vector_size(2 * kVectorBytes)));
    return __builtin_convertvector(__builtin_convertvector(b, Wide) * a >> 32, Words);
  }
};

struct Scores {
  float scale;
  bool capped;
  Softcap<VectorMath> softcap;

  Scores(const jaxflash_attention_params& p, int64_t batch)
      : scale(scale_of(p, batch)), capped(p.softcap != 0.0f), softcap{p.softcap} {}

  Floats value(Floats product) const {
    const Floats s = product * scale;
    return capped ? softcap.value(s) : s;
  }

  // d value / d (scale * product)
  Floats slope(Floats product) const {
    return capped ? softcap.derivative(product * scale) : broadcast(1.0f);
  }
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_SCORES_H_
