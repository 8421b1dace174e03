// SPDX-License-Identifier: Apache-2.0
//
// The table of kernels of one instruction set. Included by kernels_<target>.cc after it
// has named its namespace, JAXFLASH_CPU_TARGET.
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"

#define JAXFLASH_STRING_(x) #x
#define JAXFLASH_STRING(x) JAXFLASH_STRING_(x)

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {
namespace {

using ModeFloat32 = Mode<float, DotFloat32>;
using ModeFloat16 = Mode<Float16, DotFloat32>;
#if defined(__AVX512BF16__)
using ModeBfloat16 = Mode<Bfloat16, DotBfloat16>;
#else
using ModeBfloat16 = Mode<Bfloat16, DotFloat32>;
#endif

void run_forward(const jaxflash_attention_params& p,
                 const jaxflash_executor* executor) {
  switch (p.q.dtype) {
    case JAXFLASH_FLOAT32:
      return forward<ModeFloat32>(p, executor);
    case JAXFLASH_BFLOAT16:
      return forward<ModeBfloat16>(p, executor);
    case JAXFLASH_FLOAT16:
      return forward<ModeFloat16>(p, executor);
  }
}

void run_backward(const jaxflash_attention_backward_params& b, void* workspace,
                  const jaxflash_executor* executor) {
  switch (b.forward.q.dtype) {
    case JAXFLASH_FLOAT32:
      return backward<ModeFloat32>(b, workspace, executor);
    case JAXFLASH_BFLOAT16:
      return backward<ModeBfloat16>(b, workspace, executor);
    case JAXFLASH_FLOAT16:
      return backward<ModeFloat16>(b, workspace, executor);
  }
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {JAXFLASH_STRING(JAXFLASH_CPU_TARGET), run_forward,
                          backward_workspace, run_backward};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET
