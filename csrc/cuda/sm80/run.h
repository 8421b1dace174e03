// SPDX-License-Identifier: Apache-2.0
//
// The portable kernels from the host: which is right for a call, and its launch. They
// serve every call that passed the checks of the entry points.
#pragma once

#include <cstddef>

#include "common/device.h"
#include "common/launcher.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm80 {

size_t forward_workspace_bytes(const jaxflash_attention_params& params);
size_t backward_workspace_bytes(const jaxflash_attention_backward_params& params);

// Whether each run gives the same gradients.
bool backward_is_reproducible(const jaxflash_attention_backward_params& params);

// There must be at least one row, and in the backward pass one head.
jaxflash_status run_forward(const jaxflash_attention_params& params, void* workspace,
                            const Device& device, Launcher& launcher);
jaxflash_status run_backward(const jaxflash_attention_backward_params& params,
                             void* workspace, const Device& device, Launcher& launcher);

}  // namespace jaxflash::sm80
