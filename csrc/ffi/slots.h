// SPDX-License-Identifier: Apache-2.0
//
// The names of the tensors of a call, and where each goes in the C API's parameters.
#ifndef JAXFLASH_CSRC_FFI_SLOTS_H_
#define JAXFLASH_CSRC_FFI_SLOTS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "jaxflash/attention.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

// What the binder knows about an operand or result. `core` has one letter per core axis
// (T, S, N, K, H as in the C API, V for Hv, 2 for two); the axes of a `shared` tensor
// may also be 1, which the kernels read with stride 0. Of a result that goes for its
// batch axes, too: the kernels sum over them.
struct Slot {
  std::string_view name;
  std::string_view core;
  jaxflash_tensor& (*tensor)(jaxflash_attention_backward_params&);
  bool shared = false;
};

// NULL for a name that no operand or result has.
const Slot* find_slot(std::string_view name);

// The size that a letter of `core` stands for. query, key and value define the letters.
int64_t* letter_size(char letter, jaxflash_attention_params* params);

// An operand or result of a call.
struct Bound {
  const Slot* slot;
  xla::ffi::AnyBuffer buffer;
  bool is_result;
};

int32_t to_dtype(xla::ffi::DataType type);

// "[2, 3]"
std::string to_text(xla::ffi::AnyBuffer::Dimensions dims);

// "<name> must have <expected>, got shape [2, 3]"
xla::ffi::Error shape_error(const Bound& bound, const std::string& expected);

// The parts of a comma-separated list.
std::vector<std::string_view> split(std::string_view names);

}  // namespace jaxflash::ffi

#endif  // JAXFLASH_CSRC_FFI_SLOTS_H_
