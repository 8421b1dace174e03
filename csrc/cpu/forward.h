// SPDX-License-Identifier: Apache-2.0
//
// Forward pass: FlashAttention-2, algorithm 1, with the queries in the lanes.
//
// For a panel of queries i (a few vectors of them), and blocks of keys j in order:
//
//   S^T[j, i] = sum_h K[j, h] Q^T[h, i]
//   m'[i]     = max(m[i], max_j S^T[j, i])
//   P^T[j, i] = exp(scale (S^T[j, i] - m'[i]))
//   alpha[i]  = exp(scale (m[i] - m'[i]))
//   l[i]      = alpha[i] l[i] + sum_j P^T[j, i]
//   O^T[h, i] = alpha[i] O^T[h, i] + sum_j V[j, h] P^T[j, i]
//
// and at the end out = O / l, lse = scale m + log l. With the queries in the lanes the
// softmax never reduces across a vector, K and V are read word by word in their own
// layout, and only Q and O are transposed, once per task.
//
// A task is a block of a few panels of one key/value head: it packs each block of K and
// V once for all its panels. Tasks share nothing, and the numbers of a row do not
// depend on how rows were split into tasks.
#ifndef JAXFLASH_CSRC_CPU_FORWARD_H_
#define JAXFLASH_CSRC_CPU_FORWARD_H_

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "api/validate.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// Queries, or keys in the backward pass, that lie side by side in vectors.
constexpr int kPanelVectors = 3;
constexpr int kPanel = kPanelVectors * kLanes;

// Floats of scratch on the stack of a task: threads may have as little as 512 KB.
constexpr int kScratchFloats = 60 * 1024;

inline int vectors_for(int lanes) { return (lanes + kLanes - 1) / kLanes; }

// Sizes of a task's blocks.
struct ForwardBlocks {
  int keys;    // per block of K and V
  int panels;  // of queries, at most

  ForwardBlocks(int head_dim, int64_t heads, int64_t rows, int threads) {
    keys = head_dim <= 64 ? 128 : head_dim <= 128 ? 64 : 32;
    const int fixed = keys * (kPanel + 2 * head_dim + 32);
    const int per_panel = 2 * (head_dim + 2) * kPanel;
    panels = std::min(192 / kPanel, (kScratchFloats - fixed) / per_panel);
    // Enough tasks for every thread, and short ones at the end of the causal triangle.
    const int64_t wanted =
        std::max<int64_t>(int64_t{4} * threads / std::max<int64_t>(heads, 1), 1);
    const int64_t even = rows / (wanted * kPanel);
    panels = static_cast<int>(std::clamp<int64_t>(even, 1, panels));
  }
};

template <class M>
class ForwardTask {
 public:
  using Element = typename M::Element;
  using Dot = typename M::Dot;

  ForwardTask(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
              const ForwardBlocks& blocks, float* scratch)
      : head_dim_(static_cast<int>(p.head_dim)),
        depth_(words<M>(head_dim_)),
        blocks_(blocks),
        group_(group_size(p)),
        visible_(p, batch),
        q_(rows_of<const Element>(p, p.q, batch, kv_head, group_)),
        k_(rows_of<const Element>(p, p.k, batch, kv_head, 1)),
        v_(rows_of<const Element>(p, p.v, batch, kv_head, 1)),
        out_(rows_of<Element>(p, p.out, batch, kv_head, group_)),
        out_low_(rows_of<int8_t>(p, p.out_low, batch, kv_head, group_)),
        wants_low_(p.out_low.data != nullptr),
        lse_(row_values<float>(p, p.lse, batch, kv_head)) {
    // exp(scale (S - m)) needs a positive factor: the sign goes into Q, and so does 0.
    scale_ = scale_of(p, batch);
    q_factor_ = std::fabs(scale_) < FLT_MIN ? 0.0f : std::copysign(1.0f, scale_);
    factor_ = q_factor_ == 0.0f ? 1.0f : std::fabs(scale_);

    Arena arena(scratch, kScratchFloats);
    k_block_ = arena.take(static_cast<int64_t>(blocks.keys) * depth_);
    v_block_ = arena.take(static_cast<int64_t>(blocks.keys) * head_dim_);
    s_ = arena.take(static_cast<int64_t>(blocks.keys) * kPanel);
    q_panels_ = arena.take(static_cast<int64_t>(blocks.panels) * depth_ * kPanel);
    o_panels_ = arena.take(static_cast<int64_t>(blocks.panels) * head_dim_ * kPanel);
    max_ = arena.take(static_cast<int64_t>(blocks.panels) * kPanel);
    sum_ = arena.take(static_cast<int64_t>(blocks.panels) * kPanel);
    rounded_sum_ = arena.take(static_cast<int64_t>(blocks.panels) * kPanel);
  }

  // Rows [first, last) of the group's matrix; `last` may lie past the visible ones.
  void run(int64_t first, int64_t last) {
    const int64_t end = std::clamp(visible_.q_rows * group_, first, last);
    if (end > first) attend(first, end);
    for (int64_t r = end; r < last; ++r) store_empty(r);
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
      pack_rows<M>(k_, j, count, head_dim_, k_block_, depth_);
      pack_along_rows<M>(v_, j, count, head_dim_, v_block_, head_dim_);
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

  void start_panel(int p, int64_t row, int64_t end) {
    const int rows = static_cast<int>(std::min<int64_t>(kPanel, end - row));
    float* q = q_panels_ + static_cast<int64_t>(p) * depth_ * kPanel;
    pack_transposed<M>(q_, row, rows, head_dim_, kPanel, q, kPanel);
    if (q_factor_ != 1.0f) multiply_words<M>(q, depth_ * kPanel, q_factor_);
    std::fill_n(o_panels_ + static_cast<int64_t>(p) * head_dim_ * kPanel,
                head_dim_ * kPanel, 0.0f);
    std::fill_n(max_ + p * kPanel, kPanel, -kInfinity);
    std::fill_n(sum_ + p * kPanel, kPanel, 0.0f);
    std::fill_n(rounded_sum_ + p * kPanel, kPanel, 0.0f);
  }

  // One block of keys [j, j + count) for one panel of queries.
  void add_block(int p, int64_t row, int rows, int64_t j, int count) {
    const int64_t last = row + rows - 1;
    const int64_t seen = key_limit(last) - j;
    if (seen <= 0 || key_begin(row) >= j + count) return;
    const int keys = static_cast<int>(std::min<int64_t>(seen, count));
    const bool partly_hidden = key_limit(row) - j < keys || key_begin(last) > j;
    const int vectors = vectors_for(rows);

    const float* q = q_panels_ + static_cast<int64_t>(p) * depth_ * kPanel;
    gemm_scores<Dot>(keys, vectors, depth_,
                     {k_block_, depth_, q, kPanel, s_, kPanel, nullptr});

    // Lane i sees the keys [begin[i], limit[i]) of the block.
    alignas(64) int32_t begin[kPanel], limit[kPanel];
    if (partly_hidden) {
      for (int i = 0; i < kPanel; ++i) {
        const int64_t lane_row = row + std::min(i, rows - 1);
        const auto within = [j, keys](int64_t key) {
          return static_cast<int32_t>(std::clamp<int64_t>(key - j, 0, keys));
        };
        begin[i] = within(key_begin(lane_row));
        limit[i] = within(key_limit(lane_row));
      }
      hide(keys, vectors, begin, limit);
    } else {
      std::fill_n(begin, kPanel, 0);
      std::fill_n(limit, kPanel, keys);
    }

    alignas(64) float alpha[kPanel];
    for (int v = 0; v < vectors; ++v) {
      const int lanes = p * kPanel + v * kLanes;
      softmax(keys, s_ + v * kLanes, max_ + lanes, sum_ + lanes, rounded_sum_ + lanes,
              alpha + v * kLanes);
    }

    const Operands pv = {v_block_,
                         head_dim_,
                         s_,
                         kPanel,
                         o_panels_ + static_cast<int64_t>(p) * head_dim_ * kPanel,
                         kPanel,
                         alpha};
    const int depth = words<M>(keys);
    const bool hidden_in_words = partly_hidden || keys % M::kElements != 0;
    if (hidden_in_words &&
        any_non_finite<M>(v_block_, words<M>(count), head_dim_, head_dim_)) {
      masked_gemm<Dot, Contiguous::kM, Update::kScaleAdd>(
          head_dim_, vectors, depth, pv, [&begin, &limit](int, int k, int v) {
            return bits_between<M>(load_ints(begin + v * kLanes),
                                   load_ints(limit + v * kLanes), k);
          });
    } else {
      gemm<Dot, Contiguous::kM, Update::kScaleAdd>(head_dim_, vectors, depth, pv);
    }
  }

  void hide(int keys, int vectors, const int32_t* begin, const int32_t* limit) {
    for (int v = 0; v < vectors; ++v) {
      const Ints begins = load_ints(begin + v * kLanes);
      const Ints limits = load_ints(limit + v * kLanes);
      for (int j = 0; j < keys; ++j) {
        float* s = s_ + j * kPanel + v * kLanes;
        const Ints visible = (begins <= j) & (j < limits);
        store(s, select(visible, load(s), broadcast(-kInfinity)));
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
    const float* o = o_panels_ + static_cast<int64_t>(p) * head_dim_ * kPanel;
    for (int i = 0; i < rows; ++i) {
      const float l = sum_[p * kPanel + i];
      // With a scale of NaN, hidden keys count.
      if (l == 0.0f || key_begin(row + i) >= key_limit(row + i)) {
        store_empty(row + i);
        continue;
      }
      float column[kMaxHeadDim];
      for (int h = 0; h < head_dim_; ++h) column[h] = o[h * kPanel + i];
      // Divided by the sum of the very weights it is made of, out is an exact mean of
      // rows of V; the sum that is not rounded is what lse is about.
      const float inverse = 1.0f / rounded_sum_[p * kPanel + i];
      store_row(column, inverse, head_dim_, out_.row(row + i), out_.column_stride);
      store_low_bits(column, inverse, row + i);
      const float m = max_[p * kPanel + i] * factor_;
      *lse_.row(row + i) = static_cast<float>(m + std::log(double{l}));
    }
  }

  // `factor * column` is what was rounded to the row of out.
  void store_low_bits(const float* column, float factor, int64_t row) const {
    if (!wants_low_) return;
    const Element* out = out_.row(row);
    int8_t* low = out_low_.row(row);
    for (int h = 0; h < head_dim_; ++h) {
      low[h * out_low_.column_stride] =
          low_bits(factor * column[h], out[h * out_.column_stride]);
    }
  }

  void store_empty(int64_t row) {
    Element* out = out_.row(row);
    for (int h = 0; h < head_dim_; ++h) from_float(0.0f, &out[h * out_.column_stride]);
    if (wants_low_) {
      int8_t* low = out_low_.row(row);
      for (int h = 0; h < head_dim_; ++h) low[h * out_low_.column_stride] = 0;
    }
    *lse_.row(row) = -kInfinity;
  }

  const int head_dim_;
  const int depth_;  // words of a row of Q and K
  const ForwardBlocks blocks_;
  const int64_t group_;
  const Visibility visible_;
  const Rows<const Element> q_, k_, v_;
  const Rows<Element> out_;
  const Rows<int8_t> out_low_;
  const bool wants_low_;
  const Rows<float> lse_;
  float scale_, q_factor_, factor_;

  float* k_block_;      // [keys, depth]
  float* v_block_;      // [words of keys, head_dim]
  float* s_;            // [keys, kPanel]: S^T, then P^T
  float* q_panels_;     // [panels, depth, kPanel]
  float* o_panels_;     // [panels, head_dim, kPanel]
  float* max_;          // [panels, kPanel]
  float* sum_;          // [panels, kPanel]
  float* rounded_sum_;  // [panels, kPanel]
};

template <class M>
void forward(const jaxflash_attention_params& p, const jaxflash_executor* executor) {
  const int64_t rows = p.q_len * group_size(p);
  const int64_t heads = batch_size(p) * p.num_kv_heads;
  const int threads = executor == nullptr ? 1 : std::max(executor->num_threads, 1);
  const ForwardBlocks blocks(static_cast<int>(p.head_dim), heads, rows, threads);
  const int64_t block_rows = static_cast<int64_t>(blocks.panels) * kPanel;
  const int64_t row_blocks = (rows + block_rows - 1) / block_rows;

  parallel_for(executor, heads * row_blocks, [&](int64_t index) {
    alignas(64) float scratch[kScratchFloats];
    const int64_t head = index % heads;
    // Late rows see the most keys of a causal call: they come first, so that no thread
    // ends alone.
    const int64_t first = (row_blocks - 1 - index / heads) * block_rows;
    ForwardTask<M> task(p, head / p.num_kv_heads, head % p.num_kv_heads, blocks,
                        scratch);
    task.run(first, std::min(first + block_rows, rows));
  });
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_FORWARD_H_
