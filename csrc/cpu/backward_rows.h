// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass does row by row, before and after the products of blocks.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_ROWS_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/problem.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
class BackwardRows {
 public:
  using Element = typename M::Element;

  BackwardRows(const jaxflash_attention_backward_params& b, int64_t index,
               const BackwardHead<M>& head)
      : BackwardRows(b, b.forward, index / b.forward.num_kv_heads,
                     index % b.forward.num_kv_heads, head) {}

  // lse, delta and so on of the rows; zeroes their sums.
  void start(int64_t first, int64_t last, float* scratch) const {
    last = std::min(last, head_.layout.rows);
    if (last <= first) return;
    std::fill_n(head_.dq_row(first), (last - first) * head_.padded_dim, 0.0f);
    std::fill_n(head_.totals + first, last - first, RowTotals{});
    std::fill_n(head_.ds_sum + first, last - first, 0.0f);
    std::fill_n(head_.sample + first, last - first, -1);
    const int depth = words<M>(head_.value_dim);
    for (int64_t r = first; r < last; r += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(last - r, kLanes));
      float* d_out_columns = scratch;
      float* out_columns = scratch + depth * kLanes;
      pack_transposed<M>(head_.d_out, r, count, head_.value_dim, kLanes, d_out_columns,
                         kLanes);
      pack_transposed<M>(out_, r, count, head_.value_dim, kLanes, out_columns, kLanes);
      const Floats products =
          dot_columns<typename M::Dot>(depth, d_out_columns, out_columns, kLanes);
      for (int i = 0; i < count; ++i) {
        start_row(r + i, products[i] + lost_product(r + i));
      }
    }
  }

  // The gradients of sinks, once lse is refined.
  void start_sinks(int64_t first, int64_t last) const {
    if (head_.sinks.data == nullptr) return;
    for (int64_t r = first; r < std::min(last, head_.layout.rows); ++r) {
      if (!has_sink(r) || head_.lse[r] == kInfinity) continue;
      const float weight = std::exp(head_.sink(r) - head_.lse[r] - head_.lse_low[r]);
      head_.d_sink[r] = weight * (head_.d_lse[r] - head_.delta[r]);
    }
  }

  // dS of a row sums to d_lse (less the part of its sink) by definition. In floating
  // point it does not, mostly because delta comes from the rounded out, and it is
  // rounded itself for dS K: where keys have a common mean, that mean times the defect
  // would drown dQ. What is too much is taken back along the mean of the keys that the
  // row sees, or of some of them where each row sees others.
  void store(int64_t first, int64_t last, int64_t chunk_keys) const {
    KeyMean mean(head_, chunk_keys);
    for (int64_t r = first; r < std::min(last, head_.layout.rows); ++r) {
      const bool seen = head_.terms.any() ? head_.sample[r] >= 0 : head_.sees_keys(r);
      // Of a row that sees no key lse is the sink, and dO may be anything.
      if (wants_dsinks_) *dsinks_out_.row(r) = seen ? head_.d_sink[r] : head_.d_lse[r];
      const RowTotals& totals = head_.totals[r];
      const float expected = seen ? head_.d_lse[r] - head_.d_sink[r] : 0.0f;
      const float defect = totals.ds - expected;
      // Here the correction goes along P itself.
      if (wants_dscale_) *dscale_out_.row(r) = totals.ds_s - defect * totals.p_s;
      if (wants_dalibi_) {
        *dalibi_out_.row(r) = defect * totals.p_distance - totals.ds_distance;
      }
      if (!head_.wants_dq) continue;
      if (!seen) {
        dq_out_.store(r, zeros(), 0.0f, head_.head_dim);
        continue;
      }
      // With slopes in the sum, or little beside a sink, it has no value to be compared
      // with: what rounding for dS K did is known, and what delta lacks goes along P.
      const float excess = head_.sums_to_d_lse ? head_.ds_sum[r] - expected
                                               : head_.ds_sum[r] - totals.ds_slope +
                                                     defect * totals.p_slope;
      float dq[kMaxHeadDim];
      mean.subtract(r, excess, dq);
      dq_out_.store(r, dq, head_.finite_scale(), head_.head_dim);
    }
  }

 private:
  // The mean of keys that a row sees, for one row after the other.
  class KeyMean {
   public:
    KeyMean(const BackwardHead<M>& head, int64_t chunk_keys)
        : head_(head), chunk_keys_(chunk_keys) {}

    // dq = the sums of the row - excess * mean
    void subtract(int64_t row, float excess, float* dq) {
      const int64_t count = head_.terms.any() ? sum_sample(row) : sum_range(row);
      const float factor = excess / static_cast<float>(count);
      for (int h = 0; h < head_.head_dim; ++h) {
        dq[h] = head_.dq_row(row)[h] - factor * sum_[h];
      }
    }

   private:
    // Of all keys, or of the last ones where a window makes them others for every row.
    int64_t sum_range(int64_t row) {
      constexpr int64_t kWindowKeys = 64;
      const int64_t limit = head_.key_limit(row);
      const int64_t wanted_begin =
          head_.has_key_sums() ? 0
                               : std::max(head_.key_begin(row), limit - kWindowKeys);
      if (wanted_begin != begin_) {
        begin_ = end_ = wanted_begin;
        std::fill_n(sum_, head_.head_dim, 0.0f);
      }
      for (; end_ % chunk_keys_ == 0 && end_ + chunk_keys_ <= limit;
           end_ += chunk_keys_) {
        const float* sums = head_.key_sum(end_ / chunk_keys_);
        for (int h = 0; h < head_.head_dim; ++h) sum_[h] += sums[h];
      }
      for (; end_ < limit; ++end_) head_.add_key(end_, sum_);
      return limit - begin_;
    }

    // Of those of one panel that the row sees.
    int64_t sum_sample(int64_t row) {
      const int64_t key = head_.sample[row];
      const int keys =
          static_cast<int>(std::min<int64_t>(kPanel, head_.visible.kv_rows - key));
      float terms[kPanel];
      head_.terms.fill(row, 1, key, keys, keys, terms, kPanel);
      std::fill_n(sum_, head_.head_dim, 0.0f);
      int64_t count = 0;
      for (int j = 0; j < keys; ++j) {
        if (terms[j] == -kInfinity) continue;
        head_.add_key(key + j, sum_);
        ++count;
      }
      return count;
    }

    const BackwardHead<M>& head_;
    const int64_t chunk_keys_;
    int64_t begin_ = 0, end_ = 0;  // sum_ is that of the keys [begin_, end_)
    float sum_[kMaxHeadDim] = {};
  };

  BackwardRows(const jaxflash_attention_backward_params& b,
               const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
               const BackwardHead<M>& head)
      : head_(head),
        out_(rows_of<const Element>(p, p.out, batch, kv_head, head.group)),
        out_low_(rows_of<const int8_t>(p, p.out_low, batch, kv_head, head.group)),
        has_low_(p.out_low.data != nullptr),
        lse_in_(row_values<const float>(p, p.lse, batch, kv_head)),
        d_lse_in_(row_values<const float>(p, b.d_lse, batch, kv_head)),
        wants_dscale_(b.dscale.data != nullptr),
        wants_dsinks_(b.dsinks.data != nullptr),
        wants_dalibi_(b.dalibi.data != nullptr),
        dscale_out_(row_values<float>(p, b.dscale, batch, kv_head)),
        dsinks_out_(row_values<float>(p, b.dsinks, batch, kv_head)),
        dalibi_out_(row_values<float>(p, b.dalibi, batch, kv_head)),
        dq_out_(p, b.dq, batch, kv_head, head.group) {}

  // d_out . (what rounding took from out)
  float lost_product(int64_t row) const {
    if (!has_low_) return 0.0f;
    const Element* rounded = out_.row(row);
    const int8_t* low = out_low_.row(row);
    const Rows<const Element>& d_out = head_.d_out;
    const Element* g = d_out.row(row);
    float product = 0.0f;
    for (int h = 0; h < head_.value_dim; ++h) {
      const Element out = rounded[h * out_.column_stride];
      if (low[h * out_low_.column_stride] == 0) continue;
      product += to_float(g[h * d_out.column_stride]) *
                 (with_low_bits(out, low[h * out_low_.column_stride]) - to_float(out));
    }
    return product;
  }

  void start_row(int64_t row, float products) const {
    head_.lse[row] = head_.lse_low[row] = head_.delta[row] = head_.d_lse[row] =
        head_.d_sink[row] = 0.0f;
    const bool sees_keys = head_.sees_keys(row);
    const bool takes_part = sees_keys || has_sink(row);
    if (!takes_part) return;
    const float lse = *lse_in_.row(row);
    // Every visible logit is -inf, or the sink has all the mass: P is 0 rather than
    // exp(-inf + inf), and the row takes no part.
    if (std::isinf(lse)) {
      head_.lse[row] = kInfinity;
      return;
    }
    head_.lse[row] = lse;
    if (d_lse_in_.data != nullptr) head_.d_lse[row] = *d_lse_in_.row(row);
    if (sees_keys) head_.delta[row] = products;
  }

  // Whether a sink takes part in the row.
  bool has_sink(int64_t row) const {
    return head_.sink(row) != -kInfinity && row / head_.group < head_.visible.q_rows;
  }

  const BackwardHead<M>& head_;
  const Rows<const Element> out_;
  const Rows<const int8_t> out_low_;
  const bool has_low_;
  const Rows<const float> lse_in_, d_lse_in_;
  const bool wants_dscale_, wants_dsinks_, wants_dalibi_;
  const Rows<float> dscale_out_, dsinks_out_, dalibi_out_;
  const Gradient<Element> dq_out_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_ROWS_H_
