// SPDX-License-Identifier: Apache-2.0
//
// Checks of single tensors: presence, dtype, address, strides, extent.
#ifndef JAXFLASH_CSRC_API_TENSOR_CHECKS_H_
#define JAXFLASH_CSRC_API_TENSOR_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "api/status.h"
#include "jaxflash/attention.h"

namespace jaxflash {

enum class Type {
  kFloat,         // float32, bfloat16 or float16
  kLikeQ,         // the dtype of q
  kLikeQOrFloat,  // the dtype of q, or float32
  kFloat32,
  kInt32,
  kUint32,
  kBool,
  kInt8,
};

// What a call does with a tensor. The elements of an output must not overlap, but those
// of a summed output may along axes of stride 0. A tensor that is not optional may only
// be absent where it would have no element.
enum class Use { kInput, kOptionalInput, kOutput, kOptionalOutput, kSummedOutput };

// Sizes of the core axes of a tensor.
struct Core {
  Core(std::initializer_list<int64_t> sizes);
  int64_t size[3];
  int rank;
};

struct TensorRule {
  const char* name;
  const jaxflash_tensor& tensor;
  Type type;
  Use use;
  Core core;
};

jaxflash_status check_tensor(const jaxflash_attention_params& params,
                             const TensorRule& rule);

template <size_t kCount>
jaxflash_status check_tensors(const jaxflash_attention_params& params,
                              const TensorRule (&rules)[kCount]) {
  for (const TensorRule& rule : rules) {
    JAXFLASH_RETURN_IF_ERROR(check_tensor(params, rule));
  }
  return JAXFLASH_OK;
}

}  // namespace jaxflash

#endif  // JAXFLASH_CSRC_API_TENSOR_CHECKS_H_
