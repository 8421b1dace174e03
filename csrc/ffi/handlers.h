// SPDX-License-Identifier: Apache-2.0
//
// The XLA FFI handlers that the Python modules register.
#ifndef JAXFLASH_CSRC_FFI_HANDLERS_H_
#define JAXFLASH_CSRC_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace jaxflash::ffi {

extern "C" {
XLA_FFI_Error* JaxflashCpuForward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxflashCpuBackward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxflashCudaForward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxflashCudaBackward(XLA_FFI_CallFrame* call_frame);
}

}  // namespace jaxflash::ffi

#endif  // JAXFLASH_CSRC_FFI_HANDLERS_H_
