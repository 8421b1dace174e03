// SPDX-License-Identifier: Apache-2.0
//
// C API entry points of CUDA: checks, and the choice of the kernel family.
//
// The portable kernels (sm80/) serve every call on every device. On compute capability
// 9.0 the Hopper kernels (sm90/) serve all calls but those whose layout the copy engine
// cannot read. The environment variable JAXFLASH_CUDA_KERNELS can be "sm80", which
// leaves the Hopper kernels alone, or "sm90", which refuses devices that are not
// Hopper.
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
#include "common/launcher.h"
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

enum class Setting { kAutomatic, kPortable, kHopper };

jaxflash_status read_setting(Setting* setting) {
  const char* value = std::getenv("JAXFLASH_CUDA_KERNELS");
  const std::string_view text = value == nullptr ? "" : value;
  if (text.empty() || text == "auto") {
    *setting = Setting::kAutomatic;
  } else if (text == "sm80") {
    *setting = Setting::kPortable;
  } else if (text == "sm90") {
    *setting = Setting::kHopper;
  } else {
    return fail(JAXFLASH_INVALID_ARGUMENT,
                "JAXFLASH_CUDA_KERNELS must be auto, sm80 or sm90, got %s", value);
  }
  return JAXFLASH_OK;
}

// One kernel family from the host.
struct Family {
  const char* name;
  size_t (*forward_workspace_bytes)(const jaxflash_attention_params&);
  size_t (*backward_workspace_bytes)(const jaxflash_attention_backward_params&);
  bool (*backward_is_reproducible)(const jaxflash_attention_backward_params&);
  jaxflash_status (*run_forward)(const jaxflash_attention_params&, void* workspace,
                                 const Device&, Launcher&);
  jaxflash_status (*run_backward)(const jaxflash_attention_backward_params&,
                                  void* workspace, const Device&, Launcher&);
};

constexpr Family kPortable = {"sm80",
                              sm80::forward_workspace_bytes,
                              sm80::backward_workspace_bytes,
                              sm80::backward_is_reproducible,
                              sm80::run_forward,
                              sm80::run_backward};
constexpr Family kHopper = {"sm90",
                            sm90::forward_workspace_bytes,
                            sm90::backward_workspace_bytes,
                            sm90::backward_is_reproducible,
                            sm90::run_forward,
                            sm90::run_backward};

struct Choice {
  Device device;
  const Family* family;
  const char* reason;
};

// For the given device, or else the current one. `obstacle` is what keeps the Hopper
// kernels from serving the call.
jaxflash_status choose(const char* obstacle, const Device* given, Choice* choice) {
  Device& device = choice->device;
  if (given == nullptr) {
    JAXFLASH_RETURN_IF_ERROR(find_device(&device));
  } else {
    device = *given;
    JAXFLASH_RETURN_IF_ERROR(check_device(device));
  }
  Setting setting = Setting::kAutomatic;
  JAXFLASH_RETURN_IF_ERROR(read_setting(&setting));
  const bool is_hopper = device.compute_capability == 90;
  if (setting == Setting::kHopper && !is_hopper) {
    return fail(JAXFLASH_UNAVAILABLE,
                "JAXFLASH_CUDA_KERNELS=sm90 needs a device of compute capability 9.0, "
                "got %d.%d",
                device.compute_capability / 10, device.compute_capability % 10);
  }
  choice->family = &kPortable;
  if (setting == Setting::kPortable) {
    choice->reason = "JAXFLASH_CUDA_KERNELS=sm80 asks for them";
  } else if (!is_hopper) {
    choice->reason = "the device is not of compute capability 9.0";
  } else if (obstacle != nullptr) {
    choice->reason = obstacle;
  } else {
    choice->family = &kHopper;
    choice->reason = "the device is of compute capability 9.0";
  }
  return JAXFLASH_OK;
}

// What a call needs on whatever device and under whatever setting it will run, which a
// query does not know.
jaxflash_status workspace_for_any_device(size_t portable, size_t hopper,
                                         size_t* bytes) {
  if (bytes == nullptr) {
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  }
  *bytes = std::max(portable, hopper);
  return JAXFLASH_OK;
}

// Whether there is nothing to launch.
bool is_empty(const jaxflash_attention_params& params) {
  return batch_size(params) == 0 || params.num_heads == 0 || params.q_len == 0;
}

bool is_empty(const jaxflash_attention_backward_params& params) {
  return batch_size(params.forward) == 0 || params.forward.num_heads == 0;
}

jaxflash_status check_explanation(const jaxflash_explanation* explanation) {
  constexpr size_t kSize = sizeof(jaxflash_explanation);
  if (explanation != nullptr && explanation->struct_size == kSize) return JAXFLASH_OK;
  return fail(
      JAXFLASH_INVALID_ARGUMENT,
      "explanation must be a jaxflash_explanation whose struct_size is %zu, got "
      "%zu",
      kSize, explanation == nullptr ? 0 : explanation->struct_size);
}

jaxflash_explanation explain_emptiness() {
  jaxflash_explanation explanation = {};
  explanation.struct_size = sizeof(explanation);
  explanation.family = "none";
  explanation.reason = "there is nothing to compute";
  explanation.is_reproducible = 1;
  return explanation;
}

// All but the kernels.
jaxflash_explanation explain_choice(const Choice& choice, size_t workspace_bytes,
                                    bool is_reproducible) {
  jaxflash_explanation explanation = {};
  explanation.struct_size = sizeof(explanation);
  explanation.family = choice.family->name;
  explanation.reason = choice.reason;
  explanation.workspace_bytes = workspace_bytes;
  explanation.is_reproducible = is_reproducible ? 1 : 0;
  return explanation;
}

}  // namespace
}  // namespace jaxflash

jaxflash_status jaxflash_attention_forward_workspace_cuda(
    const jaxflash_attention_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_forward(params));
  return workspace_for_any_device(kPortable.forward_workspace_bytes(*params),
                                  kHopper.forward_workspace_bytes(*params), bytes);
}

jaxflash_status jaxflash_attention_forward_cuda(const jaxflash_attention_params* params,
                                                void* workspace, size_t workspace_bytes,
                                                void* stream) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_forward(params));
  if (is_empty(*params)) return JAXFLASH_OK;
  Choice choice = {};
  JAXFLASH_RETURN_IF_ERROR(choose(sm90::forward_obstacle(*params), nullptr, &choice));
  JAXFLASH_RETURN_IF_ERROR(validate_workspace(
      workspace, workspace_bytes, choice.family->forward_workspace_bytes(*params),
      kWorkspaceAlignment));
  Launcher launcher(static_cast<cudaStream_t>(stream));
  return choice.family->run_forward(*params, workspace, choice.device, launcher);
}

jaxflash_status jaxflash_attention_backward_workspace_cuda(
    const jaxflash_attention_backward_params* params, size_t* bytes) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_backward(params));
  return workspace_for_any_device(kPortable.backward_workspace_bytes(*params),
                                  kHopper.backward_workspace_bytes(*params), bytes);
}

jaxflash_status jaxflash_attention_backward_cuda(
    const jaxflash_attention_backward_params* params, void* workspace,
    size_t workspace_bytes, void* stream) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_backward(params));
  if (is_empty(*params)) return JAXFLASH_OK;
  Choice choice = {};
  JAXFLASH_RETURN_IF_ERROR(choose(sm90::backward_obstacle(*params), nullptr, &choice));
  JAXFLASH_RETURN_IF_ERROR(validate_workspace(
      workspace, workspace_bytes, choice.family->backward_workspace_bytes(*params),
      kWorkspaceAlignment));
  Launcher launcher(static_cast<cudaStream_t>(stream));
  return choice.family->run_backward(*params, workspace, choice.device, launcher);
}

jaxflash_status jaxflash_attention_explain_forward_cuda(
    const jaxflash_attention_params* params, const jaxflash_cuda_device* device,
    jaxflash_explanation* explanation) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_explanation(explanation));
  JAXFLASH_RETURN_IF_ERROR(check_forward(params));
  jaxflash_explanation answer = explain_emptiness();
  if (!is_empty(*params)) {
    Choice choice = {};
    JAXFLASH_RETURN_IF_ERROR(choose(sm90::forward_obstacle(*params), device, &choice));
    answer =
        explain_choice(choice, choice.family->forward_workspace_bytes(*params), true);
    Launcher launcher(&answer);
    void* anywhere = explanation;
    JAXFLASH_RETURN_IF_ERROR(
        choice.family->run_forward(*params, anywhere, choice.device, launcher));
  }
  *explanation = answer;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_explain_backward_cuda(
    const jaxflash_attention_backward_params* params,
    const jaxflash_cuda_device* device, jaxflash_explanation* explanation) {
  using namespace jaxflash;
  JAXFLASH_RETURN_IF_ERROR(check_explanation(explanation));
  JAXFLASH_RETURN_IF_ERROR(check_backward(params));
  jaxflash_explanation answer = explain_emptiness();
  if (!is_empty(*params)) {
    Choice choice = {};
    JAXFLASH_RETURN_IF_ERROR(choose(sm90::backward_obstacle(*params), device, &choice));
    answer = explain_choice(choice, choice.family->backward_workspace_bytes(*params),
                            choice.family->backward_is_reproducible(*params));
    Launcher launcher(&answer);
    void* anywhere = explanation;
    JAXFLASH_RETURN_IF_ERROR(
        choice.family->run_backward(*params, anywhere, choice.device, launcher));
  }
  *explanation = answer;
  return JAXFLASH_OK;
}
