// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the Hopper forward kernels, the only place that knows them. A head dim H
// runs in the smallest compiled one that holds it; the copy engine fills the columns
// past H with zeros and never reads or writes them in global memory.
#pragma once

#include "block.h"

namespace jaxflash::sm90 {

constexpr int kGroupRows = 64;  // of Q, that a consumer owns
constexpr int kWarpRows = 16;   // and each of its warps

struct ForwardConfig {
  int head_dim;
  int num_consumers;  // warpgroups that compute, kGroupRows each
  int block_kv;
  int num_stages;       // of K and V
  int num_query_slots;  // of kGroupRows; those past num_consumers are filled ahead
  bool ping_pong;       // the consumers take turns on the tensor cores
  bool own_tiles;       // but not in causal calls, where each leaves out what its own
                        // rows do not see
  bool pin_wait;        // keep exp before the wait for O, see forward.cuh
  int consumer_registers;
  int loader_registers;
  // P V has eight more columns, of ones in place of V: the row sums of the rounded P,
  // which calls with out_low need. To add them up would cost five times as much.
  bool sum_columns = false;
  bool few_rows = false;  // for calls of at most kFewRows

  constexpr int block_q() const { return kGroupRows * num_consumers; }
  // Whether a slot of Q is free for long enough for out to leave through it.
  constexpr bool out_through_query() const {
    return num_query_slots >= 2 * num_consumers;
  }
  constexpr int max_tiles_left_out() const {
    return own_tiles ? ((num_consumers - 1) * kGroupRows + block_kv - 1) / block_kv : 0;
  }
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
    //  H WG  BN stages slots turns own pin registers  sums  few
    {64, 3, 128, 2, 6, true, false, false, 160, 32},
    {64, 3, 128, 2, 6, true, false, false, 160, 32, true},
    {64, 4, 64, 4, 8, true, true, false, 112, 32, false, true},
    {64, 4, 64, 4, 8, true, true, false, 112, 32, true, true},
    {96, 2, 128, 2, 6, true, false, true, 232, 40},
    {128, 2, 128, 2, 6, true, false, true, 232, 40},
    {128, 2, 128, 2, 4, true, false, true, 232, 40, true},
    {192, 2, 112, 2, 2, false, true, true, 232, 40},
    {256, 2, 80, 2, 2, false, true, false, 232, 40},
    {256, 2, 64, 2, 3, false, true, false, 232, 40, false, true},
};

// With few tiles of keys per item, what comes before and after them counts: more
// consumers hide more of it.
constexpr int kFewRows = 1024;

// Index of the configuration of a head dim, or -1: the most special one that may be.
constexpr int forward_config_index(int head_dim, bool sum_columns, bool few_rows) {
  int found = -1;
  int index = 0;
  for (const ForwardConfig& config : kForwardConfigs) {
    const bool smallest =
        found < 0 || config.head_dim == kForwardConfigs[found].head_dim;
    if (head_dim <= config.head_dim && smallest &&
        (sum_columns || !config.sum_columns) && (few_rows || !config.few_rows)) {
      found = index;
    }
    ++index;
  }
  return found;
}

}  // namespace jaxflash::sm90
