// SPDX-License-Identifier: Apache-2.0
#include "sm80/run.h"

#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "api/status.h"
#include "api/validate.h"
#include "common/instances.h"
#include "sm80/launch.h"
#include "sm80/tile_config.h"

namespace jaxflash::sm80 {
namespace {

constexpr bool all_head_dims_have_tiles() {
  for (int head_dim = 1; head_dim <= kMaxHeadDim; ++head_dim) {
    if (forward_config_index(head_dim, kSharedMemoryEverywhere) < 0) return false;
    if (backward_config_index(head_dim, kSharedMemoryEverywhere) < 0) return false;
  }
  return true;
}
static_assert(all_head_dims_have_tiles());

// Whether every row starts on a whole chunk of 8 elements, so that rows may be moved in
// chunks.
bool rows_aligned(int64_t columns, std::initializer_list<const jaxflash_tensor*> all) {
  constexpr int64_t kChunk = 8;
  if (columns % kChunk != 0) return false;
  for (const jaxflash_tensor* tensor : all) {
    if (tensor->data == nullptr || tensor->dtype == JAXFLASH_FLOAT32) continue;
    const size_t chunk_bytes = kChunk * dtype_size(tensor->dtype);
    if (reinterpret_cast<uintptr_t>(tensor->data) % chunk_bytes != 0) return false;
    if (tensor->strides[2] != 1) return false;
    for (int64_t stride : tensor->batch_strides) {
      if (stride % kChunk != 0) return false;
    }
    if (tensor->strides[0] % kChunk != 0 || tensor->strides[1] % kChunk != 0) {
      return false;
    }
  }
  return true;
}

int64_t padded_rows(const jaxflash_attention_params& params) {
  return divide_up(params.q_len, kRowPadding) * kRowPadding;
}

struct BackwardWorkspace {
  size_t dq_accumulator;
  size_t lse;
  size_t delta;
  size_t dq_turn;
  size_t bytes;
};

BackwardWorkspace backward_workspace(const jaxflash_attention_params& params) {
  const int64_t head_dim = padded_head_dim(static_cast<int>(params.head_dim));
  const int64_t rows = batch_size(params) * params.num_heads * padded_rows(params);
  WorkspaceLayout layout;
  BackwardWorkspace workspace = {};
  workspace.dq_accumulator = layout.reserve(rows * head_dim * 4);
  workspace.lse = layout.reserve(rows * 4);
  workspace.delta = layout.reserve(rows * 4);
  workspace.dq_turn = layout.reserve(params.deterministic ? rows / kMinBlockQ * 4 : 0);
  workspace.bytes = layout.bytes();
  return workspace;
}

}  // namespace

size_t forward_workspace_bytes(const jaxflash_attention_params&) { return 0; }

size_t backward_workspace_bytes(const jaxflash_attention_backward_params& params) {
  return backward_workspace(params.forward).bytes;
}

bool backward_is_reproducible(const jaxflash_attention_backward_params& params) {
  return params.forward.deterministic != 0 || !wants_dq(params);
}

jaxflash_status run_forward(const jaxflash_attention_params& params, void*,
                            const Device& device, Launcher& launcher) {
  const int config = forward_config_index(static_cast<int>(params.head_dim),
                                          device.shared_memory_of_sm);
  const int64_t q_tiles = divide_up(params.q_len, kForwardConfigs[config].block_q);
  const int64_t blocks = q_tiles * params.num_heads * batch_size(params);
  JAXFLASH_RETURN_IF_ERROR(check_blocks(blocks));
  ForwardArguments arguments = {};
  arguments.params = params;
  arguments.num_blocks = static_cast<uint32_t>(blocks);
  arguments.num_q_tiles = static_cast<uint32_t>(q_tiles);
  arguments.vector_access = rows_aligned(
      params.head_dim, {&params.q, &params.k, &params.v, &params.out, &params.out_low});
  visit_instance<std::size(kForwardConfigs)>(
      params.q.dtype, config, [&](auto element, auto index) {
        launch_forward<decltype(element), index>(arguments, launcher);
      });
  return check_cuda("launch of the forward kernel", launcher.error());
}

jaxflash_status run_backward(const jaxflash_attention_backward_params& params,
                             void* workspace, const Device& device,
                             Launcher& launcher) {
  const jaxflash_attention_params& forward = params.forward;
  const int config = backward_config_index(static_cast<int>(forward.head_dim),
                                           device.shared_memory_of_block);
  if (config < 0) {
    return fail(JAXFLASH_UNSUPPORTED,
                "head_dim %lld: no backward tile fits the %d bytes of shared memory of "
                "this device",
                static_cast<long long>(forward.head_dim),
                device.shared_memory_of_block);
  }
  const int64_t kv_tiles = divide_up(forward.kv_len, kBackwardConfigs[config].block_kv);
  const int64_t blocks = kv_tiles * forward.num_kv_heads * batch_size(forward);
  JAXFLASH_RETURN_IF_ERROR(check_blocks(blocks));
  constexpr int64_t kFewestRowsOfBlock = 8;  // of the passes over rows of Q
  JAXFLASH_RETURN_IF_ERROR(check_blocks(padded_rows(forward) / kFewestRowsOfBlock *
                                        forward.num_heads * batch_size(forward)));

  BackwardArguments arguments = {};
  arguments.params = params;
  arguments.num_rows_padded = static_cast<uint32_t>(padded_rows(forward));
  arguments.num_kv_tiles = static_cast<uint32_t>(kv_tiles);
  arguments.num_blocks = static_cast<uint32_t>(blocks);
  arguments.num_query_heads =
      static_cast<uint32_t>(batch_size(forward) * forward.num_heads);
  arguments.vector_access =
      rows_aligned(forward.head_dim,
                   {&forward.q, &forward.k, &forward.v, &forward.out, &forward.out_low,
                    &params.d_out, &params.dq, &params.dk, &params.dv});
  const BackwardWorkspace layout = backward_workspace(forward);
  auto* bytes = static_cast<unsigned char*>(workspace);
  arguments.dq_accumulator = reinterpret_cast<float*>(bytes + layout.dq_accumulator);
  arguments.lse = reinterpret_cast<float*>(bytes + layout.lse);
  arguments.delta = reinterpret_cast<float*>(bytes + layout.delta);
  arguments.dq_turn = reinterpret_cast<int*>(bytes + layout.dq_turn);
  visit_instance<std::size(kBackwardConfigs)>(
      forward.q.dtype, config, [&](auto element, auto index) {
        launch_backward<decltype(element), index>(arguments, launcher);
      });
  return check_cuda("launch of the backward kernels", launcher.error());
}

}  // namespace jaxflash::sm80
