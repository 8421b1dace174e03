// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "api/status.h"
#include "api/validate.h"

namespace jaxflash {
namespace {

constexpr jaxflash_status kUnsupported = JAXFLASH_UNSUPPORTED;

jaxflash_status check_head_dims(const jaxflash_attention_params& p,
                                const Support& support) {
  const auto head_dim = static_cast<long long>(p.head_dim);
  const auto value_head_dim = static_cast<long long>(p.value_head_dim);
  if (std::max(p.head_dim, p.value_head_dim) > support.max_head_dim) {
    return fail(kUnsupported,
                "head_dim, value_head_dim: the %s backend serves up to %lld, got %lld "
                "and %lld; larger heads need another implementation",
                support.backend, static_cast<long long>(support.max_head_dim), head_dim,
                value_head_dim);
  }
  if (value_head_dim != head_dim && !support.value_head_dim) {
    return fail(kUnsupported,
                "value_head_dim: the %s backend serves only that of head_dim, %lld, "
                "got %lld; pass scale and pad q and k, or v and out, with zero columns",
                support.backend, head_dim, value_head_dim);
  }
  return JAXFLASH_OK;
}

jaxflash_status check_absent(const char* name, const jaxflash_tensor& tensor,
                             bool served, const Support& support) {
  if (served || tensor.data == nullptr) return JAXFLASH_OK;
  return fail(
      kUnsupported,
      "%s: the %s backend serves only calls without it, got a tensor of dtype %s; "
      "leave %s.data NULL or use another implementation",
      name, support.backend, dtype_name(tensor.dtype), name);
}

jaxflash_status check_zero(const char* name, float value, bool served,
                           const Support& support) {
  if (served || value == 0) return JAXFLASH_OK;
  return fail(kUnsupported,
              "%s: the %s backend serves only 0, which is off, got %g; set it to 0 or "
              "use another implementation",
              name, support.backend, static_cast<double>(value));
}

}  // namespace

jaxflash_status check_support(const jaxflash_attention_params& p,
                              const Support& support) {
  if (p.q.dtype == JAXFLASH_FLOAT32 && !support.float32) {
    return fail(kUnsupported,
                "q.dtype: the %s backend serves bfloat16 and float16, got float32; "
                "convert q, k and v",
                support.backend);
  }
  JAXFLASH_RETURN_IF_ERROR(check_head_dims(p, support));
  JAXFLASH_RETURN_IF_ERROR(check_absent("bias", p.bias, support.bias, support));
  JAXFLASH_RETURN_IF_ERROR(check_absent("mask", p.mask, support.mask, support));
  if ((p.window_left != -1 || p.window_right != -1) && !support.window) {
    return fail(kUnsupported,
                "window_left, window_right: the %s backend serves only -1, which is "
                "unlimited, got %lld and %lld; set both to -1 or use another "
                "implementation",
                support.backend, static_cast<long long>(p.window_left),
                static_cast<long long>(p.window_right));
  }
  JAXFLASH_RETURN_IF_ERROR(
      check_absent("q_segment_ids", p.q_segment_ids, support.segment_ids, support));
  JAXFLASH_RETURN_IF_ERROR(check_zero("softcap", p.softcap, support.softcap, support));
  JAXFLASH_RETURN_IF_ERROR(check_absent("sinks", p.sinks, support.sinks, support));
  JAXFLASH_RETURN_IF_ERROR(
      check_absent("alibi_slopes", p.alibi_slopes, support.alibi_slopes, support));
  return check_zero("dropout_rate", p.dropout_rate, support.dropout, support);
}

}  // namespace jaxflash
