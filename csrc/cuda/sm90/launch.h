// SPDX-License-Identifier: Apache-2.0
//
// What the dispatcher hands to the Hopper forward kernel. Plain C++: no CUDA syntax
// here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../common/launcher.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm90 {

struct ForwardArguments {
  // [columns, rows, heads, batch], boxes of one panel of a tile.
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap out_map;  // of the rows of a warp
  jaxflash_attention_params params;
  // 0 where the batch elements share a matrix, else 1.
  int q_batch_step;
  int k_batch_step;
  int v_batch_step;
  int heads_per_kv_head;
  // Work items are the tiles of Q of all heads and batch elements. The order takes
  // sections of heads one after the other, at most as many as have K and V in the L2
  // cache together, and within a section the late tiles, which see the most keys of a
  // causal call, first.
  uint32_t num_q_tiles;  // of one head
  uint32_t num_batch_heads;
  uint32_t heads_per_section;
  uint32_t num_work_items;
  uint32_t num_blocks;
  // How many items have been handed out beyond the first of each block, where blocks
  // take the next item when they get to it; nullptr where each takes every
  // num_blocks-th.
  unsigned int* num_taken;
};

// Why the Hopper kernel does not serve validated parameters; nullptr where it does.
const char* forward_obstacle(const jaxflash_attention_params& params);

// Index into kForwardConfigs that plan_forward plans for.
int forward_config(const jaxflash_attention_params& params);

// Workspace, 128-byte aligned device memory. Needs no device.
size_t forward_workspace_bytes(const jaxflash_attention_params& params);

// Fills the arguments, but the tensor maps, for a device with this many SMs. There must
// be rows and no obstacle.
void plan_forward(const jaxflash_attention_params& params, void* workspace, int num_sms,
                  ForwardArguments* arguments);

// Fills the tensor maps of planned arguments; needs the driver.
cudaError_t make_forward_maps(ForwardArguments* arguments);

// kConfigIndex: of kForwardConfigs.
template <class Element, int kConfigIndex>
void launch_forward(const ForwardArguments& arguments, Launcher& launcher);

}  // namespace jaxflash::sm90
