// SPDX-License-Identifier: Apache-2.0
//
// What one (batch element, head) of a call looks like to a thread block: where its
// matrices start and which (i, j) are visible.
#pragma once

#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash {

// Coordinates of a batch element along the (merged) batch axes.
struct BatchIndex {
  uint32_t axis[JAXFLASH_MAX_BATCH_RANK];
};

__device__ __forceinline__ BatchIndex unravel_batch(const jaxflash_attention_params& p,
                                                    uint32_t batch) {
  BatchIndex index = {};
#pragma unroll
  for (int r = JAXFLASH_MAX_BATCH_RANK - 1; r > 0; --r) {
    if (r < p.batch_rank) {
      const uint32_t extent = static_cast<uint32_t>(p.batch_shape[r]);
      index.axis[r] = batch % extent;
      batch /= extent;
    }
  }
  index.axis[0] = batch;
  return index;
}

// Start of a batch element's part of a tensor.
template <class T>
__device__ __forceinline__ T* batch_pointer(const jaxflash_tensor& tensor,
                                            const BatchIndex& index) {
  int64_t offset = 0;
#pragma unroll
  for (int r = 0; r < JAXFLASH_MAX_BATCH_RANK; ++r) {
    offset += index.axis[r] * tensor.batch_strides[r];
  }
  return static_cast<T*>(tensor.data) + offset;
}

// A scalar input, or its default where it is absent.
template <class T>
__device__ __forceinline__ T scalar_or(const jaxflash_tensor& tensor,
                                       const BatchIndex& index, T absent) {
  return tensor.data == nullptr ? absent : *batch_pointer<const T>(tensor, index);
}

// Row i sees the keys [0, key_limit(i)); rows at or past q_rows see none.
struct Visible {
  int q_rows;   // min(T, query_seq_length)
  int kv_rows;  // keys that some row sees: later ones are never read
  int offset;   // query_offset, clamped so that no sum below overflows
  bool causal;

  __device__ __forceinline__ Visible(const jaxflash_attention_params& p,
                                     const BatchIndex& index) {
    constexpr int kOffsetLimit = 1 << 30;
    const int q_len = static_cast<int>(p.q_len);
    const int kv_len = static_cast<int>(p.kv_len);
    q_rows = max(0, min(q_len, scalar_or<int>(p.q_seq_lengths, index, q_len)));
    kv_rows = max(0, min(kv_len, scalar_or<int>(p.kv_seq_lengths, index, kv_len)));
    offset = scalar_or<int>(p.query_offset, index, 0);
    offset = max(-kOffsetLimit, min(kOffsetLimit, offset));
    causal = p.is_causal != 0;
    kv_rows = q_rows == 0 ? 0 : key_limit(q_rows - 1);
  }

  __device__ __forceinline__ int key_limit(int row) const {
    return causal ? max(0, min(kv_rows, row + offset + 1)) : kv_rows;
  }

  // Whether a row sees any key: where not, its part of every gradient is 0, whatever
  // the products that it took part in gave.
  __device__ __forceinline__ bool sees_keys(int row) const {
    return row < q_rows && key_limit(row) > 0;
  }

  // First row that sees key `col`.
  __device__ __forceinline__ int first_row(int col) const {
    return causal ? max(0, col - offset) : 0;
  }
};

__device__ __forceinline__ float softmax_scale(const jaxflash_attention_params& p,
                                               const BatchIndex& index) {
  return scalar_or<float>(p.scale, index,
                          rsqrtf(static_cast<float>(static_cast<int>(p.head_dim))));
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Up to here the rounding of lse * log2(e) moves P by less than 2^-13.
constexpr float kLargeLse = 1024.f;

}  // namespace jaxflash
