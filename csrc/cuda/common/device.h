// SPDX-License-Identifier: Apache-2.0
//
// What the host side of every kernel family needs: the device, its errors, and the
// arithmetic of grids and workspaces.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash {

// What XLA promises for its buffers.
constexpr size_t kWorkspaceAlignment = 128;

using Device = jaxflash_cuda_device;

// The current device, which must be able to run the kernels.
jaxflash_status find_device(Device* device);

// Whether a device, as a caller describes it, is one that can.
jaxflash_status check_device(const Device& device);

// Hands on an error of the runtime; `call` names what failed.
jaxflash_status check_cuda(const char* call, cudaError_t error);

// A grid of so many blocks can be launched.
jaxflash_status check_blocks(int64_t blocks);

// dscale comes from dQ.
inline bool wants_dq(const jaxflash_attention_backward_params& params) {
  return params.dq.data != nullptr || params.dscale.data != nullptr;
}

inline int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Lays out buffers one after the other, each on a multiple of the alignment.
class WorkspaceLayout {
 public:
  // Where a buffer of this size starts.
  size_t reserve(int64_t bytes) {
    const size_t start = bytes_;
    bytes_ += static_cast<size_t>(divide_up(bytes, kAlignment)) * kWorkspaceAlignment;
    return start;
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = kWorkspaceAlignment;
  size_t bytes_ = 0;
};

}  // namespace jaxflash
