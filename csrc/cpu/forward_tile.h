// SPDX-License-Identifier: Apache-2.0
//
// What a block of keys has element by element for a panel of queries, with the queries
// in the lanes: the terms of the scores, or which weights dropout keeps.
#ifndef JAXFLASH_CSRC_CPU_FORWARD_TILE_H_
#define JAXFLASH_CSRC_CPU_FORWARD_TILE_H_

#include <algorithm>
#include <cstdint>

#include "cpu/blocks.h"
#include "cpu/dropout.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/simd.h"
#include "cpu/terms.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

class ForwardTile {
 public:
  ForwardTile(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
              const Visibility& visible, float* values)
      : terms_(p, batch, kv_head, visible), kept_(p, batch, kv_head), values_(values) {}

  bool has_terms() const { return terms_.any(); }
  bool drops() const { return kept_.any(); }

  // What the weights that dropout keeps are multiplied by.
  float keep_factor() const { return kept_.factor(); }

  // Terms of `rows` rows from `row` on and `keys` keys from `key` on: -inf where a
  // score is hidden, which they tell also in calls that have no terms.
  Seen fill_terms(int64_t row, int rows, int64_t key, int keys) {
    bool any = false, all = true;
    fill_lanes(rows, keys, [&](int i, int count, float* strip) {
      const Seen seen = terms_.fill(row + i, count, key, keys, keys, strip, kStripKeys);
      any |= seen != Seen::kNone;
      all &= seen == Seen::kAll;
      if (seen == Seen::kNone) std::fill_n(strip, count * kStripKeys, -kInfinity);
    });
    if (!any) return Seen::kNone;
    return all ? Seen::kAll : Seen::kSome;
  }

  // Words with all their bits set where dropout keeps the weight.
  void fill_kept(int64_t row, int rows, int64_t key, int keys) {
    fill_lanes(rows, keys, [&](int i, int count, float* strip) {
      for (int s = 0; s < count; ++s) {
        kept_.fill_row(row + i + s, key, keys, strip + s * kStripKeys);
      }
    });
  }

  Floats value(int key, int v) const {
    return load(values_ + key * kPanel + v * kLanes);
  }

  // Bits of word w of P^T, those of its `keys` keys that are seen, or kept.
  template <class M>
  Ints seen_bits(int w, int keys, int v) const {
    return bits_of_word<M>(w, keys,
                           [this, v](int key) { return value(key, v) != -kInfinity; });
  }
  template <class M>
  Ints kept_bits(int w, int keys, int v) const {
    return bits_of_word<M>(w, keys, [this, v](int key) { return (Ints)value(key, v); });
  }

 private:
  static constexpr int kStrip = kLanes < 8 ? kLanes : 8;  // rows transposed at a time
  static constexpr int kStripKeys = ForwardBlocks::kMaxKeys;

  // Row by row, as the tensors lie, and from there into the lanes; lanes past the rows
  // have values that nobody uses.
  template <class Fill>
  void fill_lanes(int rows, int keys, Fill fill) {
    float strip[kStrip * kStripKeys] = {};
    for (int i = 0; i < rows; i += kStrip) {
      fill(i, std::min(rows - i, kStrip), strip);
      for (int key = 0; key < keys; ++key) {
        float* to = values_ + key * kPanel + i;
        for (int s = 0; s < kStrip; ++s) to[s] = strip[s * kStripKeys + key];
      }
    }
  }

  const ScoreTerms terms_;
  const KeptWeights kept_;
  float* const values_;  // [keys, kPanel]
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_FORWARD_TILE_H_
