// SPDX-License-Identifier: Apache-2.0
//
// jaxflash._cuda: the handlers of the CUDA backend and what the library says about
// them. Imports on machines without a driver.
#include "ffi/handlers.h"
#include "python/explain.h"
#include "python/module.h"

namespace nb = ::nanobind;

NB_MODULE(_cuda, module) {
  module.doc() = "XLA FFI handlers of the jaxflash CUDA backend.";
  module.def("registrations", [] {
    return jaxflash::python::registrations(jaxflash::ffi::JaxflashCudaForward,
                                           jaxflash::ffi::JaxflashCudaBackward);
  });
  module.def("info", [] {
    nb::dict info;
    info["version"] = jaxflash_version();
    info["architectures"] = JAXFLASH_CUDA_ARCHITECTURES;
    info["cuda_version"] = JAXFLASH_CUDA_VERSION;
    return info;
  });
  jaxflash::python::define_workspace_bytes(
      module, {jaxflash_attention_forward_workspace_cuda,
               jaxflash_attention_backward_workspace_cuda});
  jaxflash::python::define_explain(module);
}
