// SPDX-License-Identifier: Apache-2.0
//
// Which attention weights of a key/value head dropout keeps.
#ifndef JAXFLASH_CSRC_CPU_DROPOUT_H_
#define JAXFLASH_CSRC_CPU_DROPOUT_H_

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "cpu/problem.h"
#include "cpu/scores.h"
#include "cpu/simd.h"
#include "formula/dropout.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

class KeptWeights {
 public:
  KeptWeights(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head)
      : group_(group_size(p)),
        first_head_(kv_head * group_),
        rate_(p.dropout_rate),
        dropout_{{}, dropout_threshold(rate_), 1.0f} {
    if (!any()) return;
    const auto* seed = batch_pointer<const uint32_t>(p, p.dropout_seed, batch);
    dropout_.key[0] = seed[0];
    dropout_.key[1] = seed[p.dropout_seed.strides[0]];
    dropout_.keep_factor = static_cast<float>(1.0 / (1.0 - double{rate_}));
  }

  bool any() const { return rate_ != 0.0f; }

  // What the weights that are kept are multiplied by.
  float factor() const { return dropout_.keep_factor; }

  // Words for the keys [key, key + keys) of a row, all their bits set where it is kept.
  void fill_row(int64_t row, int64_t key, int keys, float* to) const {
    assert(key % 4 == 0);
    const auto position = static_cast<uint32_t>(row / group_);
    const auto head = static_cast<uint32_t>(first_head_ + row % group_);
    for (int j = 0; j < keys; j += 4 * kLanes) {
      const auto quad = static_cast<uint32_t>((key + j) / 4);
      Words random[4];
      dropout_.words((Words)iota() + quad, Words{} + position, Words{} + head, random);
      int32_t kept[4 * kLanes];
      for (int word = 0; word < 4; ++word) {
        const Ints bits = random[word] >= dropout_.threshold;
        for (int lane = 0; lane < kLanes; ++lane) kept[4 * lane + word] = bits[lane];
      }
      std::memcpy(to + j, kept, std::min(keys - j, 4 * kLanes) * sizeof(float));
    }
  }

 private:
  const int64_t group_;
  const int64_t first_head_;
  const float rate_;
  Dropout<VectorMath> dropout_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_DROPOUT_H_
