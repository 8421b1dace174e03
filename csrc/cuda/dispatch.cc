// SPDX-License-Identifier: Apache-2.0
//
// C API entry points of CUDA: checks, the choice of the kernel, and the launch. The
// tables below are the only place that knows which kernels were compiled.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "api/status.h"
#include "api/validate.h"
#include "jaxflash/attention.h"
#include "sm80/launch.h"
#include "sm80/tile_config.h"

namespace jaxflash {
namespace {

constexpr Support kSupport = {/*backend=*/"cuda", /*max_head_dim=*/256};
// What XLA promises for its buffers.
constexpr size_t kWorkspaceAlignment = 128;

using ForwardLauncher = cudaError_t (*)(const sm80::ForwardArguments&, cudaStream_t);
using BackwardLauncher = cudaError_t (*)(const sm80::BackwardArguments&, cudaStream_t);

template <class Element, int... kIndex>
constexpr auto forward_launchers(std::integer_sequence<int, kIndex...>) {
  return std::array{
      static_cast<ForwardLauncher>(sm80::launch_forward<Element, kIndex>)...};
}

template <class Element, int... kIndex>
constexpr auto backward_launchers(std::integer_sequence<int, kIndex...>) {
  return std::array{
      static_cast<BackwardLauncher>(sm80::launch_backward<Element, kIndex>)...};
}

ForwardLauncher forward_launcher(int32_t dtype, int config) {
  using Indices =
      std::make_integer_sequence<int,
                                 static_cast<int>(std::size(sm80::kForwardConfigs))>;
  static constexpr auto kBfloat16 = forward_launchers<__nv_bfloat16>(Indices{});
  static constexpr auto kFloat16 = forward_launchers<__half>(Indices{});
  return dtype == JAXFLASH_BFLOAT16 ? kBfloat16[config] : kFloat16[config];
}

BackwardLauncher backward_launcher(int32_t dtype, int config) {
  using Indices =
      std::make_integer_sequence<int,
                                 static_cast<int>(std::size(sm80::kBackwardConfigs))>;
  static constexpr auto kBfloat16 = backward_launchers<__nv_bfloat16>(Indices{});
  static constexpr auto kFloat16 = backward_launchers<__half>(Indices{});
  return dtype == JAXFLASH_BFLOAT16 ? kBfloat16[config] : kFloat16[config];
}

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Whether every row starts on 16 bytes, so that rows may be moved in 16-byte chunks.
bool rows_aligned(int64_t columns, std::initializer_list<const jaxflash_tensor*> all) {
  constexpr int64_t kChunk = 8;
  if (columns % kChunk != 0) return false;
  for (const jaxflash_tensor* tensor : all) {
    if (tensor->data == nullptr || tensor->dtype == JAXFLASH_FLOAT32) continue;
    if (reinterpret_cast<uintptr_t>(tensor->data) % 16 != 0) return false;
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

struct Matrix {
  const char* name;
  const jaxflash_tensor* tensor;
  int64_t rows;
};

// The kernels read rows as they lie in memory.
jaxflash_status check_unit_strides(int64_t columns,
                                   std::initializer_list<Matrix> matrices) {
  for (const auto& [name, tensor, rows] : matrices) {
    if (tensor->data == nullptr || rows == 0 || columns == 1) continue;
    if (tensor->strides[2] == 1) continue;
    return fail(JAXFLASH_UNSUPPORTED,
                "%s: the CUDA kernels need a head dim of stride 1, got stride %lld",
                name, static_cast<long long>(tensor->strides[2]));
  }
  return JAXFLASH_OK;
}

jaxflash_status cuda_failure(const char* where, cudaError_t error) {
  // The runtime keeps the error for whoever asks next: the launch of another call.
  cudaGetLastError();
  return fail(JAXFLASH_INTERNAL, "%s: %s: %s (%d)", where, cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<int>(error));
}

struct DeviceLimits {
  int shared_memory_of_block;  // at most, opted in
  int shared_memory_of_sm;
};

// Of the current device, which must be able to run the kernels.
jaxflash_status device_limits(DeviceLimits* limits) {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  read(&limits->shared_memory_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(&limits->shared_memory_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(&major, cudaDevAttrComputeCapabilityMajor);
  if (error != cudaSuccess) return cuda_failure("device attributes", error);
  if (major < 8) {
    return fail(JAXFLASH_UNAVAILABLE,
                "the CUDA kernels need compute capability 8.0 or later, this device "
                "has %d.x",
                major);
  }
  return JAXFLASH_OK;
}

jaxflash_status check_blocks(int64_t blocks) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  if (blocks <= kMaxBlocks) return JAXFLASH_OK;
  return fail(JAXFLASH_UNSUPPORTED,
              "batch * heads * tiles: at most %lld thread blocks, got %lld",
              static_cast<long long>(kMaxBlocks), static_cast<long long>(blocks));
}

bool no_rows(const jaxflash_attention_params& params) {
  return batch_size(params) == 0 || params.num_heads == 0;
}

// Where the buffers of the backward pass start, each on a multiple of the alignment.
struct BackwardWorkspace {
  size_t dq_accumulator;
  size_t lse;
  size_t delta;
  size_t dq_turn;
  size_t bytes;
};

int64_t padded_rows(const jaxflash_attention_params& params) {
  return divide_up(params.q_len, sm80::kRowPadding) * sm80::kRowPadding;
}

BackwardWorkspace backward_workspace(const jaxflash_attention_params& params) {
  const int64_t head_dim = sm80::padded_head_dim(static_cast<int>(params.head_dim));
  const int64_t rows = batch_size(params) * params.num_heads * padded_rows(params);
  BackwardWorkspace workspace = {};
  const auto reserve = [&](int64_t bytes) {
    const size_t start = workspace.bytes;
    workspace.bytes += static_cast<size_t>(divide_up(bytes, kWorkspaceAlignment)) *
                       kWorkspaceAlignment;
    return start;
  };
  workspace.dq_accumulator = reserve(rows * head_dim * 4);
  workspace.lse = reserve(rows * 4);
  workspace.delta = reserve(rows * 4);
  workspace.dq_turn = reserve(params.deterministic ? rows / sm80::kMinBlockQ * 4 : 0);
  return workspace;
}

}  // namespace
}  // namespace jaxflash

jaxflash_status jaxflash_attention_forward_workspace_cuda(
    const jaxflash_attention_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(validate_forward(params));
  JAXFLASH_RETURN_IF_ERROR(check_support(*params, kSupport));
  if (bytes == nullptr) {
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  }
  *bytes = 0;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_forward_cuda(const jaxflash_attention_params* params,
                                                void* workspace, size_t workspace_bytes,
                                                void* stream) {
  using namespace jaxflash;
  (void)workspace;
  (void)workspace_bytes;
  JAXFLASH_RETURN_IF_ERROR(validate_forward(params));
  JAXFLASH_RETURN_IF_ERROR(check_support(*params, kSupport));
  JAXFLASH_RETURN_IF_ERROR(
      check_unit_strides(params->head_dim, {{"q", &params->q, params->q_len},
                                            {"k", &params->k, params->kv_len},
                                            {"v", &params->v, params->kv_len},
                                            {"out", &params->out, params->q_len}}));
  if (no_rows(*params) || params->q_len == 0) return JAXFLASH_OK;

  DeviceLimits limits = {};
  JAXFLASH_RETURN_IF_ERROR(device_limits(&limits));
  const int config = sm80::forward_config_index(static_cast<int>(params->head_dim),
                                                limits.shared_memory_of_sm);
  const int64_t q_tiles =
      divide_up(params->q_len, sm80::kForwardConfigs[config].block_q);
  const int64_t blocks = q_tiles * params->num_heads * batch_size(*params);
  JAXFLASH_RETURN_IF_ERROR(check_blocks(blocks));
  sm80::ForwardArguments arguments = {};
  arguments.params = *params;
  arguments.num_blocks = static_cast<uint32_t>(blocks);
  arguments.num_q_tiles = static_cast<uint32_t>(q_tiles);
  arguments.vector_access = rows_aligned(
      params->head_dim, {&params->q, &params->k, &params->v, &params->out});
  const cudaError_t error = forward_launcher(params->q.dtype, config)(
      arguments, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? JAXFLASH_OK : cuda_failure("forward_sm80", error);
}

jaxflash_status jaxflash_attention_backward_workspace_cuda(
    const jaxflash_attention_backward_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(validate_backward(params));
  JAXFLASH_RETURN_IF_ERROR(check_support(params->forward, kSupport));
  if (bytes == nullptr) {
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  }
  *bytes = backward_workspace(params->forward).bytes;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_backward_cuda(
    const jaxflash_attention_backward_params* params, void* workspace,
    size_t workspace_bytes, void* stream) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(validate_backward(params));
  const jaxflash_attention_params& forward = params->forward;
  JAXFLASH_RETURN_IF_ERROR(check_support(forward, kSupport));
  JAXFLASH_RETURN_IF_ERROR(
      check_unit_strides(forward.head_dim, {{"q", &forward.q, forward.q_len},
                                            {"k", &forward.k, forward.kv_len},
                                            {"v", &forward.v, forward.kv_len},
                                            {"out", &forward.out, forward.q_len},
                                            {"d_out", &params->d_out, forward.q_len},
                                            {"dq", &params->dq, forward.q_len},
                                            {"dk", &params->dk, forward.kv_len},
                                            {"dv", &params->dv, forward.kv_len}}));
  const BackwardWorkspace layout = backward_workspace(forward);
  JAXFLASH_RETURN_IF_ERROR(validate_workspace(workspace, workspace_bytes, layout.bytes,
                                              kWorkspaceAlignment));
  if (no_rows(forward)) return JAXFLASH_OK;

  DeviceLimits limits = {};
  JAXFLASH_RETURN_IF_ERROR(device_limits(&limits));
  const int config = sm80::backward_config_index(static_cast<int>(forward.head_dim),
                                                 limits.shared_memory_of_block);
  if (config < 0) {
    return fail(JAXFLASH_UNSUPPORTED,
                "head_dim %lld: no backward tile fits the %d bytes of shared memory of "
                "this device",
                static_cast<long long>(forward.head_dim),
                limits.shared_memory_of_block);
  }
  const int64_t kv_tiles =
      divide_up(forward.kv_len, sm80::kBackwardConfigs[config].block_kv);
  const int64_t blocks = kv_tiles * forward.num_kv_heads * batch_size(forward);
  JAXFLASH_RETURN_IF_ERROR(check_blocks(blocks));

  sm80::BackwardArguments arguments = {};
  arguments.params = *params;
  arguments.num_rows_padded = static_cast<uint32_t>(padded_rows(forward));
  arguments.num_kv_tiles = static_cast<uint32_t>(kv_tiles);
  arguments.num_blocks = static_cast<uint32_t>(blocks);
  arguments.num_query_heads =
      static_cast<uint32_t>(batch_size(forward) * forward.num_heads);
  arguments.vector_access = rows_aligned(
      forward.head_dim, {&forward.q, &forward.k, &forward.v, &forward.out,
                         &params->d_out, &params->dq, &params->dk, &params->dv});
  auto* bytes = static_cast<unsigned char*>(workspace);
  arguments.dq_accumulator = reinterpret_cast<float*>(bytes + layout.dq_accumulator);
  arguments.lse = reinterpret_cast<float*>(bytes + layout.lse);
  arguments.delta = reinterpret_cast<float*>(bytes + layout.delta);
  arguments.dq_turn = reinterpret_cast<int*>(bytes + layout.dq_turn);
  const cudaError_t error = backward_launcher(forward.q.dtype, config)(
      arguments, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? JAXFLASH_OK : cuda_failure("backward_sm80", error);
}
