// SPDX-License-Identifier: Apache-2.0
//
// The choice among the builds of the kernels.
#include <cstdlib>
#include <cstring>

#include "api/status.h"
#include "cpu/cpu_info.h"
#include "cpu/kernels.h"

namespace jaxflash::cpu {

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
#endif

namespace {

constexpr const char* kVariable = "JAXFLASH_CPU_SIMD";

struct Target {
  const Kernels* kernels;
  bool runs_here;
};

// Fastest first.
struct Targets {
#if defined(__x86_64__)
  Target list[4];

  Targets() {
    __builtin_cpu_init();
    // Every processor with AVX2 and FMA has F16C, for which some compilers cannot ask.
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool v4 =
        v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
    list[0] = {&avx512_bf16::kKernels, bf16};
    list[1] = {&avx512::kKernels, v4};
    list[2] = {&avx2::kKernels, v3};
    list[3] = {&baseline::kKernels, true};
  }
#else
  Target list[1] = {{&baseline::kKernels, true}};
#endif
};

// The wanted target, or NULL and the reason why it cannot be had.
struct Choice {
  const Kernels* kernels = nullptr;
  bool known = false;
  const char* wanted;

  Choice() : wanted(std::getenv(kVariable)) {
    if (wanted != nullptr && wanted[0] == '\0') wanted = nullptr;
    for (const Target& target : Targets().list) {
      if (wanted != nullptr && std::strcmp(wanted, target.kernels->name) != 0) continue;
      known = true;
      if (kernels == nullptr && target.runs_here) kernels = target.kernels;
    }
  }
};

const Choice& choice() {
  static const Choice chosen;
  return chosen;
}

}  // namespace

jaxflash_status select_kernels(const Kernels** kernels) {
  const Choice& chosen = choice();
  if (chosen.kernels != nullptr) {
    *kernels = chosen.kernels;
    return JAXFLASH_OK;
  }
  if (!chosen.known) {
    return fail(JAXFLASH_UNAVAILABLE,
                "%s must be baseline, avx2, avx512 or avx512_bf16 (only baseline where "
                "the processor is not x86-64), got %s; unset it for the fastest",
                kVariable, chosen.wanted);
  }
  return fail(JAXFLASH_UNAVAILABLE,
              "%s must name an instruction set of this processor, which does not have "
              "%s; unset it for the fastest",
              kVariable, chosen.wanted);
}

const char* simd_target() {
  const Choice& chosen = choice();
  return chosen.kernels != nullptr ? chosen.kernels->name : "none";
}

}  // namespace jaxflash::cpu
