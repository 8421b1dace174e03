// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the portable kernels, the only place that knows them. A head dim H runs in
// the smallest compiled one that holds it; the columns past H are zeros in shared
// memory and are never read or written in global memory.
#pragma once

namespace jaxflash::sm80 {

// Shared memory that a block may use on 8.6, 8.9 and 12.0, the smallest from sm_80 on.
constexpr int kSharedMemoryEverywhere = 101376;

struct ForwardConfig {
  int head_dim;
  int block_q;
  int block_kv;
  int num_warps;
  int num_stages;  // of K and V

  constexpr int num_threads() const { return num_warps * 32; }
  // 16-row fragments of Q that each warp owns.
  constexpr int row_tiles() const { return block_q / (16 * num_warps); }
  constexpr int kv_tile_bytes() const { return block_kv * head_dim * 2; }
  // Q and the stages of (K, V).
  constexpr int shared_bytes() const {
    return block_q * head_dim * 2 + num_stages * 2 * kv_tile_bytes();
  }
};

constexpr ForwardConfig kForwardConfigs[] = {
    {32, 128, 128, 4, 2}, {64, 128, 128, 4, 2}, {64, 128, 128, 4, 1},
    {96, 128, 64, 4, 2},  {96, 128, 64, 4, 1},  {128, 128, 64, 4, 2},
    {128, 128, 64, 4, 1}, {192, 64, 64, 4, 1},  {256, 64, 64, 4, 1},
};

// Of each block the hardware keeps 1 KB of shared memory.
constexpr int kReservedSharedMemory = 1024;

// Index of the configuration of a head dim, or -1: the first of which two blocks fit an
// SM with this much shared memory, so that one computes while the other waits, else the
// last.
constexpr int forward_config_index(int head_dim, int shared_memory_of_sm) {
  int found = -1;
  int index = 0;
  for (const ForwardConfig& config : kForwardConfigs) {
    if (head_dim <= config.head_dim &&
        (found < 0 || config.head_dim == kForwardConfigs[found].head_dim)) {
      found = index;
      if (2 * (config.shared_bytes() + kReservedSharedMemory) <= shared_memory_of_sm) {
        break;
      }
    }
    ++index;
  }
  return found;
}

// Backward: a block owns block_kv keys. Its warps form a grid: along the keys each owns
// 16 * row_tiles of them; the `split` warps of one such row share its work by columns,
// of the scores and of dK and dV.
struct BackwardConfig {
  int head_dim;
  int block_q;
  int block_kv;
  int row_tiles;
  int split;
  int num_stages;  // of Q and dO

  constexpr int num_warps() const { return block_kv / (16 * row_tiles) * split; }
  constexpr int num_threads() const { return num_warps() * 32; }
  // dQ: warps along the rows of Q, with two 16-row tiles each where the columns that
  // this leaves to a warp are whole pairs of chunks.
  constexpr int dq_row_tiles() const {
    const int row_warps = block_q / 32;
    return num_warps() % row_warps == 0 &&
                   head_dim * row_warps % (16 * num_warps()) == 0
               ? 2
               : 1;
  }
  constexpr int dq_row_warps() const { return block_q / (16 * dq_row_tiles()); }

  constexpr int kv_tile_bytes() const { return block_kv * head_dim * 2; }
  constexpr int q_tile_bytes() const { return block_q * head_dim * 2; }
  constexpr int rows_bytes() const { return block_q * 4; }  // of lse or delta
  constexpr int stage_bytes() const { return 2 * (q_tile_bytes() + rows_bytes()); }
  constexpr int score_tile_bytes() const { return block_q * block_kv * 2; }
  // K, V, dS, P and the stages of (Q, dO, lse, delta).
  constexpr int shared_bytes() const {
    return 2 * kv_tile_bytes() + 2 * score_tile_bytes() + num_stages * stage_bytes();
  }
};

constexpr BackwardConfig kBackwardConfigs[] = {
    {32, 64, 128, 2, 2, 2}, {64, 128, 128, 2, 2, 2}, {64, 64, 128, 2, 2, 2},
    {96, 64, 128, 2, 2, 2}, {96, 64, 64, 2, 2, 1},   {128, 64, 128, 2, 2, 2},
    {128, 64, 64, 2, 2, 1}, {192, 64, 64, 2, 4, 2},  {192, 32, 32, 1, 2, 1},
    {256, 64, 64, 2, 4, 2}, {256, 64, 64, 2, 4, 1},  {256, 32, 32, 1, 2, 1},
};

// Index of the first configuration that fits the shared memory of a block, or -1.
constexpr int backward_config_index(int head_dim, int shared_memory) {
  int wanted = 0;
  int index = 0;
  for (const BackwardConfig& config : kBackwardConfigs) {
    if (wanted == 0 && head_dim <= config.head_dim) wanted = config.head_dim;
    if (config.head_dim == wanted && config.shared_bytes() <= shared_memory) {
      return index;
    }
    ++index;
  }
  return -1;
}

// Smallest compiled head dim that holds this one.
constexpr int padded_head_dim(int head_dim) {
  return kForwardConfigs[forward_config_index(head_dim, 0)].head_dim;
}

// Rows of the float32 dQ accumulator, lse and delta are padded to whole tiles.
constexpr int kRowPadding = 128;

constexpr int kMinBlockQ = 32;  // of kBackwardConfigs

}  // namespace jaxflash::sm80
