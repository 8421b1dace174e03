// SPDX-License-Identifier: Apache-2.0
//
// What one build of the kernels offers, and the choice among the builds.
#ifndef JAXFLASH_CSRC_CPU_KERNELS_H_
#define JAXFLASH_CSRC_CPU_KERNELS_H_

#include <cstddef>

#include "jaxflash/attention.h"

namespace jaxflash::cpu {

// Entry points of the kernels as compiled for one instruction set. They take validated
// parameters that the CPU backend serves; executor may be NULL.
struct Kernels {
  const char* name;
  void (*forward)(const jaxflash_attention_params& params,
                  const jaxflash_executor* executor);
  size_t (*backward_workspace)(const jaxflash_attention_params& params);
  void (*backward)(const jaxflash_attention_backward_params& params, void* workspace,
                   const jaxflash_executor* executor);
};

// The fastest kernels that this machine can run, or those that the environment
// variable JAXFLASH_CPU_SIMD names. A failure leaves *kernels alone.
jaxflash_status select_kernels(const Kernels** kernels);

}  // namespace jaxflash::cpu

#endif  // JAXFLASH_CSRC_CPU_KERNELS_H_
