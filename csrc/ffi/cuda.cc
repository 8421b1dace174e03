// SPDX-License-Identifier: Apache-2.0
//
// XLA FFI handlers of the CUDA backend. They use the given stream, buffers and
// attributes only (no allocation on the device, no synchronisation, no query of the
// stream), which is what lets XLA capture them into CUDA graphs.
#include "ffi/bind.h"
#include "ffi/handlers.h"

namespace jaxflash::ffi {
namespace {

using ::xla::ffi::Error;

Error forward(void* stream, xla::ffi::RemainingArgs arguments,
              xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  Call call;
  if (Error error = bind(arguments, results, attributes, &call); error.failure()) {
    return error;
  }
  return to_error(jaxflash_attention_forward_cuda(&call.params.forward, call.workspace,
                                                  call.workspace_bytes, stream));
}

Error backward(void* stream, xla::ffi::RemainingArgs arguments,
               xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  Call call;
  if (Error error = bind(arguments, results, attributes, &call); error.failure()) {
    return error;
  }
  return to_error(jaxflash_attention_backward_cuda(&call.params, call.workspace,
                                                   call.workspace_bytes, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxflashCudaForward, forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxflashCudaBackward, backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxflash::ffi
