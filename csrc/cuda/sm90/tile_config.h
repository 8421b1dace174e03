// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the Hopper forward kernels, the only place that knows them. A head dim H
// runs in the smallest compiled one that holds it; the copy engine fills the columns
// past H with zeros and never reads or writes them in global memory.
#pragma once

namespace jaxflash::sm90 {

// What a block may use of an SM.
constexpr int kSharedMemory = 232448;
constexpr int kRegisters = 65536;

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

  constexpr int block_q() const { return 64 * num_consumers; }
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
    //  H  WG  BN stages  out   turns   pin   lazy  registers
    {64, 3, 128, 2, true, true, false, true, 160, 32},
    {96, 2, 128, 2, true, true, true, true, 232, 40},
    {128, 2, 128, 2, true, true, true, true, 232, 40},
    {192, 2, 112, 2, false, false, true, true, 232, 40},
    {256, 2, 64, 2, false, false, false, true, 232, 40},
};

// Index of the configuration of a head dim, or -1.
constexpr int forward_config_index(int head_dim) {
  int index = 0;
  for (const ForwardConfig& config : kForwardConfigs) {
    if (head_dim <= config.head_dim) return index;
    ++index;
  }
  return -1;
}

}  // namespace jaxflash::sm90
