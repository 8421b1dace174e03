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

#include "jaxflash/attention.h"
#include "python/call_types.h"

namespace jaxflash::python {
namespace {

namespace nb = ::nanobind;

// Compute capability, SMs, shared memory of a block and of an SM.
using DeviceNumbers = std::tuple<int, int, int, int>;

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
                 std::vector<TensorType> results, nb::dict attributes,
                 std::optional<DeviceNumbers> numbers) {
  const jaxflash_attention_backward_params params =
      bind_types({std::move(operands), std::move(results), std::move(attributes)});
  jaxflash_cuda_device device = {};
  if (numbers.has_value()) {
    std::tie(device.compute_capability, device.num_sms, device.shared_memory_of_block,
             device.shared_memory_of_sm) = *numbers;
  }
  const jaxflash_cuda_device* given = numbers.has_value() ? &device : nullptr;
  jaxflash_explanation explanation = {};
  explanation.struct_size = sizeof(explanation);
  if (is_forward(direction)) {
    check(
        jaxflash_attention_explain_forward_cuda(&params.forward, given, &explanation));
  } else {
    check(jaxflash_attention_explain_backward_cuda(&params, given, &explanation));
  }
  return to_dict(explanation);
}

}  // namespace

void define_explain(nb::module_& module) {
  module.def("explain", explain, nb::arg("direction"), nb::arg("operands"),
             nb::arg("results"), nb::arg("attributes"), nb::arg("device").none());
}

}  // namespace jaxflash::python
