// SPDX-License-Identifier: Apache-2.0
//
// C API entry points of the CPU backend: checks, then the kernels of this machine.
#include <cstddef>

#include "api/status.h"
#include "api/validate.h"
#include "cpu/kernels.h"
#include "jaxflash/attention.h"

namespace jaxflash::cpu {
namespace {

constexpr size_t kAlignment = 64;
constexpr Support kSupport = [] {
  Support support = {"cpu", kMaxHeadDim};
  support.float32 = support.value_head_dim = support.bias = support.mask = true;
  support.window = support.segment_ids = support.softcap = support.sinks = true;
  support.alibi_slopes = support.dropout = true;
  return support;
}();

// Checks a call whose parameters were found `valid`.
jaxflash_status check(jaxflash_status valid, const jaxflash_attention_params* params,
                      const Kernels** kernels) {
  if (valid != JAXFLASH_OK) return valid;
  const jaxflash_status served = check_support(*params, kSupport);
  return served != JAXFLASH_OK ? served : select_kernels(kernels);
}

jaxflash_status check_executor(const jaxflash_executor* executor) {
  if (executor == nullptr || executor->parallel_for != nullptr) return JAXFLASH_OK;
  return fail(
      JAXFLASH_INVALID_ARGUMENT,
      "executor: expected a parallel_for, got NULL; a NULL executor runs on the "
      "calling thread");
}

bool is_empty(const jaxflash_attention_params& params) {
  return batch_size(params) == 0 || params.num_heads == 0;
}

}  // namespace
}  // namespace jaxflash::cpu

using jaxflash::fail;
using jaxflash::validate_backward;
using jaxflash::validate_forward;
using jaxflash::validate_workspace;
using jaxflash::cpu::Kernels;

extern "C" {

jaxflash_status jaxflash_attention_forward_workspace_cpu(
    const jaxflash_attention_params* params, size_t* bytes) {
  const Kernels* kernels = nullptr;
  const auto status = jaxflash::cpu::check(validate_forward(params), params, &kernels);
  if (status != JAXFLASH_OK) return status;
  if (bytes == nullptr)
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  *bytes = 0;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_forward_cpu(const jaxflash_attention_params* params,
                                               void* /*workspace*/,
                                               size_t /*workspace_bytes*/,
                                               const jaxflash_executor* executor) {
  const Kernels* kernels = nullptr;
  const auto status = jaxflash::cpu::check(validate_forward(params), params, &kernels);
  if (status != JAXFLASH_OK) return status;
  JAXFLASH_RETURN_IF_ERROR(jaxflash::cpu::check_executor(executor));
  if (!jaxflash::cpu::is_empty(*params)) kernels->forward(*params, executor);
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_backward_workspace_cpu(
    const jaxflash_attention_backward_params* params, size_t* bytes) {
  const Kernels* kernels = nullptr;
  const auto* forward = params == nullptr ? nullptr : &params->forward;
  const auto status =
      jaxflash::cpu::check(validate_backward(params), forward, &kernels);
  if (status != JAXFLASH_OK) return status;
  if (bytes == nullptr)
    return fail(JAXFLASH_INVALID_ARGUMENT, "bytes must not be NULL");
  *bytes =
      jaxflash::cpu::is_empty(*forward) ? 0 : kernels->backward_workspace(*forward);
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_backward_cpu(
    const jaxflash_attention_backward_params* params, void* workspace,
    size_t workspace_bytes, const jaxflash_executor* executor) {
  const Kernels* kernels = nullptr;
  const auto* forward = params == nullptr ? nullptr : &params->forward;
  auto status = jaxflash::cpu::check(validate_backward(params), forward, &kernels);
  if (status != JAXFLASH_OK) return status;
  JAXFLASH_RETURN_IF_ERROR(jaxflash::cpu::check_executor(executor));
  // What is summed over nothing is 0.
  const bool is_empty = jaxflash::cpu::is_empty(*forward);
  if (is_empty && params->dbias.data == nullptr) return JAXFLASH_OK;
  status = validate_workspace(workspace, workspace_bytes,
                              is_empty ? 0 : kernels->backward_workspace(*forward),
                              jaxflash::cpu::kAlignment);
  if (status != JAXFLASH_OK) return status;
  kernels->backward(*params, workspace, executor);
  return JAXFLASH_OK;
}

}  // extern "C"
