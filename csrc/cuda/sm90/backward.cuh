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
//   row pass           delta and lse; nobody has added to dQ yet   backward_rows.cuh
//   H <= 128   fused   dK, dV, and dQ in float32                   backward_fused.cuh
//              convert dQ                                          backward_rows.cuh
//   beyond     dkv     dK and dV                                   backward_dkv.cuh
//              dq      dQ, from S and dP that it computes again    backward_dq.cuh
//
// Each but the first may start before the one before it has ended, and waits for its
// results itself (griddepcontrol.wait): what it does before that is free.
#pragma once

#include <cstdint>

#include "../common/device.h"
#include "../common/launcher.h"
#include "backward_config.h"
#include "backward_dkv.cuh"
#include "backward_dq.cuh"
#include "backward_fused.cuh"
#include "backward_rows.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

template <class Element, int kConfigIndex>
void launch_backward(const BackwardArguments& arguments, Launcher& launcher) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr TileShape kTile = {kConfig.block_q, kConfig.block_kv, kStages};
  const jaxflash_attention_backward_params& params = arguments.params;
  const int64_t rows =
      static_cast<int64_t>(arguments.num_query_heads) * arguments.num_rows_padded;
  const int64_t key_blocks =
      static_cast<int64_t>(arguments.order.num_tiles) * arguments.order.num_heads;
  const bool dkv_wanted = params.dk.data != nullptr || params.dv.data != nullptr;
  constexpr bool kEarlyStart = true;

  launcher.launch("backward_rows_kernel", {kConfig.block_q},
                  {rows / kConfig.block_q, kRowsThreads},
                  backward_rows_kernel<Element, kConfigIndex>, arguments);
  if constexpr (kConfig.separate_dq()) {
    using Shared = DkvShared<kConfigIndex>;
    using SharedDq = DqShared<kConfigIndex>;
    static_assert(sizeof(Shared) <= kSharedMemory);
    static_assert(sizeof(SharedDq) <= kSharedMemory);
    if (dkv_wanted) {
      launcher.launch(
          "backward_dkv_kernel", kTile, {key_blocks, kBackwardThreads, sizeof(Shared)},
          backward_dkv_kernel<Element, kConfigIndex>, arguments, kEarlyStart);
    }
    if (wants_dq(params)) {
      launcher.launch(
          "backward_dq_kernel", {kConfig.dq_block_q, kConfig.dq_block_kv, kStages},
          {rows / kConfig.dq_block_q, kBackwardThreads, sizeof(SharedDq)},
          backward_dq_kernel<Element, kConfigIndex>, arguments, kEarlyStart);
    }
  } else {
    using Shared = FusedShared<kConfigIndex>;
    static_assert(sizeof(Shared) <= kSharedMemory);
    if (dkv_wanted || wants_dq(params)) {
      launcher.launch("backward_fused_kernel", kTile,
                      {key_blocks, kBackwardThreads, sizeof(Shared)},
                      backward_fused_kernel<Element, kConfigIndex>, arguments,
                      kEarlyStart);
    }
    if (wants_dq(params)) {
      launcher.launch("dq_conversion_kernel", {kDqRows}, {rows / kDqRows, kRowsThreads},
                      dq_conversion_kernel<Element, kConfig.head_dim>, arguments,
                      kEarlyStart);
    }
  }
}

}  // namespace jaxflash::sm90
