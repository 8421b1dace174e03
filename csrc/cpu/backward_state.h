// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass keeps in the workspace for a key/value head, all of it
// float32: what it knows of each row, and the running sums of the gradients.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "api/validate.h"
#include "cpu/blocks.h"
#include "cpu/dropout.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/scores.h"
#include "cpu/simd.h"
#include "cpu/terms.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// What is summed over the keys of one row, beside its gradients. S is the product q k,
// slope the derivative of a score by scale S.
struct RowSums {
  Floats ds;           // dS
  Floats ds_s;         // dS slope S
  Floats p_s;          // P slope S
  Floats ds_slope;     // dS slope
  Floats p_slope;      // P slope
  Floats ds_distance;  // dS |i + query_offset - j|
  Floats p_distance;   // P |i + query_offset - j|
};

// The same in the workspace.
struct RowTotals {
  float ds, ds_s, p_s, ds_slope, p_slope, ds_distance, p_distance;

  // Those that a call has whose scores are scaled products.
  void add_plain(const RowSums& sums) {
    ds += sum(sums.ds);
    ds_s += sum(sums.ds_s);
    p_s += sum(sums.p_s);
  }

  void add(const RowSums& sums) {
    add_plain(sums);
    ds_slope += sum(sums.ds_slope);
    p_slope += sum(sums.p_slope);
    ds_distance += sum(sums.ds_distance);
    p_distance += sum(sums.p_distance);
  }
};

// Offsets into the workspace, in floats.
struct BackwardLayout {
  int64_t rows, panels, padded_dim;
  int64_t lse, lse_low, delta, d_lse, d_sink, ds_sum, totals, sample, key_sums;
  int64_t dq, dk, dv;
  int64_t per_head;

  explicit BackwardLayout(const jaxflash_attention_params& p) {
    rows = p.q_len * group_size(p);
    panels = (p.kv_len + kPanel - 1) / kPanel;
    padded_dim = round_up(p.head_dim, kLanes);
    int64_t next = 0;
    auto take = [&next](int64_t count) {
      const int64_t offset = next;
      next += round_up(count, 16);
      return offset;
    };
    lse = take(rows);
    lse_low = take(rows);
    delta = take(rows);
    d_lse = take(rows);
    d_sink = take(rows);
    ds_sum = take(rows);
    totals = take(rows * static_cast<int64_t>(sizeof(RowTotals) / sizeof(float)));
    sample = take(rows);
    key_sums = take(BackwardBlocks::kMaxChunks * p.head_dim);
    dq = take(rows * padded_dim);
    dk = take(panels * p.head_dim * kPanel);
    dv = take(panels * p.value_head_dim * kPanel);
    per_head = next;
  }
};

inline size_t backward_workspace(const jaxflash_attention_params& p) {
  const int64_t heads = batch_size(p) * p.num_kv_heads;
  if (heads == 0) return 0;
  return static_cast<size_t>(heads * BackwardLayout(p).per_head) * sizeof(float);
}

// A wanted gradient: float32, or the dtype of the inputs.
template <class Element>
struct Gradient {
  Rows<float> as_float;
  Rows<Element> as_element;
  bool is_float;

  Gradient(const jaxflash_attention_params& p, const jaxflash_tensor& tensor,
           int64_t batch, int64_t kv_head, int64_t group)
      : as_float(rows_of<float>(p, tensor, batch, kv_head, group)),
        as_element(rows_of<Element>(p, tensor, batch, kv_head, group)),
        is_float(tensor.dtype == JAXFLASH_FLOAT32) {}

  void store(int64_t row, const float* values, float factor, int count) const {
    if (is_float) {
      store_row(values, factor, count, as_float.row(row), as_float.column_stride);
    } else {
      store_row(values, factor, count, as_element.row(row), as_element.column_stride);
    }
  }
};

inline const float* zeros() {
  static constexpr float kZeros[kMaxHeadDim] = {};
  return kZeros;
}

// One key/value head: its inputs, and its part of the workspace and of dK and dV.
template <class M>
class BackwardHead {
 public:
  using Element = typename M::Element;

  BackwardHead(const jaxflash_attention_backward_params& b, int64_t head,
               float* workspace)
      : BackwardHead(b, b.forward, head / b.forward.num_kv_heads,
                     head % b.forward.num_kv_heads, BackwardLayout(b.forward),
                     workspace + head * BackwardLayout(b.forward).per_head) {}

  int64_t key_begin(int64_t row) const { return visible.key_begin(row / group); }
  int64_t key_limit(int64_t row) const { return visible.key_limit(row / group); }
  bool sees_keys(int64_t row) const { return visible.sees_keys(row / group); }

  // -inf where there is none.
  float sink(int64_t row) const {
    return sinks.data == nullptr ? -kInfinity : *sinks.row(row);
  }

  float* dq_row(int64_t row) const { return dq_ + row * padded_dim; }
  float* dk_panel(int64_t key) const { return dk_ + key / kPanel * head_dim * kPanel; }
  float* dv_panel(int64_t key) const { return dv_ + key / kPanel * value_dim * kPanel; }

  // The sum of the keys of a chunk, where every row may see whole chunks.
  bool has_key_sums() const {
    return visible.left == Visibility::kUnlimited && !terms.any();
  }
  float* key_sum(int64_t chunk) const { return key_sums_ + chunk * head_dim; }

  void add_key(int64_t key, float* total) const {
    float row[kMaxHeadDim];
    load_row(k.row(key), k.column_stride, head_dim, row);
    for (int h = 0; h < head_dim; ++h) total[h] += row[h];
  }

  // Zeroes the sums of a chunk of keys, and adds up its keys.
  void start_keys(int64_t chunk, int64_t chunk_keys) const {
    const int64_t first = chunk * chunk_keys;
    const int64_t count = std::min(first + chunk_keys, layout.panels * kPanel) - first;
    if (count <= 0) return;
    std::fill_n(dk_panel(first), count * head_dim, 0.0f);
    std::fill_n(dv_panel(first), count * value_dim, 0.0f);
    std::fill_n(key_sum(chunk), head_dim, 0.0f);
    if (!has_key_sums()) return;
    const int64_t last = std::min(first + chunk_keys, visible.kv_rows);
    for (int64_t j = first; j < last; ++j) add_key(j, key_sum(chunk));
  }

  void store_keys(int64_t first, int64_t last) const {
    for (int64_t j = first; j < std::min(last, kv_len_); ++j) {
      const bool seen = visible.is_seen(j);
      if (wants_dk) store_key(dk_panel(j), j, seen, finite_scale(), dk_out_, head_dim);
      if (wants_dv) store_key(dv_panel(j), j, seen, 1.0f, dv_out_, value_dim);
    }
  }

  // A scale that is not finite is in the sums of whatever is seen, and must not make
  // NaN of the zeros of what is not.
  float finite_scale() const {
    return std::isfinite(scores.scale) ? scores.scale : 1.0f;
  }

  const BackwardLayout layout;
  const int head_dim, value_dim;
  const int padded_dim;  // whole vectors of head_dim
  const int64_t group;
  const Visibility visible;
  const Scores scores;
  const ScoreTerms terms;
  const KeptWeights kept;
  const Rows<const Element> q, k, v, d_out;
  const Rows<const float> sinks;
  const bool wants_dq, wants_dk, wants_dv;
  const bool sums_to_d_lse;  // what enters dQ, summed over the keys of a row
  const bool wants_totals;   // some are used
  const bool wants_distances;
  float* const lse;         // [rows]
  float* const lse_low;     // [rows]: what rounding took from a large lse
  float* const delta;       // [rows]
  float* const d_lse;       // [rows]
  float* const d_sink;      // [rows]: gradient of the row's sink, 0 if it has none
  float* const ds_sum;      // [rows]: dS slope summed over the keys, as it enters dQ
  RowTotals* const totals;  // [rows]
  int32_t* const sample;    // [rows]: first key of a panel of which the row sees some,
                            // or -1

 private:
  BackwardHead(const jaxflash_attention_backward_params& b,
               const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
               const BackwardLayout& layout, float* own)
      : layout(layout),
        head_dim(static_cast<int>(p.head_dim)),
        value_dim(static_cast<int>(p.value_head_dim)),
        padded_dim(static_cast<int>(layout.padded_dim)),
        group(group_size(p)),
        visible(p, batch),
        scores(p, batch),
        terms(p, batch, kv_head, visible),
        kept(p, batch, kv_head),
        q(rows_of<const Element>(p, p.q, batch, kv_head, group)),
        k(rows_of<const Element>(p, p.k, batch, kv_head, 1)),
        v(rows_of<const Element>(p, p.v, batch, kv_head, 1)),
        d_out(rows_of<const Element>(p, b.d_out, batch, kv_head, group)),
        sinks(head_values<const float>(p, p.sinks, batch, kv_head)),
        wants_dq(b.dq.data != nullptr),
        wants_dk(b.dk.data != nullptr),
        wants_dv(b.dv.data != nullptr),
        sums_to_d_lse(!scores.capped && sinks.data == nullptr),
        wants_totals(b.dscale.data != nullptr || b.dalibi.data != nullptr ||
                     (wants_dq && !sums_to_d_lse)),
        wants_distances(b.dalibi.data != nullptr),
        lse(own + layout.lse),
        lse_low(own + layout.lse_low),
        delta(own + layout.delta),
        d_lse(own + layout.d_lse),
        d_sink(own + layout.d_sink),
        ds_sum(own + layout.ds_sum),
        totals(reinterpret_cast<RowTotals*>(own + layout.totals)),
        sample(reinterpret_cast<int32_t*>(own + layout.sample)),
        kv_len_(p.kv_len),
        dk_out_(p, b.dk, batch, kv_head, 1),
        dv_out_(p, b.dv, batch, kv_head, 1),
        key_sums_(own + layout.key_sums),
        dq_(own + layout.dq),
        dk_(own + layout.dk),
        dv_(own + layout.dv) {}

  void store_key(const float* panel, int64_t key, bool seen, float factor,
                 const Gradient<Element>& gradient, int columns) const {
    float column[kMaxHeadDim];
    for (int h = 0; h < columns; ++h) column[h] = panel[h * kPanel + key % kPanel];
    gradient.store(key, seen ? column : zeros(), seen ? factor : 0.0f, columns);
  }

  const int64_t kv_len_;
  const Gradient<Element> dk_out_, dv_out_;
  float* const key_sums_;  // [chunks, head_dim]
  float* const dq_;        // [rows, padded_dim]
  float* const dk_;        // [panels, head_dim, kPanel]
  float* const dv_;        // [panels, value_dim, kPanel]
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_
