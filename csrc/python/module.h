// SPDX-License-Identifier: Apache-2.0
//
// What the modules _cpu and _cuda have in common.
#ifndef JAXFLASH_CSRC_PYTHON_MODULE_H_
#define JAXFLASH_CSRC_PYTHON_MODULE_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "jaxflash/attention.h"
#include "xla/ffi/api/c_api.h"

namespace jaxflash::python {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// {target name: capsule} as jax.ffi.register_ffi_target takes them.
nanobind::dict registrations(Handler* forward, Handler* backward);

// Adds workspace_bytes(direction, operands, results, attributes) -> int, which answers
// with the queries of one backend and raises ValueError with the library's sentence.
// Operands and results are those of the handler but the workspace, as triples (name,
// dtype, shape), attributes a dict.
struct WorkspaceQueries {
  jaxflash_status (*forward)(const jaxflash_attention_params*, size_t*);
  jaxflash_status (*backward)(const jaxflash_attention_backward_params*, size_t*);
};
void define_workspace_bytes(nanobind::module_& module, WorkspaceQueries queries);

}  // namespace jaxflash::python

#endif  // JAXFLASH_CSRC_PYTHON_MODULE_H_
