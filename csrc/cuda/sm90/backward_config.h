// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the Hopper backward kernels, the only place that knows them. A head dim H
// runs in the smallest compiled one that holds it; the columns past H are zeros in
// shared memory and are never written.
#pragma once

#include <cstdint>

#include "block.h"

namespace jaxflash::sm90 {

// Up to H = 128 one kernel makes dK, dV and dQ (backward_fused.cuh). Beyond, its
// accumulators do not fit the registers: one kernel makes dK and dV and another one dQ
// (backward_dkv.cuh, backward_dq.cuh).
struct BackwardConfig {
  int head_dim;
  int block_q;      // rows of a tile of Q and dO
  int block_kv;     // keys that a block owns
  int dq_block_q;   // rows that a block of the dQ kernel owns; 0: no such kernel
  int dq_block_kv;  // keys of one of its tiles

  constexpr bool separate_dq() const { return dq_block_q != 0; }
};

constexpr BackwardConfig kBackwardConfigs[] = {
    {64, 128, 128, 0, 0},   {96, 64, 128, 0, 0},    {128, 64, 128, 0, 0},
    {192, 64, 64, 128, 64}, {256, 64, 64, 128, 48},
};

// Index of the configuration of a head dim, or -1.
constexpr int backward_config_index(int head_dim) {
  int index = 0;
  for (const BackwardConfig& config : kBackwardConfigs) {
    if (head_dim <= config.head_dim) return index;
    ++index;
  }
  return -1;
}

// Rows of the buffers in the workspace are padded to whole tiles of every kernel.
constexpr int kRowPadding = 128;

// One warpgroup that moves data, two that compute.
constexpr int kBackwardThreads = 3 * kWarpgroup;
// Registers of their threads: as many as 384 threads were launched with.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Sums of which a deterministic dQ consists (backward_turns.cuh).
constexpr int kDqSums = 2;

}  // namespace jaxflash::sm90
