// SPDX-License-Identifier: Apache-2.0
//
// What the CPU backend can say about itself.
#ifndef JAXFLASH_CSRC_CPU_CPU_INFO_H_
#define JAXFLASH_CSRC_CPU_CPU_INFO_H_

#include "jaxflash/attention.h"

namespace jaxflash::cpu {

// Name of the instruction set that the kernels run with on this machine: "baseline",
// "avx2", "avx512" or "avx512_bf16". Lives as long as the library, which exports it for
// the Python module.
JAXFLASH_API const char* simd_target();

}  // namespace jaxflash::cpu

#endif  // JAXFLASH_CSRC_CPU_CPU_INFO_H_
