// SPDX-License-Identifier: Apache-2.0
//
// jaxflash._cpu: the handlers of the CPU backend and what the library says about them.
#include "cpu/cpu_info.h"
#include "ffi/handlers.h"
#include "python/module.h"

namespace nb = ::nanobind;

NB_MODULE(_cpu, module) {
  module.doc() = "XLA FFI handlers of the jaxflash CPU backend.";
  module.def("registrations", [] {
    return jaxflash::python::registrations(jaxflash::ffi::JaxflashCpuForward,
                                           jaxflash::ffi::JaxflashCpuBackward);
  });
  module.def("info", [] {
    nb::dict info;
    info["version"] = jaxflash_version();
    info["simd"] = jaxflash::cpu::simd_target();
    return info;
  });
  jaxflash::python::define_workspace_bytes(module,
                                           {jaxflash_attention_forward_workspace_cpu,
                                            jaxflash_attention_backward_workspace_cpu});
}
