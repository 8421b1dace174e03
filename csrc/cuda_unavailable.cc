// SPDX-License-Identifier: Apache-2.0
//
// The CUDA entry points of a library that was built without CUDA.
#include "api/status.h"

namespace {

jaxflash_status unavailable() {
  return jaxflash::fail(JAXFLASH_UNAVAILABLE,
                        "this libjaxflash was built without CUDA: build it where nvcc "
                        "is found, or name one with the environment variable CUDACXX");
}

}  // namespace

jaxflash_status jaxflash_attention_forward_workspace_cuda(
    const jaxflash_attention_params*, size_t*) {
  return unavailable();
}

jaxflash_status jaxflash_attention_forward_cuda(const jaxflash_attention_params*, void*,
                                                size_t, void*) {
  return unavailable();
}

jaxflash_status jaxflash_attention_backward_workspace_cuda(
    const jaxflash_attention_backward_params*, size_t*) {
  return unavailable();
}

jaxflash_status jaxflash_attention_backward_cuda(
    const jaxflash_attention_backward_params*, void*, size_t, void*) {
  return unavailable();
}

jaxflash_status jaxflash_attention_explain_forward_cuda(
    const jaxflash_attention_params*, const jaxflash_cuda_device*,
    jaxflash_explanation*) {
  return unavailable();
}

jaxflash_status jaxflash_attention_explain_backward_cuda(
    const jaxflash_attention_backward_params*, const jaxflash_cuda_device*,
    jaxflash_explanation*) {
  return unavailable();
}
