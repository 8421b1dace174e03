// SPDX-License-Identifier: Apache-2.0
#include "python/module.h"

#include <nanobind/stl/string.h>

#include <initializer_list>

namespace jaxflash::python {
namespace {

namespace nb = ::nanobind;

// The queries look at sizes, dtypes and presence, never at data: one address stands for
// every tensor.
void set_row_major(jaxflash_tensor* tensor, int32_t dtype,
                   std::initializer_list<int64_t> core) {
  alignas(64) static char placeholder[64];
  tensor->data = placeholder;
  tensor->dtype = dtype;
  int64_t stride = 1;
  int axis = static_cast<int>(core.size());
  for (auto size = core.end(); size != core.begin();) {
    tensor->strides[--axis] = stride;
    stride *= *--size;
  }
  tensor->batch_strides[0] = stride;
}

int32_t parse_dtype(const std::string& name) {
  if (name == "float32") return JAXFLASH_FLOAT32;
  if (name == "bfloat16") return JAXFLASH_BFLOAT16;
  if (name == "float16") return JAXFLASH_FLOAT16;
  throw nb::value_error(
      ("dtype must be float32, bfloat16 or float16, got " + name).c_str());
}

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
                                   const std::string& dtype_name, int64_t batch,
                                   int64_t q_len, int64_t kv_len, int64_t num_heads,
                                   int64_t num_kv_heads, int64_t head_dim,
                                   int64_t value_head_dim, bool deterministic) {
    const int32_t dtype = parse_dtype(dtype_name);
    jaxflash_attention_backward_params params{};
    params.struct_size = sizeof(params);
    jaxflash_attention_params& forward = params.forward;
    forward.struct_size = sizeof(forward);
    forward.batch_rank = 1;
    forward.batch_shape[0] = batch;
    forward.q_len = q_len;
    forward.kv_len = kv_len;
    forward.num_heads = num_heads;
    forward.num_kv_heads = num_kv_heads;
    forward.head_dim = head_dim;
    forward.value_head_dim = value_head_dim;
    forward.window_left = forward.window_right = -1;
    forward.deterministic = deterministic;
    set_row_major(&forward.q, dtype, {q_len, num_heads, head_dim});
    set_row_major(&forward.k, dtype, {kv_len, num_kv_heads, head_dim});
    set_row_major(&forward.v, dtype, {kv_len, num_kv_heads, value_head_dim});
    set_row_major(&forward.out, dtype, {q_len, num_heads, value_head_dim});
    set_row_major(&forward.lse, JAXFLASH_FLOAT32, {num_heads, q_len});
    size_t bytes = 0;
    if (direction == "forward") {
      return checked(queries.forward(&forward, &bytes), bytes);
    }
    if (direction != "backward") {
      throw nb::value_error(
          ("direction must be forward or backward, got " + direction).c_str());
    }
    // Every gradient is wanted here, so that the answer covers any subset of them.
    params.d_out = forward.out;
    params.d_lse = forward.lse;
    params.dq = forward.q;
    params.dk = forward.k;
    params.dv = forward.v;
    params.dscale = forward.lse;
    return checked(queries.backward(&params, &bytes), bytes);
  };
  module.def("workspace_bytes", workspace_bytes, nb::arg("direction"), nb::arg("dtype"),
             nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"),
             nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("value_head_dim"), nb::arg("deterministic"));
}

}  // namespace jaxflash::python
