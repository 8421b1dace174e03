// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernels from the host: what they serve, and their launch.
#pragma once

#include <cstddef>

#include "common/device.h"
#include "common/launcher.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm90 {

// Why the kernels do not serve a call that passed the checks of the entry points;
// nullptr where they do.
const char* forward_obstacle(const jaxflash_attention_params& params);
const char* backward_obstacle(const jaxflash_attention_backward_params& params);

size_t forward_workspace_bytes(const jaxflash_attention_params& params);
size_t backward_workspace_bytes(const jaxflash_attention_backward_params& params);

// Whether each run gives the same gradients.
bool backward_is_reproducible(const jaxflash_attention_backward_params& params);

// There must be at least one row, in the backward pass one head, and no obstacle.
jaxflash_status run_forward(const jaxflash_attention_params& params, void* workspace,
                            const Device& device, Launcher& launcher);
jaxflash_status run_backward(const jaxflash_attention_backward_params& params,
                             void* workspace, const Device& device, Launcher& launcher);

}  // namespace jaxflash::sm90
