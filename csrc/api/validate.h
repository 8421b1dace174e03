// SPDX-License-Identifier: Apache-2.0
//
// Checks of the parameters, shared by the backends. Every entry point of the C API
// runs them before it looks at anything else.
#ifndef JAXFLASH_CSRC_API_VALIDATE_H_
#define JAXFLASH_CSRC_API_VALIDATE_H_

#include <cstddef>
#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash {

// Lengths stay a tile below 2^30, and query offsets are clamped to +-2^30, so that
// kernels may compute positions in int32.
inline constexpr int64_t kMaxLength = (int64_t{1} << 30) - 1024;

// What the kernels of every backend are built for.
inline constexpr int kMaxHeadDim = 256;

// Whether the parameters describe a call that some backend could run.
jaxflash_status validate_forward(const jaxflash_attention_params* params);
jaxflash_status validate_backward(const jaxflash_attention_backward_params* params);

// Whether the caller's workspace is large and aligned enough.
jaxflash_status validate_workspace(const void* workspace, size_t given, size_t needed,
                                   size_t alignment);

// What a backend serves beyond plain, causal and length-masked attention.
struct Support {
  const char* backend;  // for the sentence: "cpu", "cuda"
  int64_t max_head_dim;
  bool float32 = false;
  bool value_head_dim = false;  // Hv != H
  bool bias = false;
  bool mask = false;
  bool window = false;
  bool segment_ids = false;
  bool softcap = false;
  bool sinks = false;
  bool alibi_slopes = false;
  bool dropout = false;
};

// JAXFLASH_UNSUPPORTED with a sentence that names the first member `support` lacks.
// Call it on validated parameters.
jaxflash_status check_support(const jaxflash_attention_params& params,
                              const Support& support);

// Batch elements of validated parameters: the product of the batch shape.
int64_t batch_size(const jaxflash_attention_params& params);

// Bytes of an element, 0 for a number that is no dtype.
size_t dtype_size(int32_t dtype);
const char* dtype_name(int32_t dtype);

}  // namespace jaxflash

#endif  // JAXFLASH_CSRC_API_VALIDATE_H_
