// SPDX-License-Identifier: Apache-2.0
#include "python/explain.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/bind.h"
#include "ffi/slots.h"
#include "jaxflash/attention.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::python {
namespace {

namespace nb = ::nanobind;

// Name, dtype, shape.
using TensorType = std::tuple<std::string, std::string, std::vector<int64_t>>;
// Compute capability, SMs, shared memory of a block and of an SM.
using DeviceNumbers = std::tuple<int, int, int, int>;

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

// Binds the tensors as the handler does.
void bind(std::vector<TensorType> operands, std::vector<TensorType> results,
          jaxflash_attention_backward_params* params) {
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<ffi::Bound> all;
  buffers.reserve(operands.size() + results.size());
  for (auto* tensors : {&operands, &results}) {
    for (TensorType& tensor : *tensors) {
      const std::string& name = std::get<0>(tensor);
      const ffi::Slot* slot = ffi::find_slot(name);
      if (slot == nullptr)
        throw nb::value_error(("no tensor has name " + name).c_str());
      buffers.push_back(to_buffer(tensor));
      all.push_back({slot, xla::ffi::AnyBuffer(&buffers.back()), tensors == &results});
    }
  }
  const xla::ffi::Error error = ffi::bind_tensors(all, params);
  if (error.failure()) throw nb::value_error(error.message().c_str());
}

void check(jaxflash_status status) {
  if (status == JAXFLASH_OK) return;
  if (status == JAXFLASH_UNAVAILABLE || status == JAXFLASH_INTERNAL) {
    throw std::runtime_error(jaxflash_last_error());
  }
  throw nb::value_error(jaxflash_last_error());
}

nb::dict to_dict(const jaxflash_kernel& kernel) {
  nb::dict dict;
  dict["name"] = kernel.name;
  dict["block_q"] = kernel.block_q;
  dict["block_kv"] = kernel.block_kv;
  dict["num_stages"] = kernel.num_stages;
  dict["num_threads"] = kernel.num_threads;
  dict["num_blocks"] = kernel.num_blocks;
  dict["shared_memory_bytes"] = kernel.shared_memory_bytes;
  return dict;
}

nb::dict to_dict(const jaxflash_explanation& explanation) {
  nb::list kernels;
  for (int i = 0; i < explanation.num_kernels; ++i) {
    kernels.append(to_dict(explanation.kernels[i]));
  }
  nb::dict dict;
  dict["family"] = explanation.family;
  dict["reason"] = explanation.reason;
  dict["workspace_bytes"] = explanation.workspace_bytes;
  dict["is_reproducible"] = explanation.is_reproducible != 0;
  dict["kernels"] = kernels;
  return dict;
}

nb::dict explain(const std::string& direction, std::vector<TensorType> operands,
                 std::vector<TensorType> results, bool is_causal, bool deterministic,
                 std::optional<DeviceNumbers> numbers) {
  jaxflash_attention_backward_params params = {};
  params.struct_size = sizeof(params);
  params.forward.struct_size = sizeof(params.forward);
  params.forward.window_left = params.forward.window_right = -1;
  params.forward.is_causal = is_causal;
  params.forward.deterministic = deterministic;
  bind(std::move(operands), std::move(results), &params);

  jaxflash_cuda_device device = {};
  if (numbers.has_value()) {
    std::tie(device.compute_capability, device.num_sms, device.shared_memory_of_block,
             device.shared_memory_of_sm) = *numbers;
  }
  const jaxflash_cuda_device* given = numbers.has_value() ? &device : nullptr;
  jaxflash_explanation explanation = {};
  explanation.struct_size = sizeof(explanation);
  if (direction == "forward") {
    check(
        jaxflash_attention_explain_forward_cuda(&params.forward, given, &explanation));
  } else if (direction == "backward") {
    check(jaxflash_attention_explain_backward_cuda(&params, given, &explanation));
  } else {
    throw nb::value_error(
        ("direction must be forward or backward, got " + direction).c_str());
  }
  return to_dict(explanation);
}

}  // namespace

void define_explain(nb::module_& module) {
  module.def("explain", explain, nb::arg("direction"), nb::arg("operands"),
             nb::arg("results"), nb::arg("is_causal"), nb::arg("deterministic"),
             nb::arg("device").none());
}

}  // namespace jaxflash::python
