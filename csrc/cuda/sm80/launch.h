// SPDX-License-Identifier: Apache-2.0
//
// What the dispatcher hands to the portable kernels. Plain C++: no CUDA syntax here.
#pragma once

#include <cstdint>

#include "../common/launcher.h"
#include "jaxflash/attention.h"

namespace jaxflash::sm80 {

struct ForwardArguments {
  jaxflash_attention_params params;
  uint32_t num_blocks;   // num_q_tiles * num_heads * batch
  uint32_t num_q_tiles;  // of one head
  bool vector_access;    // rows of q, k, v, out and out_low start on whole chunks
};

// kConfigIndex: of kForwardConfigs.
template <class Element, int kConfigIndex>
void launch_forward(const ForwardArguments& arguments, Launcher& launcher);

struct BackwardArguments {
  jaxflash_attention_backward_params params;
  uint32_t num_rows_padded;  // T rounded up to kRowPadding
  uint32_t num_kv_tiles;     // of one key/value head
  uint32_t num_blocks;       // num_kv_tiles * num_kv_heads * batch
  uint32_t num_query_heads;  // num_heads * batch
  bool vector_access;        // rows of all but float32 matrices start on whole chunks
  // Workspace, all float32 [batch, N, num_rows_padded, ...].
  float* dq_accumulator;  // [..., head dim of the configuration]
  float* lse;             // of rows that take part, +inf of the others
  float* delta;           // rowsum(d_out o out) - d_lse
  // int32 [batch, N, num_rows_padded / kMinBlockQ], only for deterministic calls: how
  // many blocks have added their part to a tile of dQ.
  int* dq_turn;
};

// kConfigIndex: of kBackwardConfigs.
template <class Element, int kConfigIndex>
void launch_backward(const BackwardArguments& arguments, Launcher& launcher);

}  // namespace jaxflash::sm80
