// SPDX-License-Identifier: Apache-2.0
//
// The portable kernels from the host: which is right for a call, and its launch. They
// serve every call that passed the checks of the entry points.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/device.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm80 {

size_t backward_workspace_bytes(const jaxflash_attention_backward_params& params);

// There must be at least one row, and in the backward pass one head.
jaxflash_status run_forward(const jaxflash_attention_params& params,
                            const Device& device, cudaStream_t stream);
jaxflash_status run_backward(const jaxflash_attention_backward_params& params,
                             void* workspace, const Device& device,
                             cudaStream_t stream);

}  // namespace jaxflash::sm80
