// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of a block of rows of one key/value head.
#ifndef JAXFLASH_CSRC_CPU_FORWARD_TASK_H_
#define JAXFLASH_CSRC_CPU_FORWARD_TASK_H_

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "api/validate.h"
#include "cpu/blocks.h"
#include "cpu/forward_output.h"
#include "cpu/forward_tile.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/scores.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
class ForwardTask {
 public:
  using Element = typename M::Element;
  using Dot = typename M::Dot;

  ForwardTask(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
              const ForwardBlocks& blocks, float* scratch)
      : head_dim_(static_cast<int>(p.head_dim)),
        value_dim_(static_cast<int>(p.value_head_dim)),
        depth_(words<M>(head_dim_)),
        blocks_(blocks),
        group_(group_size(p)),
        visible_(p, batch),
        scores_(p, batch),
        arena_(scratch, kScratchFloats),
        tile_(p, batch, kv_head, visible_, arena_.take(blocks.keys * kPanel)),
        sinks_(head_values<const float>(p, p.sinks, batch, kv_head)),
        q_(rows_of<const Element>(p, p.q, batch, kv_head, group_)),
        k_(rows_of<const Element>(p, p.k, batch, kv_head, 1)),
        v_(rows_of<const Element>(p, p.v, batch, kv_head, 1)),
        out_(p, batch, kv_head),
        makes_scores_(scores_.capped || tile_.has_terms() || sinks_.data != nullptr) {
    // exp(scale (S - m)) needs a positive factor: the sign goes into Q, and so does 0.
    const float scale = scores_.scale;
    if (!makes_scores_) {
      q_factor_ = std::fabs(scale) < FLT_MIN ? 0.0f : std::copysign(1.0f, scale);
      factor_ = q_factor_ == 0.0f ? 1.0f : std::fabs(scale);
    }

    k_block_ = arena_.take(static_cast<int64_t>(blocks.keys) * depth_);
    v_block_ = arena_.take(static_cast<int64_t>(blocks.keys) * value_dim_);
    s_ = arena_.take(static_cast<int64_t>(blocks.keys) * kPanel);
    q_panels_ = arena_.take(static_cast<int64_t>(blocks.panels) * depth_ * kPanel);
    o_panels_ = arena_.take(static_cast<int64_t>(blocks.panels) * value_dim_ * kPanel);
    max_ = arena_.take(static_cast<int64_t>(blocks.panels) * kPanel);
    sum_ = arena_.take(static_cast<int64_t>(blocks.panels) * kPanel);
    rounded_sum_ = arena_.take(static_cast<int64_t>(blocks.panels) * kPanel);
  }

  // Rows [first, last) of the group's matrix; `last` may lie past the visible ones.
  void run(int64_t first, int64_t last) {
    const int64_t end = std::clamp(visible_.q_rows * group_, first, last);
    if (end > first) attend(first, end);
    for (int64_t r = end; r < last; ++r) out_.store_zero(r, -kInfinity);
  }

 private:
  void attend(int64_t first, int64_t end) {
    const int panels = static_cast<int>((end - first + kPanel - 1) / kPanel);
    for (int p = 0; p < panels; ++p) start_panel(p, first + p * kPanel, end);

    // Blocks of keys lie where they do for every task.
    const int64_t begin = key_begin(first) / blocks_.keys * blocks_.keys;
    const int64_t keys = key_limit(end - 1);
    for (int64_t j = begin; j < keys; j += blocks_.keys) {
      const int count = static_cast<int>(std::min<int64_t>(blocks_.keys, keys - j));
      is_packed_ = false;
      for (int p = 0; p < panels; ++p) {
        const int64_t row = first + p * kPanel;
        const int rows = static_cast<int>(std::min<int64_t>(kPanel, end - row));
        add_block(p, row, rows, j, count);
      }
    }
    for (int p = 0; p < panels; ++p) store_panel(p, first + p * kPanel, end);
  }

  int64_t key_begin(int64_t row) const { return visible_.key_begin(row / group_); }
  int64_t key_limit(int64_t row) const { return visible_.key_limit(row / group_); }
  float sink(int64_t row) const {
    return sinks_.data == nullptr ? -kInfinity : *sinks_.row(row);
  }

  void start_panel(int p, int64_t row, int64_t end) {
    const int rows = static_cast<int>(std::min<int64_t>(kPanel, end - row));
    float* q = q_panels_ + static_cast<int64_t>(p) * depth_ * kPanel;
    pack_transposed<M>(q_, row, rows, head_dim_, kPanel, q, kPanel);
    if (q_factor_ != 1.0f) multiply_words<M>(q, depth_ * kPanel, q_factor_);
    std::fill_n(o_panels_ + static_cast<int64_t>(p) * value_dim_ * kPanel,
                value_dim_ * kPanel, 0.0f);
    for (int i = 0; i < kPanel; ++i) {
      const float first = i < rows ? sink(row + i) : -kInfinity;
      max_[p * kPanel + i] = first;
      sum_[p * kPanel + i] = rounded_sum_[p * kPanel + i] =
          first == -kInfinity ? 0.0f : 1.0f;
    }
  }

  // One block of keys [j, j + count) for one panel of queries.
  void add_block(int p, int64_t row, int rows, int64_t j, int count) {
    const int64_t last = row + rows - 1;
    const int64_t within = key_limit(last) - j;
    if (within <= 0 || key_begin(row) >= j + count) return;
    const int keys = static_cast<int>(std::min<int64_t>(within, count));
    const int vectors = vectors_for(rows);
    bool partly_hidden = key_limit(row) - j < keys || key_begin(last) > j;
    if (tile_.has_terms()) {
      const Seen seen = tile_.fill_terms(row, rows, j, keys);
      if (seen == Seen::kNone) return;
      partly_hidden = seen == Seen::kSome;
    }
    if (!is_packed_) pack_block(j, count);

    const float* q = q_panels_ + static_cast<int64_t>(p) * depth_ * kPanel;
    gemm_scores<Dot>(keys, vectors, depth_,
                     {k_block_, depth_, q, kPanel, s_, kPanel, nullptr});
    if (makes_scores_) make_scores(keys, vectors);
    if (partly_hidden && !tile_.has_terms()) hide(row, rows, j, keys, vectors);

    alignas(64) float alpha[kPanel];
    for (int v = 0; v < vectors; ++v) {
      const int lanes = p * kPanel + v * kLanes;
      softmax(keys, s_ + v * kLanes, max_ + lanes, sum_ + lanes, rounded_sum_ + lanes,
              alpha + v * kLanes);
    }
    if (tile_.drops()) drop(row, rows, j, keys, vectors);

    const Operands pv = {v_block_,
                         value_dim_,
                         s_,
                         kPanel,
                         o_panels_ + static_cast<int64_t>(p) * value_dim_ * kPanel,
                         kPanel,
                         alpha};
    const int depth = words<M>(keys);
    const bool hidden_in_words = partly_hidden || keys % M::kElements != 0;
    if (hidden_in_words &&
        any_non_finite<M>(v_block_, words<M>(count), value_dim_, value_dim_)) {
      tile_.fill_terms(row, rows, j, keys);
      masked_gemm<Dot, Contiguous::kM, Update::kScaleAdd>(
          value_dim_, vectors, depth, pv, [this, keys](int, int k, int v) {
            return tile_.template seen_bits<M>(k, keys, v);
          });
    } else {
      gemm<Dot, Contiguous::kM, Update::kScaleAdd>(value_dim_, vectors, depth, pv);
    }
  }

  void pack_block(int64_t j, int count) {
    pack_rows<M>(k_, j, count, head_dim_, k_block_, depth_);
    pack_along_rows<M>(v_, j, count, value_dim_, v_block_, value_dim_);
    is_packed_ = true;
  }

  // S^T becomes the scores, -inf where a term hides them whatever they are.
  void make_scores(int keys, int vectors) {
    for (int j = 0; j < keys; ++j) {
      for (int v = 0; v < vectors; ++v) {
        const int at = j * kPanel + v * kLanes;
        Floats s = scores_.value(load(s_ + at));
        if (tile_.has_terms()) {
          const Floats term = tile_.value(j, v);
          s = select(term == -kInfinity, term, s + term);
        }
        store(s_ + at, s);
      }
    }
  }

  // Hides what lies outside of each row's range of keys.
  void hide(int64_t row, int rows, int64_t j, int keys, int vectors) {
    // Lane i sees the keys [begin[i], limit[i]) of the block.
    alignas(64) int32_t begin[kPanel], limit[kPanel];
    for (int i = 0; i < kPanel; ++i) {
      const int64_t lane_row = row + std::min(i, rows - 1);
      const auto within = [j, keys](int64_t key) {
        return static_cast<int32_t>(std::clamp<int64_t>(key - j, 0, keys));
      };
      begin[i] = within(key_begin(lane_row));
      limit[i] = within(key_limit(lane_row));
    }
    for (int v = 0; v < vectors; ++v) {
      const Ints begins = load_ints(begin + v * kLanes);
      const Ints limits = load_ints(limit + v * kLanes);
      for (int k = 0; k < keys; ++k) {
        float* s = s_ + k * kPanel + v * kLanes;
        const Ints visible = (begins <= k) & (k < limits);
        store(s, select(visible, load(s), broadcast(-kInfinity)));
      }
    }
  }

  // Zeroes the words of P^T that dropout does not keep.
  void drop(int64_t row, int rows, int64_t j, int keys, int vectors) {
    tile_.fill_kept(row, rows, j, keys);
    for (int k = 0; k < words<M>(keys); ++k) {
      for (int v = 0; v < vectors; ++v) {
        float* word = s_ + k * kPanel + v * kLanes;
        store(word, bit_and(load(word), tile_.template kept_bits<M>(k, keys, v)));
      }
    }
  }

  // Turns a column of vectors of S^T into P^T, in words, and updates m and the sums of
  // P: l, and that of P as rounded for P V.
  void softmax(int keys, float* s, float* m, float* l, float* rounded_l,
               float* alpha) const {
    const Floats old_max = load(m);
    Floats new_max = old_max;
    for (int j = 0; j < keys; ++j) new_max = max(load(s + j * kPanel), new_max);
    // A lane that has seen no key yet subtracts 0 from -inf, not -inf.
    const Floats shift = select(new_max == -kInfinity, Floats{}, new_max) * factor_;
    // Rounded like the logits of the backward pass, whose P must sum to 1.
    auto prob = [&](Floats x) { return exp2((x * factor_ - shift) * kLog2E); };

    Floats total = {}, rounded_total = {};
    if constexpr (M::kPairs) {
      int j = 0;
#pragma GCC unroll 4
      for (; j + 2 <= keys; j += 2) {
        const Floats low = prob(load(s + j * kPanel));
        const Floats high = prob(load(s + (j + 1) * kPanel));
        const Floats rounded = Dot::pair(low, high);
        total += low + high;
        rounded_total += Dot::half(rounded, 0) + Dot::half(rounded, 1);
        store(s + j / 2 * kPanel, rounded);
      }
      if (j < keys) {
        const Floats low = prob(load(s + j * kPanel));
        const Floats rounded = Dot::pair(low, Floats{});
        total += low;
        rounded_total += Dot::half(rounded, 0);
        store(s + j / 2 * kPanel, rounded);
      }
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < keys; ++j) {
        const Floats x = prob(load(s + j * kPanel));
        const Floats rounded = round_to<Element>(x);
        total += x;
        rounded_total += rounded;
        store(s + j * kPanel, rounded);
      }
    }
    const Floats rescale = prob(old_max);
    store(m, new_max);
    store(l, load(l) * rescale + total);
    store(rounded_l, load(rounded_l) * rescale + rounded_total);
    store(alpha, rescale);
  }

  void store_panel(int p, int64_t row, int64_t end) {
    const int rows = static_cast<int>(std::min<int64_t>(kPanel, end - row));
    const float* o = o_panels_ + static_cast<int64_t>(p) * value_dim_ * kPanel;
    for (int i = 0; i < rows; ++i) {
      const float l = sum_[p * kPanel + i];
      // With a scale of NaN, hidden keys count.
      const bool blind = l == 0.0f || key_begin(row + i) >= key_limit(row + i);
      if (blind || sink(row + i) == kInfinity) {
        out_.store_zero(row + i, sink(row + i));
        continue;
      }
      float column[kMaxHeadDim];
      for (int h = 0; h < value_dim_; ++h) column[h] = o[h * kPanel + i];
      // Divided by the sum of the very weights it is made of, out is an exact mean of
      // rows of V; the sum that is not rounded is what lse is about.
      const float inverse = tile_.keep_factor() / rounded_sum_[p * kPanel + i];
      const float m = max_[p * kPanel + i] * factor_;
      out_.store(row + i, column, inverse, static_cast<float>(m + std::log(double{l})));
    }
  }

  const int head_dim_, value_dim_;
  const int depth_;  // words of a row of Q and K
  const ForwardBlocks blocks_;
  const int64_t group_;
  const Visibility visible_;
  const Scores scores_;
  Arena arena_;
  ForwardTile tile_;
  const Rows<const float> sinks_;
  const Rows<const Element> q_, k_, v_;
  const ForwardOutput<Element> out_;
  const bool makes_scores_;  // not only scaled products
  float q_factor_ = 1.0f, factor_ = 1.0f;
  bool is_packed_ = false;  // the block of keys

  float* k_block_;      // [keys, depth]
  float* v_block_;      // [words of keys, value_dim]
  float* s_;            // [keys, kPanel]: S^T, then P^T
  float* q_panels_;     // [panels, depth, kPanel]
  float* o_panels_;     // [panels, value_dim, kPanel]
  float* max_;          // [panels, kPanel]
  float* sum_;          // [panels, kPanel]
  float* rounded_sum_;  // [panels, kPanel]
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_FORWARD_TASK_H_
