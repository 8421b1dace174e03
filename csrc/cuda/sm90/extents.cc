// SPDX-License-Identifier: Apache-2.0
#include "sm90/extents.h"

#include <cstdint>

#include "api/validate.h"

namespace jaxflash::sm90 {

MatrixExtents query_extents(const jaxflash_attention_params& params) {
  return {params.q_len, params.num_heads, params.head_dim, batch_size(params)};
}

MatrixExtents key_extents(const jaxflash_attention_params& params) {
  return {params.kv_len, params.num_kv_heads, params.head_dim, batch_size(params)};
}

bool chunks_aligned(const jaxflash_tensor& out_low) {
  constexpr int64_t kChunk = 8;
  return reinterpret_cast<uintptr_t>(out_low.data) % kChunk == 0 &&
         out_low.strides[2] == 1 && out_low.strides[0] % kChunk == 0 &&
         out_low.strides[1] % kChunk == 0 && out_low.batch_strides[0] % kChunk == 0;
}

bool uneven(const jaxflash_attention_params& params) {
  return params.is_causal != 0 || params.q_seq_lengths.data != nullptr ||
         params.kv_seq_lengths.data != nullptr;
}

}  // namespace jaxflash::sm90
