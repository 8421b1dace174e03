// SPDX-License-Identifier: Apache-2.0
//
// What one batch element of a call looks like to the kernels: where its tensors start,
// and which (i, j) are visible.
#ifndef JAXFLASH_CSRC_CPU_PROBLEM_H_
#define JAXFLASH_CSRC_CPU_PROBLEM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/pack.h"
#include "jaxflash/attention.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// Start of a batch element's part of a tensor.
template <class T>
T* batch_pointer(const jaxflash_attention_params& p, const jaxflash_tensor& tensor,
                 int64_t batch) {
  int64_t offset = 0;
  for (int axis = p.batch_rank - 1; axis >= 0 && batch > 0; --axis) {
    offset += batch % p.batch_shape[axis] * tensor.batch_strides[axis];
    batch /= p.batch_shape[axis];
  }
  return static_cast<T*>(tensor.data) + offset;
}

// The rows of a [length, heads, columns] tensor that belong to a key/value head, where
// `group` of the tensor's heads share it.
template <class Element>
Rows<Element> rows_of(const jaxflash_attention_params& p, const jaxflash_tensor& tensor,
                      int64_t batch, int64_t kv_head, int64_t group) {
  Element* data = batch_pointer<Element>(p, tensor, batch);
  return {data + kv_head * group * tensor.strides[1], tensor.strides[0],
          tensor.strides[1], tensor.strides[2], group};
}

inline int64_t group_size(const jaxflash_attention_params& p) {
  return p.num_kv_heads == 0 ? 1 : p.num_heads / p.num_kv_heads;
}

// The same for a [heads, length] tensor of one value per row, and for a
// [heads, length, columns] tensor. Absent tensors have no data.
template <class Value>
Rows<Value> row_values(const jaxflash_attention_params& p,
                       const jaxflash_tensor& tensor, int64_t batch, int64_t kv_head) {
  const int64_t group = group_size(p);
  if (tensor.data == nullptr) return {nullptr, 0, 0, 0, group};
  Value* data = batch_pointer<Value>(p, tensor, batch);
  return {data + kv_head * group * tensor.strides[0], tensor.strides[1],
          tensor.strides[0], tensor.strides[2], group};
}

// The same for a [heads] tensor.
template <class Value>
Rows<Value> head_values(const jaxflash_attention_params& p,
                        const jaxflash_tensor& tensor, int64_t batch, int64_t kv_head) {
  const int64_t group = group_size(p);
  if (tensor.data == nullptr) return {nullptr, 0, 0, 0, group};
  Value* data = batch_pointer<Value>(p, tensor, batch);
  return {data + kv_head * group * tensor.strides[0], 0, tensor.strides[0], 0, group};
}

// The values of a [length] tensor.
template <class Value>
Rows<Value> position_values(const jaxflash_attention_params& p,
                            const jaxflash_tensor& tensor, int64_t batch) {
  if (tensor.data == nullptr) return {nullptr, 0, 0, 0, 1};
  return {batch_pointer<Value>(p, tensor, batch), tensor.strides[0], 0, 0, 1};
}

// A scalar input, or its default where it is absent.
template <class T>
T scalar_or(const jaxflash_attention_params& p, const jaxflash_tensor& tensor,
            int64_t batch, T absent) {
  return tensor.data == nullptr ? absent : *batch_pointer<const T>(p, tensor, batch);
}

inline float scale_of(const jaxflash_attention_params& p, int64_t batch) {
  const double absent = 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  return scalar_or<float>(p, p.scale, batch, static_cast<float>(absent));
}

// Calls body(i) for every i in [0, count), on the threads of the executor if any.
template <class Body>
void parallel_for(const jaxflash_executor* executor, int64_t count, const Body& body) {
  if (executor == nullptr || count < 2) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto task = [](void* argument, int64_t i) {
    (*static_cast<const Body*>(argument))(i);
  };
  executor->parallel_for(executor->context, count, task, const_cast<Body*>(&body));
}

// Row i < q_rows sees the keys [key_begin(i), key_limit(i)), which may be none; later
// rows see none. Neither bound falls from row to row.
struct Visibility {
  int64_t q_rows;   // min(T, query length)
  int64_t kv_rows;  // keys at or past it are seen by no row, and never read
  int64_t offset;   // query_offset, clamped to +-2^30
  int64_t left;     // the first key that row i sees is i + offset - left, or 0 if
                    // kUnlimited
  int64_t right;    // the last one is i + offset + right, or that of all if kUnlimited

  static constexpr int64_t kUnlimited = -1;

  Visibility(const jaxflash_attention_params& p, int64_t batch) {
    constexpr int64_t kOffsetLimit = int64_t{1} << 30;
    auto length = [&](const jaxflash_tensor& lengths, int64_t padded) {
      if (lengths.data == nullptr) return padded;
      const int64_t given = *batch_pointer<const int32_t>(p, lengths, batch);
      return std::clamp<int64_t>(given, 0, padded);
    };
    q_rows = length(p.q_seq_lengths, p.q_len);
    kv_rows = length(p.kv_seq_lengths, p.kv_len);
    offset = std::clamp<int64_t>(scalar_or<int32_t>(p, p.query_offset, batch, 0),
                                 -kOffsetLimit, kOffsetLimit);
    // Longer sides hide nothing, whatever the offset.
    constexpr int64_t kSideLimit = 4 * kOffsetLimit;
    left = std::min(p.window_left, kSideLimit);
    right = p.is_causal != 0 ? 0 : std::min(p.window_right, kSideLimit);
    kv_rows = q_rows == 0 ? 0 : key_limit(q_rows - 1);
  }

  int64_t key_begin(int64_t i) const {
    return left == kUnlimited ? 0 : std::clamp<int64_t>(i + offset - left, 0, kv_rows);
  }
  int64_t key_limit(int64_t i) const {
    return right == kUnlimited
               ? kv_rows
               : std::clamp<int64_t>(i + offset + right + 1, 0, kv_rows);
  }
  bool sees_keys(int64_t i) const { return i < q_rows && key_begin(i) < key_limit(i); }

  bool is_seen(int64_t j) const { return j < kv_rows && first_row(j) < row_limit(j); }

  // The rows [first_row(j), row_limit(j)) see key j < kv_rows.
  int64_t first_row(int64_t j) const {
    return right == kUnlimited ? 0 : std::max<int64_t>(j - offset - right, 0);
  }
  int64_t row_limit(int64_t j) const {
    return left == kUnlimited ? q_rows
                              : std::clamp<int64_t>(j - offset + left + 1, 0, q_rows);
  }
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_PROBLEM_H_
