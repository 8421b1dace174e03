// SPDX-License-Identifier: Apache-2.0
//
// C API entry points of CUDA: checks, and the choice of the kernel family.
//
// The portable kernels (sm80/) serve every call on every device. On compute capability
// 9.0 the Hopper kernels (sm90/) serve all calls but those whose layout the copy engine
// cannot read. The environment variable JAXFLASH_CUDA_KERNELS forces a family: "sm80"
// leaves the Hopper kernels alone, "sm90" refuses devices that are not Hopper.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "api/status.h"
#include "api/validate.h"
#include "common/device.h"
#include "jaxflash/attention.h"
#include "sm80/run.h"
#include "sm90/run.h"

namespace jaxflash {
namespace {

constexpr Support kSupport = {/*backend=*/"cuda", kMaxHeadDim};

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

jaxflash_status check_forward(const jaxflash_attention_params* params) {
  JAXFLASH_RETURN_IF_ERROR(validate_forward(params));
  JAXFLASH_RETURN_IF_ERROR(check_support(*params, kSupport));
  return check_unit_strides(params->head_dim,
                            {{"q", &params->q, params->q_len},
                             {"k", &params->k, params->kv_len},
                             {"v", &params->v, params->kv_len},
                             {"out", &params->out, params->q_len},
                             {"out_low", &params->out_low, params->q_len}});
}

jaxflash_status check_backward(const jaxflash_attention_backward_params* params) {
  JAXFLASH_RETURN_IF_ERROR(validate_backward(params));
  const jaxflash_attention_params& forward = params->forward;
  JAXFLASH_RETURN_IF_ERROR(check_support(forward, kSupport));
  return check_unit_strides(forward.head_dim,
                            {{"q", &forward.q, forward.q_len},
                             {"k", &forward.k, forward.kv_len},
                             {"v", &forward.v, forward.kv_len},
                             {"out", &forward.out, forward.q_len},
                             {"out_low", &forward.out_low, forward.q_len},
                             {"d_out", &params->d_out, forward.q_len},
                             {"dq", &params->dq, forward.q_len},
                             {"dk", &params->dk, forward.kv_len},
                             {"dv", &params->dv, forward.kv_len}});
}

enum class Kernels { kAutomatic, kPortable, kHopper };

jaxflash_status read_setting(Kernels* kernels) {
  const char* value = std::getenv("JAXFLASH_CUDA_KERNELS");
  const std::string_view text = value == nullptr ? "" : value;
  if (text.empty() || text == "auto") {
    *kernels = Kernels::kAutomatic;
  } else if (text == "sm80") {
    *kernels = Kernels::kPortable;
  } else if (text == "sm90") {
    *kernels = Kernels::kHopper;
  } else {
    return fail(JAXFLASH_INVALID_ARGUMENT,
                "JAXFLASH_CUDA_KERNELS must be auto, sm80 or sm90, got %s", value);
  }
  return JAXFLASH_OK;
}

// `obstacle` is what keeps the Hopper kernels from serving the call.
jaxflash_status choose(const char* obstacle, const Device& device, Kernels* chosen) {
  JAXFLASH_RETURN_IF_ERROR(read_setting(chosen));
  const bool is_hopper = device.compute_capability == 90;
  if (*chosen == Kernels::kHopper && !is_hopper) {
    return fail(JAXFLASH_UNAVAILABLE,
                "JAXFLASH_CUDA_KERNELS=sm90 needs a device of compute capability 9.0, "
                "got %d.%d",
                device.compute_capability / 10, device.compute_capability % 10);
  }
  if (!is_hopper || obstacle != nullptr) *chosen = Kernels::kPortable;
  if (*chosen == Kernels::kAutomatic) *chosen = Kernels::kHopper;
  return JAXFLASH_OK;
}

// What a call needs on whatever device it will run, which a query does not know.
jaxflash_status workspace_for_any_device(size_t portable, size_t hopper,
                                         size_t* bytes) {
  if (bytes == nullptr) {
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  }
  Kernels kernels = Kernels::kAutomatic;
  JAXFLASH_RETURN_IF_ERROR(read_setting(&kernels));
  *bytes = kernels == Kernels::kPortable ? portable : std::max(portable, hopper);
  return JAXFLASH_OK;
}

bool no_heads(const jaxflash_attention_params& params) {
  return batch_size(params) == 0 || params.num_heads == 0;
}

}  // namespace
}  // namespace jaxflash

jaxflash_status jaxflash_attention_forward_workspace_cuda(
    const jaxflash_attention_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_forward(params));
  return workspace_for_any_device(0, sm90::forward_workspace_bytes(*params), bytes);
}

jaxflash_status jaxflash_attention_forward_cuda(const jaxflash_attention_params* params,
                                                void* workspace, size_t workspace_bytes,
                                                void* stream) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_forward(params));
  if (no_heads(*params) || params->q_len == 0) return JAXFLASH_OK;
  Device device = {};
  JAXFLASH_RETURN_IF_ERROR(find_device(&device));
  Kernels kernels = Kernels::kAutomatic;
  JAXFLASH_RETURN_IF_ERROR(choose(sm90::forward_obstacle(*params), device, &kernels));
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (kernels == Kernels::kPortable) {
    return sm80::run_forward(*params, device, cuda_stream);
  }
  JAXFLASH_RETURN_IF_ERROR(validate_workspace(workspace, workspace_bytes,
                                              sm90::forward_workspace_bytes(*params),
                                              kWorkspaceAlignment));
  return sm90::run_forward(*params, workspace, device, cuda_stream);
}

jaxflash_status jaxflash_attention_backward_workspace_cuda(
    const jaxflash_attention_backward_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_backward(params));
  return workspace_for_any_device(sm80::backward_workspace_bytes(*params),
                                  sm90::backward_workspace_bytes(*params), bytes);
}

jaxflash_status jaxflash_attention_backward_cuda(
    const jaxflash_attention_backward_params* params, void* workspace,
    size_t workspace_bytes, void* stream) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_backward(params));
  if (no_heads(params->forward)) return JAXFLASH_OK;
  Device device = {};
  JAXFLASH_RETURN_IF_ERROR(find_device(&device));
  Kernels kernels = Kernels::kAutomatic;
  JAXFLASH_RETURN_IF_ERROR(choose(sm90::backward_obstacle(*params), device, &kernels));
  const size_t needed = kernels == Kernels::kPortable
                            ? sm80::backward_workspace_bytes(*params)
                            : sm90::backward_workspace_bytes(*params);
  JAXFLASH_RETURN_IF_ERROR(
      validate_workspace(workspace, workspace_bytes, needed, kWorkspaceAlignment));
  const auto run =
      kernels == Kernels::kPortable ? sm80::run_backward : sm90::run_backward;
  return run(*params, workspace, device, static_cast<cudaStream_t>(stream));
}
