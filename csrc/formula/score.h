// SPDX-License-Identifier: Apache-2.0
//
// Score variants: what becomes of a scaled logit s before bias and softmax. A variant
// is its parameters, its value and its derivative in s; the derivative may be exactly
// zero, and then the gradient is.
#ifndef JAXFLASH_CSRC_FORMULA_SCORE_H_
#define JAXFLASH_CSRC_FORMULA_SCORE_H_

#include "formula/math.h"

namespace jaxflash {

// softcap * tanh(s / softcap)
template <class Math>
struct Softcap {
  using Float = typename Math::Float;
  float cap;

  JAXFLASH_FORMULA Float value(Float s) const { return cap * Math::tanh(s / cap); }
  JAXFLASH_FORMULA Float derivative(Float s) const {
    const Float t = Math::tanh(s / cap);
    return 1.0f - t * t;
  }
};

}  // namespace jaxflash

#endif  // JAXFLASH_CSRC_FORMULA_SCORE_H_
