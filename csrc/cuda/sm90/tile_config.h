// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the Hopper forward kernels, the only place that knows them. A head dim H
// runs in the smallest compiled one that holds it; the copy engine fills the columns
// past H with zeros and never reads or writes them in global memory.
#pragma once

#include "block.h"

namespace jaxflash::sm90 {

struct ForwardConfig {
  int head_dim;
  int num_consumers;  // warpgroups that compute, 64 rows of Q each
  int block_kv;
  int num_stages;     // of K and V
  bool own_out_tile;  // out does not leave through the tile of Q, which is free earlier
  bool ping_pong;     // the consumers take turns on the tensor cores
  bool pin_wait;      // keep exp before the wait for O, see forward.cuh
  bool lazy_rescale;  // rescale O only where the maximum grew by more than 2^8
  int consumer_registers;
  int loader_registers;
  // P V has eight more columns, of ones in place of V: the row sums of the rounded P,
  // which calls with out_low need. To add them up would cost five times as much.
  bool sum_columns = false;
  bool short_causal = false;  // for causal calls of at most kShortRows

  constexpr int block_q() const { return 64 * num_consumers; }
  constexpr int output_columns() const { return head_dim + (sum_columns ? 8 : 0); }
  constexpr int num_threads() const { return 128 * (num_consumers + 1); }
  // The warpgroups start with equal shares and then pass registers on.
  constexpr int registers_at_launch() const {
    return kRegisters / num_threads() / 8 * 8;
  }
  constexpr bool registers_suffice() const {
    return num_consumers * consumer_registers + loader_registers <=
           (num_consumers + 1) * registers_at_launch();
  }
};

// What pays was measured: see docs/kernels.md.
constexpr ForwardConfig kForwardConfigs[] = {
    //  H  WG  BN stages  out   turns   pin   lazy  registers  sums  short
    {64, 3, 128, 2, true, true, false, true, 160, 32},
    {64, 3, 128, 2, true, true, false, true, 160, 32, true},
    {64, 2, 128, 2, true, true, false, true, 232, 40, false, true},
    {64, 2, 128, 2, true, true, false, true, 232, 40, true, true},
    {96, 2, 128, 2, true, true, true, true, 232, 40},
    {128, 2, 128, 2, true, true, true, true, 232, 40},
    {128, 2, 128, 2, true, true, true, true, 232, 40, true},
    {192, 2, 112, 2, false, false, true, true, 232, 40},
    {256, 2, 64, 2, false, false, false, true, 232, 40},
};

// Tiles of 192 rows leave much of the triangle of so few to hidden scores.
constexpr int kShortRows = 1024;

// Index of the configuration of a head dim, or -1: the most special one that may be.
constexpr int forward_config_index(int head_dim, bool sum_columns, bool short_causal) {
  int found = -1;
  int index = 0;
  for (const ForwardConfig& config : kForwardConfigs) {
    const bool smallest =
        found < 0 || config.head_dim == kForwardConfigs[found].head_dim;
    if (head_dim <= config.head_dim && smallest &&
        (sum_columns || !config.sum_columns) &&
        (short_causal || !config.short_causal)) {
      found = index;
    }
    ++index;
  }
  return found;
}

}  // namespace jaxflash::sm90
