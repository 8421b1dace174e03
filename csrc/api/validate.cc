// SPDX-License-Identifier: Apache-2.0
#include "api/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "api/status.h"
#include "api/tensor_checks.h"

namespace jaxflash {
namespace {

constexpr jaxflash_status kInvalid = JAXFLASH_INVALID_ARGUMENT;

long long wide(int64_t value) { return static_cast<long long>(value); }

jaxflash_status check_range(const char* name, int64_t value, int64_t low,
                            int64_t high) {
  if (value >= low && value <= high) return JAXFLASH_OK;
  return fail(kInvalid, "%s must be in [%lld, %lld], got %lld", name, wide(low),
              wide(high), wide(value));
}

jaxflash_status check_sizes(const jaxflash_attention_params& p) {
  JAXFLASH_RETURN_IF_ERROR(
      check_range("batch_rank", p.batch_rank, 0, JAXFLASH_MAX_BATCH_RANK));
  int64_t rows = 1;  // upper bound of B * N * T, the longest index a kernel forms
  bool overflow = false;
  for (int i = 0; i < p.batch_rank; ++i) {
    JAXFLASH_RETURN_IF_ERROR(
        check_range("batch_shape", p.batch_shape[i], 0, INT64_MAX));
    overflow |=
        __builtin_mul_overflow(rows, std::max<int64_t>(p.batch_shape[i], 1), &rows);
  }
  JAXFLASH_RETURN_IF_ERROR(check_range("q_len", p.q_len, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("kv_len", p.kv_len, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("num_heads", p.num_heads, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("num_kv_heads", p.num_kv_heads, 0, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(check_range("head_dim", p.head_dim, 1, kMaxLength));
  JAXFLASH_RETURN_IF_ERROR(
      check_range("value_head_dim", p.value_head_dim, 1, kMaxLength));
  const bool divides = p.num_kv_heads == 0
                           ? p.num_heads == 0
                           : p.num_heads > 0 && p.num_heads % p.num_kv_heads == 0;
  if (!divides) {
    return fail(kInvalid,
                "num_heads must be a positive multiple of num_kv_heads, or both 0, got "
                "%lld and %lld",
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
  JAXFLASH_RETURN_IF_ERROR(check_range(
      "precision", p.precision, JAXFLASH_PRECISION_DEFAULT, JAXFLASH_PRECISION_TF32));
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

jaxflash_status check_struct_size(const char* name, size_t expected, size_t given) {
  if (given == expected) return JAXFLASH_OK;
  return fail(kInvalid, "struct_size of %s must be %zu in library version %s, got %zu",
              name, expected, jaxflash_version(), given);
}

// The backward pass reads what the forward pass writes.
enum class Pass { kForward, kBackward };

jaxflash_status check_forward(const jaxflash_attention_params& p, Pass pass) {
  JAXFLASH_RETURN_IF_ERROR(
      check_struct_size("jaxflash_attention_params", sizeof(p), p.struct_size));
  JAXFLASH_RETURN_IF_ERROR(check_sizes(p));
  JAXFLASH_RETURN_IF_ERROR(check_options(p));
  const int64_t T = p.q_len, S = p.kv_len, N = p.num_heads, K = p.num_kv_heads;
  const int64_t H = p.head_dim, V = p.value_head_dim;
  const bool forward = pass == Pass::kForward;
  const Use result = forward ? Use::kOutput : Use::kInput;
  const Use optional = forward ? Use::kOptionalOutput : Use::kOptionalInput;
  const TensorRule rules[] = {
      {"q", p.q, Type::kFloat, Use::kInput, {T, N, H}},
      {"k", p.k, Type::kLikeQ, Use::kInput, {S, K, H}},
      {"v", p.v, Type::kLikeQ, Use::kInput, {S, K, V}},
      {"scale", p.scale, Type::kFloat32, Use::kOptionalInput, {}},
      {"query_offset", p.query_offset, Type::kInt32, Use::kOptionalInput, {}},
      {"q_seq_lengths", p.q_seq_lengths, Type::kInt32, Use::kOptionalInput, {}},
      {"kv_seq_lengths", p.kv_seq_lengths, Type::kInt32, Use::kOptionalInput, {}},
      {"bias", p.bias, Type::kFloat, Use::kOptionalInput, {N, T, S}},
      {"mask", p.mask, Type::kBool, Use::kOptionalInput, {N, T, S}},
      {"q_segment_ids", p.q_segment_ids, Type::kInt32, Use::kOptionalInput, {T}},
      {"kv_segment_ids", p.kv_segment_ids, Type::kInt32, Use::kOptionalInput, {S}},
      {"sinks", p.sinks, Type::kFloat32, Use::kOptionalInput, {N}},
      {"alibi_slopes", p.alibi_slopes, Type::kFloat32, Use::kOptionalInput, {N}},
      {"dropout_seed", p.dropout_seed, Type::kUint32, Use::kOptionalInput, {2}},
      {"out", p.out, Type::kLikeQ, result, {T, N, V}},
      {"lse", p.lse, Type::kFloat32, result, {N, T}},
      {"out_low", p.out_low, Type::kInt8, optional, {T, N, V}},
  };
  JAXFLASH_RETURN_IF_ERROR(check_tensors(p, rules));
  if (p.out_low.data != nullptr && dtype_size(p.q.dtype) != 2) {
    return fail(
        kInvalid,
        "out_low must be absent unless q has 16 bits, got it with q of dtype %s",
        dtype_name(p.q.dtype));
  }
  return JAXFLASH_OK;
}

jaxflash_status check_gradient_operand(const char* gradient, const jaxflash_tensor& d,
                                       const char* operand, const jaxflash_tensor& x) {
  if (d.data == nullptr || x.data != nullptr) return JAXFLASH_OK;
  return fail(kInvalid, "%s needs its operand %s, got data = NULL", gradient, operand);
}

}  // namespace

int64_t batch_size(const jaxflash_attention_params& params) {
  int64_t size = 1;
  for (int i = 0; i < params.batch_rank; ++i) size *= params.batch_shape[i];
  return size;
}

jaxflash_status validate_forward(const jaxflash_attention_params* params) {
  if (params == nullptr) return fail(kInvalid, "params must not be NULL");
  return check_forward(*params, Pass::kForward);
}

jaxflash_status validate_backward(const jaxflash_attention_backward_params* params) {
  if (params == nullptr) return fail(kInvalid, "params must not be NULL");
  const jaxflash_attention_backward_params& b = *params;
  const jaxflash_attention_params& p = b.forward;
  JAXFLASH_RETURN_IF_ERROR(check_struct_size("jaxflash_attention_backward_params",
                                             sizeof(b), b.struct_size));
  JAXFLASH_RETURN_IF_ERROR(check_forward(p, Pass::kBackward));
  JAXFLASH_RETURN_IF_ERROR(check_gradient_operand("dbias", b.dbias, "bias", p.bias));
  JAXFLASH_RETURN_IF_ERROR(
      check_gradient_operand("dsinks", b.dsinks, "sinks", p.sinks));
  JAXFLASH_RETURN_IF_ERROR(
      check_gradient_operand("dalibi", b.dalibi, "alibi_slopes", p.alibi_slopes));
  const int64_t T = p.q_len, S = p.kv_len, N = p.num_heads, K = p.num_kv_heads;
  const int64_t H = p.head_dim, V = p.value_head_dim;
  const TensorRule rules[] = {
      {"d_out", b.d_out, Type::kLikeQ, Use::kInput, {T, N, V}},
      {"d_lse", b.d_lse, Type::kFloat32, Use::kOptionalInput, {N, T}},
      {"dq", b.dq, Type::kLikeQOrFloat, Use::kOptionalOutput, {T, N, H}},
      {"dk", b.dk, Type::kLikeQOrFloat, Use::kOptionalOutput, {S, K, H}},
      {"dv", b.dv, Type::kLikeQOrFloat, Use::kOptionalOutput, {S, K, V}},
      {"dscale", b.dscale, Type::kFloat32, Use::kOptionalOutput, {N, T}},
      {"dbias", b.dbias, Type::kFloat, Use::kSummedOutput, {N, T, S}},
      {"dsinks", b.dsinks, Type::kFloat32, Use::kOptionalOutput, {N, T}},
      {"dalibi", b.dalibi, Type::kFloat32, Use::kOptionalOutput, {N, T}},
  };
  return check_tensors(p, rules);
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

}  // namespace jaxflash
