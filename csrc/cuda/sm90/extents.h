// SPDX-License-Identifier: Apache-2.0
//
// What the plans of the forward and the backward kernels ask about a call.
#pragma once

#include "jaxflash/attention.h"
#include "sm90/tensor_map.h"

namespace jaxflash::sm90 {

// Of q, out and their gradients; of k, v and theirs.
MatrixExtents query_extents(const jaxflash_attention_params& params);
MatrixExtents key_extents(const jaxflash_attention_params& params);

// Whether out_low can be read and written in chunks of 8 bytes.
bool chunks_aligned(const jaxflash_tensor& out_low);

// Whether rows differ in the keys that they see, so that tiles differ in their work.
bool uneven(const jaxflash_attention_params& params);

}  // namespace jaxflash::sm90
