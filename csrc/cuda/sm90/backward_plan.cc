// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "api/validate.h"
#include "common/device.h"
#include "jaxflash/attention.h"
#include "sm90/backward_config.h"
#include "sm90/extents.h"
#include "sm90/launch_backward.h"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace jaxflash::sm90 {
namespace {

// A gradient leaves in 16-byte chunks or, as float32, by elements.
bool storable(const jaxflash_tensor& gradient, const MatrixExtents& extents) {
  return gradient.data == nullptr || gradient.dtype == JAXFLASH_FLOAT32 ||
         fits_tensor_map(gradient, extents);
}

int64_t padded_rows(const jaxflash_attention_params& params) {
  return divide_up(params.q_len, kRowPadding) * kRowPadding;
}

// Where the buffers of the workspace start.
struct BackwardWorkspace {
  size_t dq_accumulator;
  size_t lse;
  size_t delta;
  size_t large_lse;
  size_t dq_state;
  size_t num_tickets;
  size_t bytes;
};

BackwardWorkspace backward_workspace(const jaxflash_attention_params& params) {
  constexpr int64_t kFloatBytes = sizeof(float);
  constexpr int64_t kIntBytes = sizeof(int);
  const BackwardConfig& config = kBackwardConfigs[backward_config(params)];
  const int64_t rows = batch_size(params) * params.num_heads * padded_rows(params);
  const int64_t tiles = rows / config.block_q;
  const int64_t columns = config.separate_dq() ? 0 : config.head_dim;
  const bool may_take_turns = params.deterministic != 0 && !config.separate_dq();
  WorkspaceLayout layout;
  BackwardWorkspace workspace = {};
  workspace.dq_accumulator =
      layout.reserve(rows * columns * (may_take_turns ? kDqSums : 1) * kFloatBytes);
  workspace.lse = layout.reserve(rows * kFloatBytes);
  workspace.delta = layout.reserve(rows * kFloatBytes);
  workspace.large_lse = layout.reserve(tiles * kIntBytes);
  workspace.dq_state =
      layout.reserve(config.separate_dq() ? 0 : tiles * kDqSums * kIntBytes);
  workspace.num_tickets = layout.reserve(may_take_turns ? kIntBytes : 0);
  workspace.bytes = layout.bytes();
  return workspace;
}

// Whether blocks that add to a tile of dQ take turns.
bool by_turns(const jaxflash_attention_backward_params& params,
              const BackwardConfig& config) {
  return params.forward.deterministic != 0 && params.forward.q_len > 0 &&
         wants_dq(params) && !config.separate_dq();
}

KeyTileOrder key_tile_order(const jaxflash_attention_params& params,
                            const BackwardConfig& config, bool by_turns, int num_sms) {
  const int64_t tiles = divide_up(params.kv_len, config.block_kv);
  const int64_t heads = params.num_kv_heads * batch_size(params);
  // Where blocks differ in work: no more heads than it takes to give every SM a block.
  const int64_t section = uneven(params) ? num_sms / std::max<int64_t>(1, tiles) : 1;
  KeyTileOrder order = {};
  order.by_turns = by_turns;
  // In which direction rows go by depends on the place of a head among all; the bits of
  // a deterministic call should not.
  const bool grouped = params.num_heads > params.num_kv_heads;
  order.by_rows = params.is_causal != 0 && grouped && params.deterministic == 0;
  // Where work differs by the tile, the longest blocks start early enough to end with
  // the others, and late enough to wait for few.
  order.num_early = static_cast<uint32_t>(params.is_causal != 0 ? tiles * 3 / 8 : 0);
  order.num_tiles = static_cast<uint32_t>(tiles);
  order.num_heads = static_cast<uint32_t>(heads);
  order.heads_in_section =
      static_cast<uint32_t>(std::min(heads, std::max<int64_t>(1, section)));
  return order;
}

}  // namespace

int backward_config(const jaxflash_attention_params& params) {
  return backward_config_index(static_cast<int>(params.head_dim));
}

const char* backward_obstacle(const jaxflash_attention_backward_params& params) {
  const jaxflash_attention_params& forward = params.forward;
  if (forward.batch_rank > 1) return "more than one batch axis";
  if (forward.head_dim % 8 != 0) return "the head dim is no multiple of 8";
  if (backward_config(forward) < 0) return "the head dim is too large";
  const MatrixExtents query = query_extents(forward);
  const MatrixExtents key = key_extents(forward);
  const bool rows = forward.q_len > 0;
  const bool keys = forward.kv_len > 0;
  if (rows && !fits_tensor_map(forward.q, query)) {
    return "q: rows do not start on 16 bytes";
  }
  if (keys && !fits_tensor_map(forward.k, key)) {
    return "k: rows do not start on 16 bytes";
  }
  if (keys && !fits_tensor_map(forward.v, key)) {
    return "v: rows do not start on 16 bytes";
  }
  if (rows && !fits_tensor_map(forward.out, query)) {
    return "out: rows do not start on 16 bytes";
  }
  if (rows && forward.out_low.data != nullptr && !chunks_aligned(forward.out_low)) {
    return "out_low: rows do not start on 8 bytes";
  }
  if (rows && !fits_tensor_map(params.d_out, query)) {
    return "d_out: rows do not start on 16 bytes";
  }
  if (rows && !storable(params.dq, query)) return "dq: rows do not start on 16 bytes";
  if (keys && !storable(params.dk, key)) return "dk: rows do not start on 16 bytes";
  if (keys && !storable(params.dv, key)) return "dv: rows do not start on 16 bytes";
  return nullptr;
}

size_t backward_workspace_bytes(const jaxflash_attention_backward_params& params) {
  return backward_workspace(params.forward).bytes;
}

void plan_backward(const jaxflash_attention_backward_params& params, void* workspace,
                   int num_sms, BackwardArguments* arguments) {
  const jaxflash_attention_params& forward = params.forward;
  const BackwardConfig& config = kBackwardConfigs[backward_config(forward)];
  const BackwardWorkspace layout = backward_workspace(forward);
  auto* bytes = static_cast<unsigned char*>(workspace);
  BackwardArguments& a = *arguments;
  const bool turns = by_turns(params, config);
  a.params = params;
  a.order = key_tile_order(forward, config, turns, num_sms);
  a.group_size = static_cast<int>(forward.num_heads / forward.num_kv_heads);
  a.num_rows_padded = static_cast<uint32_t>(padded_rows(forward));
  a.num_query_heads = static_cast<uint32_t>(batch_size(forward) * forward.num_heads);
  a.dq_accumulator = wants_dq(params) && !config.separate_dq()
                         ? reinterpret_cast<float*>(bytes + layout.dq_accumulator)
                         : nullptr;
  a.lse = reinterpret_cast<float*>(bytes + layout.lse);
  a.delta = reinterpret_cast<float*>(bytes + layout.delta);
  a.large_lse = reinterpret_cast<int*>(bytes + layout.large_lse);
  a.dq_state = reinterpret_cast<int*>(bytes + layout.dq_state);
  a.num_tickets =
      turns ? reinterpret_cast<uint32_t*>(bytes + layout.num_tickets) : nullptr;
}

cudaError_t make_backward_maps(BackwardArguments* arguments) {
  BackwardArguments& a = *arguments;
  const jaxflash_attention_backward_params& params = a.params;
  const jaxflash_attention_params& forward = params.forward;
  const BackwardConfig& config = kBackwardConfigs[backward_config(forward)];
  constexpr int kStoredRows = 64;  // of a warpgroup
  const MatrixExtents query = query_extents(forward);
  const MatrixExtents key = key_extents(forward);
  cudaError_t error = cudaSuccess;
  const auto make = [&](const jaxflash_tensor& tensor, const MatrixExtents& extents,
                        int rows, CUtensorMap* map) {
    if (error != cudaSuccess || extents.rows == 0) return;
    error = make_tensor_map(tensor, extents, rows, map);
  };
  const auto make_target = [&](const jaxflash_tensor& gradient,
                               const MatrixExtents& extents, CUtensorMap* map) {
    if (gradient.data == nullptr || gradient.dtype == JAXFLASH_FLOAT32) return;
    make(gradient, extents, kStoredRows, map);
  };
  make(forward.q, query, config.block_q, &a.q);
  make(params.d_out, query, config.block_q, &a.d_out);
  make(forward.k, key, config.block_kv, &a.k);
  make(forward.v, key, config.block_kv, &a.v);
  make_target(params.dk, key, &a.dk);
  make_target(params.dv, key, &a.dv);
  if (config.separate_dq()) {
    make(forward.k, key, config.dq_block_kv, &a.dq_k);
    make(forward.v, key, config.dq_block_kv, &a.dq_v);
    make_target(params.dq, query, &a.dq);
  }
  // Nothing is loaded of what has no rows, but its maps must be legal.
  if (forward.q_len == 0) a.q = a.d_out = a.k;
  if (forward.kv_len == 0) a.k = a.v = a.dq_k = a.dq_v = a.q;
  return error;
}

}  // namespace jaxflash::sm90
