// SPDX-License-Identifier: Apache-2.0
//
// What differs from element to element of the scores: the terms that are added, bias
// and ALiBi, and what hides single elements, mask, segments and a bias of -inf. Both
// are one float per element, which is -inf where the element is hidden.
#ifndef JAXFLASH_CSRC_CPU_TERMS_H_
#define JAXFLASH_CSRC_CPU_TERMS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/element.h"
#include "cpu/problem.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// Whether any rows of a block see any keys of it.
enum class Seen { kNone, kSome, kAll };

// Rows of a tensor of any float dtype.
struct AnyFloatRows {
  int32_t dtype;
  Rows<const float> as_float32;
  Rows<const Bfloat16> as_bfloat16;
  Rows<const Float16> as_float16;

  AnyFloatRows(const jaxflash_attention_params& p, const jaxflash_tensor& tensor,
               int64_t batch, int64_t kv_head)
      : dtype(tensor.dtype),
        as_float32(row_values<const float>(p, tensor, batch, kv_head)),
        as_bfloat16(row_values<const Bfloat16>(p, tensor, batch, kv_head)),
        as_float16(row_values<const Float16>(p, tensor, batch, kv_head)) {}

  void load(int64_t row, int64_t column, int count, float* to) const {
    const auto from = [&](const auto& rows) {
      const auto* x = rows.row(row) + column * rows.column_stride;
      load_row(x, rows.column_stride, count, to);
    };
    if (dtype == JAXFLASH_FLOAT32) return from(as_float32);
    if (dtype == JAXFLASH_BFLOAT16) return from(as_bfloat16);
    from(as_float16);
  }
};

// The terms of one key/value head. Rows are those of its group, as in pack.h.
class ScoreTerms {
 public:
  ScoreTerms(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head,
             const Visibility& visible)
      : visible_(visible),
        group_(group_size(p)),
        has_bias_(p.bias.data != nullptr),
        has_segments_(p.q_segment_ids.data != nullptr),
        bias_(p, p.bias, batch, kv_head),
        mask_(row_values<const uint8_t>(p, p.mask, batch, kv_head)),
        slopes_(head_values<const float>(p, p.alibi_slopes, batch, kv_head)),
        q_ids_(position_values<const int32_t>(p, p.q_segment_ids, batch)),
        kv_ids_(position_values<const int32_t>(p, p.kv_segment_ids, batch)) {}

  // Whether the call has such terms at all.
  bool any() const { return adds() || mask_.data != nullptr || has_segments_; }

  // Whether terms are added that may be larger than the products.
  bool adds() const { return has_bias_ || slopes_.data != nullptr; }

  // to[i * ld + j]: the terms of rows [row, row + rows) and keys [key, key + keys), and
  // -inf for the keys from there to `width`. Writes nothing where no row sees a key for
  // its segment.
  Seen fill(int64_t row, int rows, int64_t key, int keys, int width, float* to,
            int ld) const {
    const Seen segments = compare_segments(row, rows, key, keys);
    if (segments == Seen::kNone) return Seen::kNone;
    int64_t seen = 0;
    for (int i = 0; i < rows; ++i) {
      seen += fill_row(row + i, key, keys, segments == Seen::kSome, to + i * ld);
      std::fill(to + i * ld + keys, to + i * ld + width, -kInfinity);
    }
    if (seen == 0) return Seen::kNone;
    return seen == static_cast<int64_t>(rows) * width ? Seen::kAll : Seen::kSome;
  }

  // |i + query_offset - j| of a row and the keys from `key` on.
  Floats distance(int64_t row, int64_t key) const {
    const auto first = static_cast<int32_t>(row / group_ + visible_.offset - key);
    const Ints difference = first - iota();
    return __builtin_convertvector(difference < 0 ? -difference : difference, Floats);
  }

 private:
  // kAll if the ids are all equal, kNone if the rows and the keys have no id in common
  // that could be seen without a look at every pair.
  Seen compare_segments(int64_t row, int rows, int64_t key, int keys) const {
    if (!has_segments_) return Seen::kAll;
    const auto range = [](auto id, int64_t first, int64_t last) {
      auto low = id(first), high = low;
      for (int64_t i = first + 1; i <= last; ++i) {
        low = std::min(low, id(i));
        high = std::max(high, id(i));
      }
      return std::pair(low, high);
    };
    const auto [q_low, q_high] = range([this](int64_t i) { return *q_ids_.row(i); },
                                       row / group_, (row + rows - 1) / group_);
    const auto [kv_low, kv_high] =
        range([this](int64_t j) { return *kv_ids_.row(j); }, key, key + keys - 1);
    if (q_high < kv_low || kv_high < q_low) return Seen::kNone;
    return q_low == kv_high && q_high == kv_low ? Seen::kAll : Seen::kSome;
  }

  // Returns how many keys the row sees.
  int fill_row(int64_t row, int64_t key, int keys, bool many_segments,
               float* to) const {
    if (has_bias_) {
      bias_.load(row, key, keys, to);
    } else {
      std::fill_n(to, keys, 0.0f);
    }
    if (slopes_.data != nullptr) add_distances(row, key, keys, to);
    if (mask_.data != nullptr) {
      const uint8_t* mask = mask_.row(row) + key * mask_.column_stride;
      hide(keys, to, [mask, stride = mask_.column_stride](int j) {
        return mask[j * stride] == 0;
      });
    }
    if (many_segments) {
      const int32_t own = *q_ids_.row(row / group_);
      const int32_t* ids = kv_ids_.row(key);
      hide(keys, to, [own, ids, stride = kv_ids_.position_stride](int j) {
        return ids[j * stride] != own;
      });
    }
    const auto within = [key, keys](int64_t j) {
      return std::clamp<int64_t>(j - key, 0, keys);
    };
    std::fill_n(to, within(visible_.key_begin(row / group_)), -kInfinity);
    std::fill(to + within(visible_.key_limit(row / group_)), to + keys, -kInfinity);
    int seen = 0;
    for (int j = 0; j < keys; ++j) seen += to[j] != -kInfinity;
    return seen;
  }

  template <class Hidden>
  static void hide(int keys, float* to, Hidden hidden) {
    for (int j = 0; j < keys; ++j) to[j] = hidden(j) ? -kInfinity : to[j];
  }

  void add_distances(int64_t row, int64_t key, int keys, float* to) const {
    const Floats minus_slope = broadcast(-*slopes_.row(row));
    for (int j = 0; j < keys; j += kLanes) {
      const int count = std::min(keys - j, kLanes);
      float terms[kLanes] = {};
      std::copy_n(to + j, count, terms);
      store(terms, fma(minus_slope, distance(row, key + j), load(terms)));
      std::copy_n(terms, count, to + j);
    }
  }

  const Visibility visible_;
  const int64_t group_;
  const bool has_bias_, has_segments_;
  const AnyFloatRows bias_;
  const Rows<const uint8_t> mask_;
  const Rows<const float> slopes_;
  const Rows<const int32_t> q_ids_, kv_ids_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_TERMS_H_
