// SPDX-License-Identifier: Apache-2.0
#include "python/module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "python/call_types.h"

namespace jaxflash::python {
namespace {

namespace nb = ::nanobind;

// By reference: the query that gives the status also sets the bytes.
size_t checked(jaxflash_status status, const size_t& bytes) {
  if (status != JAXFLASH_OK) throw nb::value_error(jaxflash_last_error());
  return bytes;
}

}  // namespace

nb::dict registrations(Handler* forward, Handler* backward) {
  nb::dict targets;
  targets["jaxflash_attention_forward"] =
      nb::capsule(reinterpret_cast<void*>(forward), "xla._CUSTOM_CALL_TARGET");
  targets["jaxflash_attention_backward"] =
      nb::capsule(reinterpret_cast<void*>(backward), "xla._CUSTOM_CALL_TARGET");
  return targets;
}

void define_workspace_bytes(nb::module_& module, WorkspaceQueries queries) {
  auto workspace_bytes = [queries](const std::string& direction,
                                   std::vector<TensorType> operands,
                                   std::vector<TensorType> results,
                                   nb::dict attributes) {
    const jaxflash_attention_backward_params params =
        bind_types({std::move(operands), std::move(results), std::move(attributes)});
    size_t bytes = 0;
    if (is_forward(direction)) {
      return checked(queries.forward(&params.forward, &bytes), bytes);
    }
    return checked(queries.backward(&params, &bytes), bytes);
  };
  module.def("workspace_bytes", workspace_bytes, nb::arg("direction"),
             nb::arg("operands"), nb::arg("results"), nb::arg("attributes"));
}

}  // namespace jaxflash::python
