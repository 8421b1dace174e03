// SPDX-License-Identifier: Apache-2.0
//
// Which kernels a call of the FFI handlers would run.
#ifndef JAXFLASH_CSRC_PYTHON_EXPLAIN_H_
#define JAXFLASH_CSRC_PYTHON_EXPLAIN_H_

#include <nanobind/nanobind.h>

namespace jaxflash::python {

// Adds explain(direction, operands, results, attributes, device) -> dict with the
// members of jaxflash_explanation. The first four are those of workspace_bytes
// (python/module.h); device is None for the current one, or
// (compute capability, SMs, shared memory of a block, of an SM). Raises ValueError for
// a call that no kernel serves, RuntimeError where there is no device.
void define_explain(nanobind::module_& module);

}  // namespace jaxflash::python

#endif  // JAXFLASH_CSRC_PYTHON_EXPLAIN_H_
