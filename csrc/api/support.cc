// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "api/status.h"
#include "api/validate.h"

namespace jaxflash {

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
                static_cast<long long>(support.max_head_dim), support.backend,
                static_cast<long long>(p.head_dim),
                static_cast<long long>(p.value_head_dim));
  }
  if (p.value_head_dim != p.head_dim && !support.value_head_dim) {
    return fail(JAXFLASH_UNSUPPORTED,
                "value_head_dim must equal head_dim on the %s backend, got %lld and "
                "%lld",
                support.backend, static_cast<long long>(p.value_head_dim),
                static_cast<long long>(p.head_dim));
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
