// SPDX-License-Identifier: Apache-2.0
//
// Attention backward for Hopper: FlashAttention-2, algorithm 2 (arXiv 2307.08691), on
// the asynchronous units that FlashAttention-3 (arXiv 2407.08608) uses.
//
//   delta = rowsum(dO o O) - dlse
//   P  = exp(scale Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                        dK = scale dS^T Q
//   dS = P o (dP - delta)              dQ = scale dS K
//
// The kernels, one after the other:
//
//   row pass           delta, lse, a zeroed accumulator for dQ     backward_rows.cuh
//   H <= 128   fused   dK, dV, and dQ added to the accumulator     backward_fused.cuh
//              convert dQ from the accumulator                     backward_rows.cuh
//   beyond     dkv     dK and dV                                   backward_dkv.cuh
//              dq      dQ, from S and dP that it computes again    backward_dq.cuh
//
// Each but the first may start before the one before it has ended, and waits for its
// results itself (griddepcontrol.wait): what it does before that is free.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backward_config.h"
#include "backward_dkv.cuh"
#include "backward_dq.cuh"
#include "backward_fused.cuh"
#include "backward_rows.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// Launches kernels as long as there is no error.
struct BackwardLauncher {
  const BackwardArguments& arguments;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;
  bool first = true;

  using Kernel = void (*)(BackwardArguments);

  void launch(Kernel kernel, int64_t blocks, int threads, size_t shared_bytes = 0) {
    if (error != cudaSuccess || blocks == 0) return;
    if (shared_bytes > 0) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes));
      if (error != cudaSuccess) return;
    }
    cudaLaunchAttribute early_start = {};
    early_start.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early_start.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned int>(blocks));
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early_start;
    config.numAttrs = first ? 0 : 1;
    error = cudaLaunchKernelEx(&config, kernel, arguments);
    first = false;
  }
};

template <class Element, int kConfigIndex>
cudaError_t launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  const jaxflash_attention_backward_params& params = arguments.params;
  const int64_t rows =
      static_cast<int64_t>(arguments.num_query_heads) * arguments.num_rows_padded;
  const int64_t key_blocks =
      static_cast<int64_t>(arguments.order.num_items) * arguments.order.num_heads;
  const bool dq_wanted = params.dq.data != nullptr || params.dscale.data != nullptr;
  const bool dkv_wanted = params.dk.data != nullptr || params.dv.data != nullptr;

  BackwardLauncher launcher = {arguments, stream};
  launcher.launch(backward_rows_kernel<Element, kConfigIndex>, rows / kConfig.block_q,
                  kRowsThreads);
  if constexpr (kConfig.separate_dq()) {
    using Shared = DkvShared<kConfigIndex>;
    using SharedDq = DqShared<kConfigIndex>;
    static_assert(sizeof(Shared) <= kMaxSharedMemory);
    static_assert(sizeof(SharedDq) <= kMaxSharedMemory);
    if (dkv_wanted) {
      launcher.launch(backward_dkv_kernel<Element, kConfigIndex>, key_blocks,
                      kBackwardThreads, sizeof(Shared));
    }
    if (dq_wanted) {
      launcher.launch(backward_dq_kernel<Element, kConfigIndex>,
                      rows / kConfig.dq_block_q, kBackwardThreads, sizeof(SharedDq));
    }
  } else {
    using Shared = FusedShared<kConfigIndex>;
    static_assert(sizeof(Shared) <= kMaxSharedMemory);
    if (dkv_wanted || dq_wanted) {
      launcher.launch(backward_fused_kernel<Element, kConfigIndex>, key_blocks,
                      kBackwardThreads, sizeof(Shared));
    }
    if (dq_wanted) {
      launcher.launch(dq_conversion_kernel<Element, kConfig.head_dim>, rows / kDqRows,
                      kRowsThreads);
    }
  }
  return launcher.error;
}

}  // namespace jaxflash::sm90
