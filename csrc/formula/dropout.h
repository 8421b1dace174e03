// SPDX-License-Identifier: Apache-2.0
//
// Dropout's random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", 2011), as in jaxflash/philox.py. The key is the seed of
// the batch element, the counter of the weights (n, i, 4 quad .. 4 quad + 3) is
// (quad, i, n, 0), and each of them has one of the four words. So the same weights are
// dropped whatever the backend, the pass and the tiles.
#ifndef JAXFLASH_CSRC_FORMULA_DROPOUT_H_
#define JAXFLASH_CSRC_FORMULA_DROPOUT_H_

#include <cstdint>

#include "formula/math.h"

namespace jaxflash {

template <class Math>
struct Dropout {
  using Word = typename Math::Word;
  uint32_t key[2];
  uint32_t threshold;  // a weight is kept if its word is no less
  float keep_factor;   // 1 / (1 - rate)

  // The words of the weights (head, row, 4 quad + 0 .. 3).
  JAXFLASH_FORMULA void words(Word quad, Word row, Word head, Word (&random)[4]) const {
    constexpr uint32_t kMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
    constexpr uint32_t kKeySteps[2] = {0x9E3779B9u, 0xBB67AE85u};
    constexpr int kRounds = 10;
    uint32_t k[2] = {key[0], key[1]};
    random[0] = quad;
    random[1] = row;
    random[2] = head;
    random[3] = head ^ head;
    for (int round = 0; round < kRounds; ++round) {
      const Word high0 = Math::high_product(kMultipliers[0], random[0]);
      const Word high1 = Math::high_product(kMultipliers[1], random[2]);
      const Word low0 = kMultipliers[0] * random[0];
      const Word low1 = kMultipliers[1] * random[2];
      random[0] = high1 ^ random[1] ^ k[0];
      random[1] = low1;
      random[2] = high0 ^ random[3] ^ k[1];
      random[3] = low0;
      k[0] += kKeySteps[0];
      k[1] += kKeySteps[1];
    }
  }
};

// The threshold of a rate in [0, 1). Inlined, so that no two instruction sets share a
// function.
__attribute__((always_inline)) inline uint32_t dropout_threshold(float rate) {
  const double words = static_cast<double>(rate) * 4294967296.0;
  const double rounded = words < 4294967295.0 ? words + 0.5 : 4294967295.0;
  return static_cast<uint32_t>(static_cast<uint64_t>(rounded));
}

}  // namespace jaxflash

#endif  // JAXFLASH_CSRC_FORMULA_DROPOUT_H_
