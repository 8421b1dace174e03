// SPDX-License-Identifier: Apache-2.0
#include "python/call_types.h"

#include <nanobind/stl/string.h>

#include <utility>

#include "ffi/bind.h"
#include "ffi/slots.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::python {
namespace {

namespace nb = ::nanobind;

XLA_FFI_DataType parse_dtype(const std::string& name) {
  static constexpr std::pair<const char*, XLA_FFI_DataType> kTypes[] = {
      {"float32", XLA_FFI_DataType_F32}, {"bfloat16", XLA_FFI_DataType_BF16},
      {"float16", XLA_FFI_DataType_F16}, {"int32", XLA_FFI_DataType_S32},
      {"uint32", XLA_FFI_DataType_U32},  {"bool", XLA_FFI_DataType_PRED},
      {"int8", XLA_FFI_DataType_S8},
  };
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  throw nb::value_error(("no operand has dtype " + name).c_str());
}

// What XLA hands to a handler for a tensor of this type, but for its elements.
XLA_FFI_Buffer to_buffer(TensorType& tensor) {
  alignas(256) static char placeholder[256];
  auto& [name, dtype, shape] = tensor;
  XLA_FFI_Buffer buffer = {};
  buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer.dtype = parse_dtype(dtype);
  buffer.data = placeholder;
  buffer.rank = static_cast<int64_t>(shape.size());
  buffer.dims = shape.data();
  return buffer;
}

void set_attributes(const nb::dict& attributes, jaxflash_attention_params* p) {
  p->is_causal = nb::cast<bool>(attributes["is_causal"]);
  p->window_left = nb::cast<int64_t>(attributes["window_left"]);
  p->window_right = nb::cast<int64_t>(attributes["window_right"]);
  p->softcap = nb::cast<float>(attributes["softcap"]);
  p->dropout_rate = nb::cast<float>(attributes["dropout_rate"]);
  p->deterministic = nb::cast<bool>(attributes["deterministic"]);
  p->precision = nb::cast<int32_t>(attributes["precision"]);
}

}  // namespace

jaxflash_attention_backward_params bind_types(CallTypes call) {
  jaxflash_attention_backward_params params = {};
  params.struct_size = sizeof(params);
  params.forward.struct_size = sizeof(params.forward);
  set_attributes(call.attributes, &params.forward);
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<ffi::Bound> all;
  buffers.reserve(call.operands.size() + call.results.size());
  for (auto* tensors : {&call.operands, &call.results}) {
    for (TensorType& tensor : *tensors) {
      const std::string& name = std::get<0>(tensor);
      const ffi::Slot* slot = ffi::find_slot(name);
      if (slot == nullptr) {
        throw nb::value_error(("no tensor has name " + name).c_str());
      }
      buffers.push_back(to_buffer(tensor));
      all.push_back(
          {slot, xla::ffi::AnyBuffer(&buffers.back()), tensors == &call.results});
    }
  }
  const xla::ffi::Error error = ffi::bind_tensors(all, &params);
  if (error.failure()) throw nb::value_error(error.message().c_str());
  return params;
}

bool is_forward(const std::string& direction) {
  if (direction != "forward" && direction != "backward") {
    throw nb::value_error(
        ("direction must be forward or backward, got " + direction).c_str());
  }
  return direction == "forward";
}

}  // namespace jaxflash::python
