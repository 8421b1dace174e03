// SPDX-License-Identifier: Apache-2.0
//
// XLA FFI buffers and attributes -> parameters of the C API. Knows XLA, knows no
// kernels and no platform.
//
// A call has a variable list of operands and results. The attributes `operands` and
// `results` name them in order. Each operand carries its own leading batch axes,
// right-aligned against the batch shape of the call: an axis may be absent or 1, which
// means shared by all batch elements (stride 0), or have the full size.
#ifndef JAXFLASH_CSRC_FFI_BIND_H_
#define JAXFLASH_CSRC_FFI_BIND_H_

#include <cstddef>
#include <vector>

#include "ffi/slots.h"
#include "jaxflash/attention.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

// A bound call. The forward pass uses params.forward only.
struct Call {
  jaxflash_attention_backward_params params{};
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

xla::ffi::Error bind(xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results,
                     xla::ffi::Dictionary attributes, Call* call);

// The part of it that needs no call: sizes, batch axes and strides of all tensors.
xla::ffi::Error bind_tensors(const std::vector<Bound>& all,
                             jaxflash_attention_backward_params* params);

// The error that XLA reports for a status of the C API on this thread.
xla::ffi::Error to_error(jaxflash_status status);

}  // namespace jaxflash::ffi

#endif  // JAXFLASH_CSRC_FFI_BIND_H_
