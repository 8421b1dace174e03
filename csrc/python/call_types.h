// SPDX-License-Identifier: Apache-2.0
//
// Calls of the FFI handlers as Python describes them before there are any arrays.
#ifndef JAXFLASH_CSRC_PYTHON_CALL_TYPES_H_
#define JAXFLASH_CSRC_PYTHON_CALL_TYPES_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "jaxflash/attention.h"

namespace jaxflash::python {

// An operand or result: name, dtype, shape.
using TensorType = std::tuple<std::string, std::string, std::vector<int64_t>>;

// What a call is, but for its direction.
struct CallTypes {
  std::vector<TensorType> operands;
  std::vector<TensorType> results;
  nanobind::dict attributes;  // those of the handlers, but the names of tensors
};

// The parameters that a handler would make of a call, with the same address for every
// tensor. Raises ValueError, with the handler's sentence, where it would fail.
jaxflash_attention_backward_params bind_types(CallTypes call);

// Whether a direction is "forward", or else "backward"; ValueError for other words.
bool is_forward(const std::string& direction);

}  // namespace jaxflash::python

#endif  // JAXFLASH_CSRC_PYTHON_CALL_TYPES_H_
