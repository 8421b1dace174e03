// SPDX-License-Identifier: Apache-2.0
#include "api/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "api/status.h"

#define JAXFLASH_RETURN_IF_ERROR(expression)                       \
  do {                                                             \
    const jaxflash_status status_ = (expression);                  \
    if (status_ != JAXFLASH_OK) return status_;                    \
  } while (false)

namespace jaxflash {
namespace {

constexpr jaxflash_status kInvalid = JAXFLASH_INVALID_ARGUMENT;
constexpr int kMaxAxes = JAXFLASH_MAX_BATCH_RANK + 3;

long long wide(int64_t value) { return static_cast<long long>(value); }

// The role of a tensor in a call decides what its strides and address may be.
enum class Role { kInput, kOutput, kReducedOutput };

struct Axis {
  int64_t size;
  int64_t stride;
};

jaxflash_status check_range(const char* name, int64_t value, int64_t low,
                            int64_t high) {
  if (value >= low && value <= high) return JAXFLASH_OK;
  return fail(kInvalid, "%s must be in [%lld, %lld], got %lld", name, wide(low),
              wide(high), wide(value));
}

bool is_float(int32_t dtype) {
  return dtype == JAXFLASH_FLOAT32 || dtype == JAXFLASH_BFLOAT16 ||
         dtype == JAXFLASH_FLOAT16;
}

// Checks tensors one by one against the sizes of the call.
class TensorChecker {
 public:
  explicit TensorChecker(const jaxflash_attention_params& params) : params_(params) {}

  // Present tensors: address, strides, extent. `core` are the sizes of the core axes.
  jaxflash_status check(const char* name, const jaxflash_tensor& tensor, Role role,
                        std::initializer_list<int64_t> core, bool required) const {
    Axis axes[kMaxAxes];
    int rank = 0;
    bool empty = false;
    auto append = [&](const char* kind, int index, int64_t size, int64_t stride) {
      if (stride < 0) {
        return fail(kInvalid, "%s.%s[%d] must not be negative, got %lld", name, kind,
                    index, wide(stride));
      }
      empty |= size == 0;
      if (size > 1) axes[rank++] = {size, stride};
      return JAXFLASH_OK;
    };
    const bool present = tensor.data != nullptr;
    for (int i = 0; i < params_.batch_rank; ++i) {
      JAXFLASH_RETURN_IF_ERROR(append("batch_strides", i, params_.batch_shape[i],
                                      present ? tensor.batch_strides[i] : 0));
    }
    int core_index = 0;
    for (int64_t size : core) {
      JAXFLASH_RETURN_IF_ERROR(append("strides", core_index, size,
                                      present ? tensor.strides[core_index] : 0));
      ++core_index;
    }
    if (empty) return JAXFLASH_OK;
    if (!present) {
      if (!required) return JAXFLASH_OK;
      return fail(kInvalid, "%s is required, got data = NULL", name);
    }
    const size_t width = dtype_size(tensor.dtype);
    if (reinterpret_cast<uintptr_t>(tensor.data) % width != 0) {
      return fail(kInvalid, "%s.data must be aligned to its %zu-byte elements, got %p",
                  name, width, tensor.data);
    }
    return check_extent(name, role, axes, rank, static_cast<int64_t>(width));
  }

 private:
  static jaxflash_status check_extent(const char* name, Role role, Axis* axes, int rank,
                                      int64_t width) {
    // Sorted by stride, each axis of an output must step over all the axes below it.
    std::sort(axes, axes + rank,
              [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
    int64_t last = 0;  // offset of the last element
    for (int i = 0; i < rank; ++i) {
      const bool summed = role == Role::kReducedOutput && axes[i].stride == 0;
      if (role != Role::kInput && !summed && axes[i].stride <= last) {
        return fail(kInvalid,
                    "%s is written, so its elements must not overlap, got stride %lld "
                    "on an axis of size %lld above %lld elements",
                    name, wide(axes[i].stride), wide(axes[i].size), wide(last + 1));
      }
      int64_t step = 0;
      if (__builtin_mul_overflow(axes[i].size - 1, axes[i].stride, &step) ||
          __builtin_add_overflow(last, step, &last)) {
        return fail(kInvalid, "%s must span fewer than 2^63 bytes, got stride %lld on "
                    "an axis of size %lld", name, wide(axes[i].stride),
                    wide(axes[i].size));
      }
    }
    int64_t bytes = 0;
    if (__builtin_mul_overflow(last, width, &bytes) ||
        __builtin_add_overflow(bytes, width, &bytes)) {
      return fail(kInvalid, "%s must span fewer than 2^63 bytes, got %lld elements",
                  name, wide(last));
    }
    return JAXFLASH_OK;
  }

  const jaxflash_attention_params& params_;
};

jaxflash_status check_dtype(const char* name, const jaxflash_tensor& tensor,
                            int32_t expected) {
  if (tensor.data == nullptr || tensor.dtype == expected) return JAXFLASH_OK;
  return fail(kInvalid, "%s must have dtype %s, got %s (%d)", name,
              dtype_name(expected), dtype_name(tensor.dtype), tensor.dtype);
}

jaxflash_status check_float_dtype(const char* name, const jaxflash_tensor& tensor) {
  if (tensor.data == nullptr || is_float(tensor.dtype)) return JAXFLASH_OK;
  return fail(kInvalid, "%s must have dtype float32, bfloat16 or float16, got %s (%d)",
              name, dtype_name(tensor.dtype), tensor.dtype);
}

jaxflash_status check_gradient_dtype(const char* name, const jaxflash_tensor& tensor,
                                     int32_t dtype) {
  if (tensor.data == nullptr || tensor.dtype == JAXFLASH_FLOAT32) return JAXFLASH_OK;
  return check_dtype(name, tensor, dtype);
}

jaxflash_status check_sizes(const jaxflash_attention_params& p) {
  JAXFLASH_RETURN_IF_ERROR(
      check_range("batch_rank", p.batch_rank, 0, JAXFLASH_MAX_BATCH_RANK));
  int64_t rows = 1;  // upper bound of B * N * T, the longest index a kernel forms
  bool overflow = false;
  for (int i = 0; i < p.batch_rank; ++i) {
    JAXFLASH_RETURN_IF_ERROR(check_range("batch_shape", p.batch_shape[i], 0,
                                         INT64_MAX));
    overflow |= __builtin_mul_overflow(rows, std::max<int64_t>(p.batch_shape[i], 1),
                                       &rows);
  }
  JAXFLASH_RETURN_IF_ERROR(check_range("q_len", p.q_len, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("kv_len", p.kv_len, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("num_heads", p.num_heads, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("num_kv_heads", p.num_kv_heads, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("head_dim", p.head_dim, 1, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(
      check_range("value_head_dim", p.value_head_dim, 1, kMaxLength));
  const bool divides =
      p.num_kv_heads == 0 ? p.num_heads == 0 : p.num_heads % p.num_kv_heads == 0;
  if (!divides) {
    return fail(kInvalid,
                "num_heads must be a multiple of num_kv_heads, got %lld and %lld",
                wide(p.num_heads), wide(p.num_kv_heads));
  }
  const int64_t head_dim = std::max(p.head_dim, p.value_head_dim);
  const int64_t length = std::max({p.q_len, p.kv_len, int64_t{1}});
  overflow |= __builtin_mul_overflow(rows, std::max<int64_t>(p.num_heads, 1), &rows);
  overflow |= __builtin_mul_overflow(rows, length, &rows);
  overflow |= __builtin_mul_overflow(rows, head_dim, &rows);
  if (overflow || rows > INT64_MAX / 16) {
    return fail(kInvalid,
                "batch * num_heads * length * head_dim must be below 2^59, got %lld * "
                "%lld * %lld and a batch shape of rank %d",
                wide(p.num_heads), wide(length), wide(head_dim), p.batch_rank);
  }
  return JAXFLASH_OK;
}

jaxflash_status check_options(const jaxflash_attention_params& p) {
  JAXFLASH_RETURN_IF_ERROR(check_range("window_left", p.window_left, -1, INT64_MAX));
  JAXFLASH_RETURN_IF_ERROR(check_range("window_right", p.window_right, -1, INT64_MAX));
  JAXFLASH_RETURN_IF_ERROR(check_range("precision", p.precision,
                                       JAXFLASH_PRECISION_DEFAULT,
                                       JAXFLASH_PRECISION_TF32));
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return fail(kInvalid, "softcap must be finite and positive, or 0 for off, got %g",
                static_cast<double>(p.softcap));
  }
  if (!(p.dropout_rate >= 0 && p.dropout_rate < 1)) {
    return fail(kInvalid, "dropout_rate must be in [0, 1), got %g",
                static_cast<double>(p.dropout_rate));
  }
  if (p.dropout_rate > 0 && p.dropout_seed.data == nullptr) {
    return fail(kInvalid, "dropout_seed is required where dropout_rate > 0, got NULL");
  }
  if ((p.q_segment_ids.data == nullptr) != (p.kv_segment_ids.data == nullptr)) {
    return fail(kInvalid,
                "q_segment_ids and kv_segment_ids go together, got only %s_segment_ids",
                p.q_segment_ids.data != nullptr ? "q" : "kv");
  }
  return JAXFLASH_OK;
}

jaxflash_status check_forward_dtypes(const jaxflash_attention_params& p) {
  JAXFLASH_RETURN_IF_ERROR(check_float_dtype("q", p.q));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("k", p.k, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("v", p.v, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("scale", p.scale, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("query_offset", p.query_offset, JAXFLASH_INT32));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("q_seq_lengths", p.q_seq_lengths, JAXFLASH_INT32));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("kv_seq_lengths", p.kv_seq_lengths, JAXFLASH_INT32));
  JAXFLASH_RETURN_IF_ERROR(check_float_dtype("bias", p.bias));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("mask", p.mask, JAXFLASH_BOOL));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("q_segment_ids", p.q_segment_ids, JAXFLASH_INT32));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("kv_segment_ids", p.kv_segment_ids, JAXFLASH_INT32));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("sinks", p.sinks, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("alibi_slopes", p.alibi_slopes, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(
      check_dtype("dropout_seed", p.dropout_seed, JAXFLASH_UINT32));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("out", p.out, p.q.dtype));
  return check_dtype("lse", p.lse, JAXFLASH_FLOAT32);
}

jaxflash_status check_forward(const jaxflash_attention_params& p, Role result_role) {
  if (p.struct_size != sizeof(jaxflash_attention_params)) {
    return fail(kInvalid,
                "struct_size of jaxflash_attention_params must be %zu for library "
                "version %s, got %zu",
                sizeof(jaxflash_attention_params), jaxflash_version(), p.struct_size);
  }
  JAXFLASH_RETURN_IF_ERROR(check_sizes(p));
  JAXFLASH_RETURN_IF_ERROR(check_options(p));
  JAXFLASH_RETURN_IF_ERROR(check_forward_dtypes(p));

  const TensorChecker tensors(p);
  const int64_t T = p.q_len, S = p.kv_len, N = p.num_heads, K = p.num_kv_heads;
  auto input = [&](const char* name, const jaxflash_tensor& tensor,
                   std::initializer_list<int64_t> core) {
    return tensors.check(name, tensor, Role::kInput, core, /*required=*/false);
  };
  auto required = [&](const char* name, const jaxflash_tensor& tensor, Role role,
                      std::initializer_list<int64_t> core) {
    return tensors.check(name, tensor, role, core, /*required=*/true);
  };
  JAXFLASH_RETURN_IF_ERROR(required("q", p.q, Role::kInput, {T, N, p.head_dim}));
  JAXFLASH_RETURN_IF_ERROR(required("k", p.k, Role::kInput, {S, K, p.head_dim}));
  JAXFLASH_RETURN_IF_ERROR(required("v", p.v, Role::kInput, {S, K, p.value_head_dim}));
  JAXFLASH_RETURN_IF_ERROR(input("scale", p.scale, {}));
  JAXFLASH_RETURN_IF_ERROR(input("query_offset", p.query_offset, {}));
  JAXFLASH_RETURN_IF_ERROR(input("q_seq_lengths", p.q_seq_lengths, {}));
  JAXFLASH_RETURN_IF_ERROR(input("kv_seq_lengths", p.kv_seq_lengths, {}));
  JAXFLASH_RETURN_IF_ERROR(input("bias", p.bias, {N, T, S}));
  JAXFLASH_RETURN_IF_ERROR(input("mask", p.mask, {N, T, S}));
  JAXFLASH_RETURN_IF_ERROR(input("q_segment_ids", p.q_segment_ids, {T}));
  JAXFLASH_RETURN_IF_ERROR(input("kv_segment_ids", p.kv_segment_ids, {S}));
  JAXFLASH_RETURN_IF_ERROR(input("sinks", p.sinks, {N}));
  JAXFLASH_RETURN_IF_ERROR(input("alibi_slopes", p.alibi_slopes, {N}));
  JAXFLASH_RETURN_IF_ERROR(input("dropout_seed", p.dropout_seed, {2}));
  JAXFLASH_RETURN_IF_ERROR(
      required("out", p.out, result_role, {T, N, p.value_head_dim}));
  return required("lse", p.lse, result_role, {N, T});
}

}  // namespace

size_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case JAXFLASH_FLOAT32:
    case JAXFLASH_INT32:
    case JAXFLASH_UINT32:
      return 4;
    case JAXFLASH_BFLOAT16:
    case JAXFLASH_FLOAT16:
      return 2;
    case JAXFLASH_BOOL:
      return 1;
    default:
      return 0;
  }
}

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case JAXFLASH_FLOAT32:
      return "float32";
    case JAXFLASH_BFLOAT16:
      return "bfloat16";
    case JAXFLASH_FLOAT16:
      return "float16";
    case JAXFLASH_INT32:
      return "int32";
    case JAXFLASH_UINT32:
      return "uint32";
    case JAXFLASH_BOOL:
      return "bool";
    default:
      return "no dtype";
  }
}

int64_t batch_size(const jaxflash_attention_params& params) {
  int64_t size = 1;
  for (int i = 0; i < params.batch_rank; ++i) size *= params.batch_shape[i];
  return size;
}

jaxflash_status validate_forward(const jaxflash_attention_params* params) {
  if (params == nullptr) return fail(kInvalid, "params must not be NULL");
  return check_forward(*params, Role::kOutput);
}

jaxflash_status validate_backward(const jaxflash_attention_backward_params* params) {
  if (params == nullptr) return fail(kInvalid, "params must not be NULL");
  const jaxflash_attention_backward_params& b = *params;
  if (b.struct_size != sizeof(jaxflash_attention_backward_params)) {
    return fail(kInvalid,
                "struct_size of jaxflash_attention_backward_params must be %zu for "
                "library version %s, got %zu",
                sizeof(jaxflash_attention_backward_params), jaxflash_version(),
                b.struct_size);
  }
  const jaxflash_attention_params& p = b.forward;
  JAXFLASH_RETURN_IF_ERROR(check_forward(p, Role::kInput));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("d_out", b.d_out, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("d_lse", b.d_lse, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(check_gradient_dtype("dq", b.dq, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_gradient_dtype("dk", b.dk, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_gradient_dtype("dv", b.dv, p.q.dtype));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("dscale", b.dscale, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(check_float_dtype("dbias", b.dbias));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("dsinks", b.dsinks, JAXFLASH_FLOAT32));
  JAXFLASH_RETURN_IF_ERROR(check_dtype("dalibi", b.dalibi, JAXFLASH_FLOAT32));

  const struct {
    const char* gradient;
    const jaxflash_tensor& gradient_tensor;
    const char* operand;
    const jaxflash_tensor& operand_tensor;
  } pairs[] = {{"dbias", b.dbias, "bias", p.bias},
               {"dsinks", b.dsinks, "sinks", p.sinks},
               {"dalibi", b.dalibi, "alibi_slopes", p.alibi_slopes}};
  for (const auto& pair : pairs) {
    if (pair.gradient_tensor.data != nullptr && pair.operand_tensor.data == nullptr) {
      return fail(kInvalid, "%s needs its operand %s, got NULL", pair.gradient,
                  pair.operand);
    }
  }

  const TensorChecker tensors(p);
  const int64_t T = p.q_len, S = p.kv_len, N = p.num_heads, K = p.num_kv_heads;
  const int64_t H = p.head_dim, V = p.value_head_dim;
  JAXFLASH_RETURN_IF_ERROR(
      tensors.check("d_out", b.d_out, Role::kInput, {T, N, V}, /*required=*/true));
  JAXFLASH_RETURN_IF_ERROR(
      tensors.check("d_lse", b.d_lse, Role::kInput, {N, T}, /*required=*/false));
  auto output = [&](const char* name, const jaxflash_tensor& tensor,
                    std::initializer_list<int64_t> core) {
    return tensors.check(name, tensor, Role::kOutput, core, /*required=*/false);
  };
  JAXFLASH_RETURN_IF_ERROR(output("dq", b.dq, {T, N, H}));
  JAXFLASH_RETURN_IF_ERROR(output("dk", b.dk, {S, K, H}));
  JAXFLASH_RETURN_IF_ERROR(output("dv", b.dv, {S, K, V}));
  JAXFLASH_RETURN_IF_ERROR(output("dscale", b.dscale, {N, T}));
  JAXFLASH_RETURN_IF_ERROR(tensors.check("dbias", b.dbias, Role::kReducedOutput,
                                         {N, T, S}, /*required=*/false));
  JAXFLASH_RETURN_IF_ERROR(output("dsinks", b.dsinks, {N, T}));
  return output("dalibi", b.dalibi, {N, T});
}

jaxflash_status validate_workspace(const void* workspace, size_t given, size_t needed,
                                   size_t alignment) {
  if (given < needed) {
    return fail(kInvalid, "workspace_bytes must be at least %zu, got %zu", needed,
                given);
  }
  if (needed == 0) return JAXFLASH_OK;
  if (workspace == nullptr) {
    return fail(kInvalid, "workspace must hold %zu bytes, got NULL", needed);
  }
  if (reinterpret_cast<uintptr_t>(workspace) % alignment != 0) {
    return fail(kInvalid, "workspace must be aligned to %zu bytes, got %p", alignment,
                workspace);
  }
  return JAXFLASH_OK;
}

jaxflash_status check_support(const jaxflash_attention_params& p,
                              const Support& support) {
  auto refuse = [&](const char* name) {
    return fail(JAXFLASH_UNSUPPORTED, "%s is not served by the %s backend", name,
                support.backend);
  };
  if (p.q.dtype == JAXFLASH_FLOAT32 && !support.float32) return refuse("float32");
  if (std::max(p.head_dim, p.value_head_dim) > support.max_head_dim) {
    return fail(JAXFLASH_UNSUPPORTED,
                "head_dim and value_head_dim must be at most %lld on the %s backend, "
                "got %lld and %lld",
                wide(support.max_head_dim), support.backend, wide(p.head_dim),
                wide(p.value_head_dim));
  }
  if (p.value_head_dim != p.head_dim && !support.value_head_dim) {
    return fail(JAXFLASH_UNSUPPORTED,
                "value_head_dim must equal head_dim on the %s backend, got %lld and "
                "%lld",
                support.backend, wide(p.value_head_dim), wide(p.head_dim));
  }
  if (p.bias.data != nullptr && !support.bias) return refuse("bias");
  if (p.mask.data != nullptr && !support.mask) return refuse("mask");
  if ((p.window_left != -1 || p.window_right != -1) && !support.window) {
    return refuse("a window (window_left, window_right other than -1)");
  }
  if (p.q_segment_ids.data != nullptr && !support.segment_ids) {
    return refuse("q_segment_ids");
  }
  if (p.softcap != 0 && !support.softcap) return refuse("softcap");
  if (p.sinks.data != nullptr && !support.sinks) return refuse("sinks");
  if (p.alibi_slopes.data != nullptr && !support.alibi_slopes) {
    return refuse("alibi_slopes");
  }
  if (p.dropout_rate != 0 && !support.dropout) return refuse("dropout_rate");
  return JAXFLASH_OK;
}

}  // namespace jaxflash
