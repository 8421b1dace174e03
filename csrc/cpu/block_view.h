// SPDX-License-Identifier: Apache-2.0
//
// What a block of rows sees of a block of keys in the backward pass, with the keys in
// the lanes.
#ifndef JAXFLASH_CSRC_CPU_BLOCK_VIEW_H_
#define JAXFLASH_CSRC_CPU_BLOCK_VIEW_H_

#include <algorithm>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/blocks.h"
#include "cpu/pack.h"
#include "cpu/simd.h"
#include "cpu/terms.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
class BlockView {
 public:
  BlockView(const BackwardHead<M>& head, int ld, float* terms)
      : head_(head), ld_(ld), terms_(terms) {}

  // The keys from `first_key` on are the block.
  void start(int64_t first_key, int keys) {
    first_key_ = first_key;
    keys_ = keys;
  }

  // Looks at the block with these rows; returns whether they see anything of it.
  bool look(int64_t row, int rows) {
    const auto within = [this](int64_t key) {
      return static_cast<int32_t>(std::clamp<int64_t>(key - first_key_, 0, keys_));
    };
    for (int i = 0; i < rows; ++i) {
      begin_[i] = within(head_.key_begin(row + i));
      limit_[i] = within(head_.key_limit(row + i));
    }
    first_lane_ = begin_[0] / kPanel * kPanel;
    lane_limit_ = limit_[rows - 1];
    if (lane_limit_ <= begin_[0]) return false;
    bool any = false;
    for (int lane = first_lane_; lane < lane_limit_; lane += kPanel) {
      Seen& seen = seen_[lane / kPanel];
      const bool cut =
          limit_[0] < lane + vectors(lane) * kLanes || begin_[rows - 1] > lane;
      seen = cut ? Seen::kSome : Seen::kAll;
      if (head_.terms.any()) seen = fill_terms(row, rows, lane);
      any |= seen != Seen::kNone;
    }
    return any;
  }

  // The terms tell what is hidden also in calls that have none.
  void complete_terms(int64_t row, int rows) {
    if (head_.terms.any()) return;
    for (int lane = first_lane_; lane < lane_limit_; lane += kPanel) {
      fill_terms(row, rows, lane);
    }
  }

  int64_t first_key() const { return first_key_; }
  int keys() const { return keys_; }

  // The lanes of which some row may see something, from a whole panel on.
  int first_lane() const { return first_lane_; }
  int lane_limit() const { return lane_limit_; }

  // Of the panel that begins at `lane`.
  int vectors(int lane) const {
    return vectors_for(std::min(lane_limit_ - lane, kPanel));
  }
  Seen seen(int lane) const { return seen_[lane / kPanel]; }

  // Whether row i sees the keys of a vector, as far as its range goes.
  Ints in_range(int i, int lane) const {
    const Ints key = iota() + lane;
    return (begin_[i] <= key) & (key < limit_[i]);
  }

  // The terms of row i and a vector of keys, and whether it sees them.
  Floats terms(int i, int lane) const { return load(terms_ + i * ld_ + lane); }
  Ints sees(int i, int lane) const { return terms(i, lane) != -kInfinity; }

  // Bits of word w, from the first lane on, that row i sees, in every lane.
  Ints seen_bits_of_row(int i, int w) const {
    return bits_of_word<M>(w, lane_limit_ - first_lane_, [this, i](int key) {
      const float term = terms_[i * ld_ + first_lane_ + key];
      return broadcast(term != -kInfinity ? -1 : 0);
    });
  }

 private:
  Seen fill_terms(int64_t row, int rows, int lane) {
    const int keys = std::min(keys_ - lane, kPanel);
    const Seen seen = head_.terms.fill(row, rows, first_key_ + lane, keys, kPanel,
                                       terms_ + lane, ld_);
    for (int i = 0; i < rows; ++i) {
      float* own = terms_ + i * ld_ + lane;
      if (seen == Seen::kNone) {
        std::fill_n(own, kPanel, -kInfinity);
      } else if (head_.sample[row + i] < 0) {
        const bool sees = std::any_of(own, own + kPanel,
                                      [](float term) { return term != -kInfinity; });
        if (sees) head_.sample[row + i] = static_cast<int32_t>(first_key_ + lane);
      }
    }
    return seen;
  }

  const BackwardHead<M>& head_;
  const int ld_;
  float* const terms_;  // [rows, ld]
  int64_t first_key_ = 0;
  int keys_ = 0;
  int first_lane_ = 0, lane_limit_ = 0;
  int32_t begin_[BackwardBlocks::kMaxRows];  // row i may see of them begin_[i] to
  int32_t limit_[BackwardBlocks::kMaxRows];  // limit_[i]
  Seen seen_[BackwardBlocks::kMaxPanels];
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BLOCK_VIEW_H_
