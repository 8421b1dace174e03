// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass keeps in the workspace for a key/value head, all of it
// float32: lse and delta of each row, and the running sums of the gradients.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "api/validate.h"
#include "cpu/forward.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// How the work is cut. Everything follows from the shape, so that results do too.
struct BackwardBlocks {
  static constexpr int kMaxRows = 64;
  static constexpr int kMaxChunks = 64;

  int keys;  // per packed block: whole panels
  int rows;  // per packed block
  int chunks;
  int64_t chunk_keys;
  int64_t chunk_rows;

  explicit BackwardBlocks(const jaxflash_attention_params& p) {
    keys = (p.head_dim <= 64 ? 96 : 48) / kPanel * kPanel;
    rows = p.head_dim <= 128 ? kMaxRows : kMaxRows / 2;
    // Chunks cost a barrier each, and packing that is amortised over their rows.
    constexpr int64_t kMinKeys = 192;
    const int64_t heads = std::max<int64_t>(batch_size(p) * p.num_kv_heads, 1);
    const int64_t all_rows = p.q_len * group_size(p);
    const int64_t fitting = std::min(all_rows / rows, p.kv_len / kMinKeys);
    chunks = static_cast<int>(std::clamp<int64_t>(fitting, 1, int64_t{kMaxChunks}));
    chunks =
        static_cast<int>(std::clamp<int64_t>(int64_t{kMaxChunks} / heads, 1, chunks));
    chunk_keys = round_up(round_up(p.kv_len, chunks) / chunks, keys);
    chunk_rows = round_up(round_up(all_rows, chunks) / chunks, rows);
  }

  static int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
  }
};

// Terms of d loss / d scale of one row, summed over the keys.
struct ScaleSums {
  Floats ds_s;  // dS o S
  Floats ds;    // dS
  Floats p_s;   // P o S
};

// Offsets into the workspace, in floats.
struct BackwardLayout {
  int64_t rows, panels, padded_dim;
  int64_t lse, delta, d_lse, ds_sum, scale_sums, key_sums, dq, dk, dv;
  int64_t per_head;

  explicit BackwardLayout(const jaxflash_attention_params& p) {
    rows = p.q_len * group_size(p);
    panels = (p.kv_len + kPanel - 1) / kPanel;
    padded_dim = BackwardBlocks::round_up(p.head_dim, kLanes);
    int64_t next = 0;
    auto take = [&next](int64_t count) {
      const int64_t offset = next;
      next += BackwardBlocks::round_up(count, 16);
      return offset;
    };
    lse = take(rows);
    delta = take(rows);
    d_lse = take(rows);
    ds_sum = take(rows);
    scale_sums = take(3 * rows);
    key_sums = take(BackwardBlocks::kMaxChunks * p.head_dim);
    dq = take(rows * padded_dim);
    dk = take(panels * p.head_dim * kPanel);
    dv = take(panels * p.head_dim * kPanel);
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

// One key/value head: its inputs, and its part of the workspace and of the gradients.
template <class M>
class BackwardHead {
 public:
  using Element = typename M::Element;

  BackwardHead(const jaxflash_attention_backward_params& b, int64_t head,
               float* workspace)
      : BackwardHead(b, head / b.forward.num_kv_heads, head % b.forward.num_kv_heads,
                     BackwardLayout(b.forward), workspace) {}

  int64_t key_begin(int64_t row) const { return visible.key_begin(row / group); }
  int64_t key_limit(int64_t row) const { return visible.key_limit(row / group); }
  bool sees_keys(int64_t row) const { return visible.sees_keys(row / group); }

  float* dq_row(int64_t row) const { return dq_ + row * padded_dim; }
  float* dk_panel(int64_t key) const { return dk_ + key / kPanel * head_dim * kPanel; }
  float* dv_panel(int64_t key) const { return dv_ + key / kPanel * head_dim * kPanel; }

  void add_scale_sums(int64_t row, const ScaleSums& sums) const {
    float* total = scale_sums_ + 3 * row;
    total[0] += sum(sums.ds_s);
    total[1] += sum(sums.ds);
    total[2] += sum(sums.p_s);
  }

  // Zeroes the sums of a chunk of keys, and adds up its keys.
  void start_keys(int64_t chunk, int64_t chunk_keys) const {
    const int64_t first = chunk * chunk_keys;
    const int64_t count = std::min(first + chunk_keys, layout_.panels * kPanel) - first;
    if (count <= 0) return;
    std::fill_n(dk_panel(first), count * head_dim, 0.0f);
    std::fill_n(dv_panel(first), count * head_dim, 0.0f);
    float* total = key_sums_ + chunk * head_dim;
    std::fill_n(total, head_dim, 0.0f);
    if (visible.left != Visibility::kUnlimited) return;  // no row sees a whole chunk
    const int64_t last = std::min(first + chunk_keys, visible.kv_rows);
    for (int64_t j = first; j < last; ++j) add_key(j, total);
  }

  // lse, delta and d_lse of the rows; zeroes their sums.
  void start_rows(int64_t first, int64_t last, float* scratch) const {
    last = std::min(last, layout_.rows);
    if (last <= first) return;
    std::fill_n(dq_row(first), (last - first) * padded_dim, 0.0f);
    std::fill_n(scale_sums_ + 3 * first, 3 * (last - first), 0.0f);
    std::fill_n(ds_sum + first, last - first, 0.0f);
    const int depth = words<M>(head_dim);
    for (int64_t r = first; r < last; r += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(last - r, kLanes));
      float* d_out_columns = scratch;
      float* out_columns = scratch + depth * kLanes;
      pack_transposed<M>(d_out, r, count, head_dim, kLanes, d_out_columns, kLanes);
      pack_transposed<M>(out_, r, count, head_dim, kLanes, out_columns, kLanes);
      const Floats products =
          dot_columns<typename M::Dot>(depth, d_out_columns, out_columns, kLanes);
      for (int i = 0; i < count; ++i) {
        start_row(r + i, products[i] + lost_product(r + i));
      }
    }
  }

  // dS of a row sums to d_lse by definition. In floating point it does not, mostly
  // because delta comes from the rounded out, and it is rounded itself for dS K: where
  // keys have a common mean, that mean times the defect would drown dQ. What is too
  // much is taken back along the mean of the keys that the row sees, or of the last of
  // them where a window makes them others for every row.
  void store_rows(int64_t first, int64_t last, int64_t chunk_keys) const {
    constexpr int64_t kWindowKeys = 64;
    float key_sum[kMaxHeadDim] = {}, dq[kMaxHeadDim];
    int64_t begin = 0, keys = 0;  // key_sum is that of the keys [begin, keys)
    for (int64_t r = first; r < std::min(last, layout_.rows); ++r) {
      const bool seen = sees_keys(r);
      if (wants_dscale) *dscale_out_.row(r) = seen ? dscale(r) : 0.0f;
      if (!wants_dq) continue;
      if (!seen) {
        dq_out_.store(r, zeros(), 0.0f, head_dim);
        continue;
      }
      const int64_t limit = key_limit(r);
      const int64_t wanted_begin = visible.left == Visibility::kUnlimited
                                       ? 0
                                       : std::max(key_begin(r), limit - kWindowKeys);
      if (wanted_begin != begin) {
        begin = keys = wanted_begin;
        std::fill_n(key_sum, head_dim, 0.0f);
      }
      for (; keys % chunk_keys == 0 && keys + chunk_keys <= limit; keys += chunk_keys) {
        const float* sums = key_sums_ + keys / chunk_keys * head_dim;
        for (int h = 0; h < head_dim; ++h) key_sum[h] += sums[h];
      }
      for (; keys < limit; ++keys) add_key(keys, key_sum);
      const float excess = (ds_sum[r] - d_lse[r]) / static_cast<float>(limit - begin);
      for (int h = 0; h < head_dim; ++h) dq[h] = dq_row(r)[h] - excess * key_sum[h];
      dq_out_.store(r, dq, scale, head_dim);
    }
  }

  void store_keys(int64_t first, int64_t last) const {
    for (int64_t j = first; j < std::min(last, kv_len_); ++j) {
      const bool seen = visible.is_seen(j);
      if (wants_dk) store_key(dk_panel(j), j, seen, scale, dk_out_);
      if (wants_dv) store_key(dv_panel(j), j, seen, 1.0f, dv_out_);
    }
  }

  const int head_dim;
  const int padded_dim;  // whole vectors
  const int64_t group;
  const Visibility visible;
  const float scale;
  const Rows<const Element> q, k, v, d_out;
  const bool wants_dq, wants_dk, wants_dv, wants_dscale;
  float* const lse;     // [rows]
  float* const delta;   // [rows]
  float* const d_lse;   // [rows]
  float* const ds_sum;  // [rows]: dS summed over the keys, as it enters dQ

 private:
  BackwardHead(const jaxflash_attention_backward_params& b, int64_t batch,
               int64_t kv_head, const BackwardLayout& layout, float* workspace)
      : BackwardHead(
            b, b.forward, batch, kv_head, layout,
            workspace + (batch * b.forward.num_kv_heads + kv_head) * layout.per_head) {}

  BackwardHead(const jaxflash_attention_backward_params& b,
               const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
               const BackwardLayout& layout, float* own)
      : head_dim(static_cast<int>(p.head_dim)),
        padded_dim(static_cast<int>(layout.padded_dim)),
        group(group_size(p)),
        visible(p, batch),
        scale(scale_of(p, batch)),
        q(rows_of<const Element>(p, p.q, batch, kv_head, group)),
        k(rows_of<const Element>(p, p.k, batch, kv_head, 1)),
        v(rows_of<const Element>(p, p.v, batch, kv_head, 1)),
        d_out(rows_of<const Element>(p, b.d_out, batch, kv_head, group)),
        wants_dq(b.dq.data != nullptr),
        wants_dk(b.dk.data != nullptr),
        wants_dv(b.dv.data != nullptr),
        wants_dscale(b.dscale.data != nullptr),
        lse(own + layout.lse),
        delta(own + layout.delta),
        d_lse(own + layout.d_lse),
        ds_sum(own + layout.ds_sum),
        layout_(layout),
        kv_len_(p.kv_len),
        out_(rows_of<const Element>(p, p.out, batch, kv_head, group)),
        out_low_(rows_of<const int8_t>(p, p.out_low, batch, kv_head, group)),
        has_low_(p.out_low.data != nullptr),
        lse_in_(row_values<const float>(p, p.lse, batch, kv_head)),
        d_lse_in_(row_values<const float>(p, b.d_lse, batch, kv_head)),
        dscale_out_(row_values<float>(p, b.dscale, batch, kv_head)),
        dq_out_(p, b.dq, batch, kv_head, group),
        dk_out_(p, b.dk, batch, kv_head, 1),
        dv_out_(p, b.dv, batch, kv_head, 1),
        scale_sums_(own + layout.scale_sums),
        key_sums_(own + layout.key_sums),
        dq_(own + layout.dq),
        dk_(own + layout.dk),
        dv_(own + layout.dv) {}

  static const float* zeros() {
    static constexpr float kZeros[kMaxHeadDim] = {};
    return kZeros;
  }

  // d_out . (what rounding took from out)
  float lost_product(int64_t row) const {
    if (!has_low_) return 0.0f;
    const Element* rounded = out_.row(row);
    const int8_t* low = out_low_.row(row);
    const Element* g = d_out.row(row);
    float product = 0.0f;
    for (int h = 0; h < head_dim; ++h) {
      const Element out = rounded[h * out_.column_stride];
      if (low[h * out_low_.column_stride] == 0) continue;
      product += to_float(g[h * d_out.column_stride]) *
                 (with_low_bits(out, low[h * out_low_.column_stride]) - to_float(out));
    }
    return product;
  }

  void start_row(int64_t row, float products) const {
    lse[row] = delta[row] = d_lse[row] = 0.0f;
    if (!sees_keys(row)) return;
    delta[row] = products;
    if (d_lse_in_.data != nullptr) d_lse[row] = *d_lse_in_.row(row);
    lse[row] = *lse_in_.row(row);
    // Every visible logit is -inf: P is 0 rather than exp(-inf + inf), and the row
    // takes no part.
    if (lse[row] == -kInfinity) {
      lse[row] = kInfinity;
      d_lse[row] = 0.0f;
    }
  }

  void add_key(int64_t key, float* total) const {
    float row[kMaxHeadDim];
    load_row(k.row(key), k.column_stride, head_dim, row);
    for (int h = 0; h < head_dim; ++h) total[h] += row[h];
  }

  // sum(dS o S), with the same correction, here along P itself.
  float dscale(int64_t row) const {
    const float* total = scale_sums_ + 3 * row;
    return total[0] - (total[1] - d_lse[row]) * total[2];
  }

  void store_key(const float* panel, int64_t key, bool seen, float factor,
                 const Gradient<Element>& gradient) const {
    float column[kMaxHeadDim];
    for (int h = 0; h < head_dim; ++h) column[h] = panel[h * kPanel + key % kPanel];
    gradient.store(key, seen ? column : zeros(), seen ? factor : 0.0f, head_dim);
  }

  const BackwardLayout layout_;
  const int64_t kv_len_;
  const Rows<const Element> out_;
  const Rows<const int8_t> out_low_;
  const bool has_low_;
  const Rows<const float> lse_in_, d_lse_in_;
  const Rows<float> dscale_out_;
  const Gradient<Element> dq_out_, dk_out_, dv_out_;
  float* const scale_sums_;  // [rows, 3]
  float* const key_sums_;    // [chunks, head_dim]
  float* const dq_;          // [rows, padded_dim]
  float* const dk_;          // [panels, head_dim, kPanel]
  float* const dv_;          // [panels, head_dim, kPanel]
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_STATE_H_
