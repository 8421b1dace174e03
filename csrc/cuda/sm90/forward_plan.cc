// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "api/validate.h"
#include "common/device.h"
#include "jaxflash/attention.h"
#include "sm90/extents.h"
#include "sm90/launch.h"
#include "sm90/tensor_map.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {
namespace {

// Heads whose K and V stay in L2 together; one at a time where every item sees all keys
// and passes over them at about the same pace as its neighbours. Where rows are few,
// sections are short: their last items load more than they compute, and many heads
// would bring many of these together.
int64_t heads_per_section(const jaxflash_attention_params& params, int64_t q_tiles,
                          int num_sms) {
  if (!uneven(params)) return 1;
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  constexpr int64_t kElementBytes = 2;
  constexpr int64_t kFewItems = 2;  // for each SM
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t bytes = 2 * params.kv_len * params.head_dim * kElementBytes;
  const int64_t kv_heads = batch_size(params) * params.num_kv_heads;
  int64_t fitting = kCacheBytes / std::max<int64_t>(1, bytes);
  if (params.q_len <= kFewRows) {
    fitting = std::min(fitting, kFewItems * num_sms / (q_tiles * group));
  }
  const int64_t sections = divide_up(kv_heads, std::max<int64_t>(1, fitting));
  return divide_up(kv_heads, sections) * group;
}

}  // namespace

int forward_config(const jaxflash_attention_params& params) {
  return forward_config_index(static_cast<int>(params.head_dim),
                              params.out_low.data != nullptr, params.q_len <= kFewRows);
}

const char* forward_obstacle(const jaxflash_attention_params& params) {
  if (params.batch_rank > 1) return "more than one batch axis";
  if (params.head_dim % 8 != 0) return "the head dim is no multiple of 8";
  if (forward_config(params) < 0) return "the head dim is too large";
  const MatrixExtents query = query_extents(params);
  const MatrixExtents key = key_extents(params);
  if (!fits_tensor_map(params.q, query)) return "q: rows do not start on 16 bytes";
  if (params.kv_len > 0 && !fits_tensor_map(params.k, key)) {
    return "k: rows do not start on 16 bytes";
  }
  if (params.kv_len > 0 && !fits_tensor_map(params.v, key)) {
    return "v: rows do not start on 16 bytes";
  }
  if (!fits_tensor_map(params.out, query)) return "out: rows do not start on 16 bytes";
  if (params.out_low.data != nullptr && !chunks_aligned(params.out_low)) {
    return "out_low: rows do not start on 8 bytes";
  }
  return nullptr;
}

size_t forward_workspace_bytes(const jaxflash_attention_params&) {
  return sizeof(*ForwardArguments::num_taken);
}

void plan_forward(const jaxflash_attention_params& params, void* workspace, int num_sms,
                  ForwardArguments* arguments) {
  const ForwardConfig& config = kForwardConfigs[forward_config(params)];
  const int64_t q_tiles = divide_up(params.q_len, config.block_q());
  const int64_t heads = batch_size(params) * params.num_heads;
  const int64_t items = q_tiles * heads;
  ForwardArguments& a = *arguments;
  a.params = params;
  a.q_batch_step = batch_step(params.q);
  a.k_batch_step = batch_step(params.k);
  a.v_batch_step = batch_step(params.v);
  a.heads_per_kv_head = static_cast<int>(params.num_heads / params.num_kv_heads);
  a.num_q_tiles = static_cast<uint32_t>(q_tiles);
  a.num_batch_heads = static_cast<uint32_t>(heads);
  a.heads_per_section =
      static_cast<uint32_t>(heads_per_section(params, q_tiles, num_sms));
  a.num_work_items = static_cast<uint32_t>(items);
  a.num_blocks = static_cast<uint32_t>(std::min<int64_t>(items, num_sms));
  // Where items differ, a fixed share of them may be too much work for a block.
  a.num_taken = uneven(params) && items > num_sms
                    ? static_cast<unsigned int*>(workspace)
                    : nullptr;
}

cudaError_t make_forward_maps(ForwardArguments* arguments) {
  ForwardArguments& a = *arguments;
  const jaxflash_attention_params& params = a.params;
  const ForwardConfig& config = kForwardConfigs[forward_config(params)];
  const MatrixExtents query = query_extents(params);
  const MatrixExtents key = key_extents(params);
  cudaError_t error = make_tensor_map(params.q, query, kGroupRows, &a.q_map);
  const auto make = [&](const jaxflash_tensor& tensor, const MatrixExtents& extents,
                        int rows, CUtensorMap* map) {
    if (error == cudaSuccess) error = make_tensor_map(tensor, extents, rows, map);
  };
  make(params.out, query, kWarpRows, &a.out_map);
  // Without keys nothing is loaded, but the maps must be legal.
  a.k_map = a.v_map = a.q_map;
  if (params.kv_len > 0) {
    make(params.k, key, config.block_kv, &a.k_map);
    make(params.v, key, config.block_kv, &a.v_map);
  }
  return error;
}

}  // namespace jaxflash::sm90
