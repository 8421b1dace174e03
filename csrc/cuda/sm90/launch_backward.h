// SPDX-License-Identifier: Apache-2.0
//
// What the dispatcher hands to the Hopper backward kernels. Plain C++: no CUDA syntax
// here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/launcher.h"
#include "backward_config.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm90 {

// Which tile of keys of which head a block takes. Heads go in sections;
// within one, the blocks of all its heads that have the most work come first.
struct KeyTileOrder {
  uint32_t num_tiles;         // of one key/value head
  uint32_t num_heads;         // num_kv_heads * batch
  uint32_t heads_in_section;  // at most num_heads
  // Blocks take turns (backward_turns.cuh): first the tiles below num_early, then the
  // others, the later keys first of both.
  bool by_turns;
  uint32_t num_early;
  // Whether blocks take a tile of Q of all heads of the group before the next tile
  // (backward_walk.cuh); only in causal calls.
  bool by_rows;
};

struct BackwardArguments {
  jaxflash_attention_backward_params params;
  // 16-bit matrices as the copy engine sees them, in boxes of 64 columns and, of one
  // head, as many rows as said here.
  CUtensorMap q;      // block_q
  CUtensorMap d_out;  // block_q
  CUtensorMap k;      // block_kv
  CUtensorMap v;      // block_kv
  CUtensorMap dk;     // 64; not used where dk is float32 or absent
  CUtensorMap dv;     // 64; likewise
  CUtensorMap dq_k;   // dq_block_kv; only for the separate dQ kernel, like the next two
  CUtensorMap dq_v;   // dq_block_kv
  CUtensorMap dq;     // 64; not used where dq is float32 or absent
  KeyTileOrder order;
  int group_size;            // query heads of a key/value head
  uint32_t num_rows_padded;  // T rounded up to kRowPadding
  uint32_t num_query_heads;  // num_heads * batch
  // Workspace, all [batch, N, num_rows_padded, ...].
  // [kDqSums if by turns, batch, ..., head dim of the configuration]; NULL: not wanted
  float* dq_accumulator;
  float* lse;    // +inf: the row takes no part
  float* delta;  // rowsum(d_out o out) - d_lse
  // int32 [batch, N, num_rows_padded / block_q], of tiles of Q.
  int* large_lse;  // whether lse of the tile is in natural units, else in those of log2
  int* dq_state;   // [..., kDqSums]: who has added (backward_turns.cuh)
  uint32_t* num_tickets;  // one number: how many blocks have started, by turns
};

// Index into kBackwardConfigs that plan_backward plans for.
int backward_config(const jaxflash_attention_params& params);

// Fills the arguments, but the tensor maps, for a device with this many SMs. There must
// be heads and batch elements, and no obstacle.
void plan_backward(const jaxflash_attention_backward_params& params, void* workspace,
                   int num_sms, BackwardArguments* arguments);

// Fills the tensor maps of planned arguments; needs the driver.
cudaError_t make_backward_maps(BackwardArguments* arguments);

// kConfigIndex: of kBackwardConfigs.
template <class Element, int kConfigIndex>
void launch_backward(const BackwardArguments& arguments, Launcher& launcher);

}  // namespace jaxflash::sm90
