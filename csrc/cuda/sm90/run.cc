// SPDX-License-Identifier: Apache-2.0
#include "sm90/run.h"

#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "api/status.h"
#include "api/validate.h"
#include "common/instances.h"
#include "sm90/backward_config.h"
#include "sm90/launch.h"
#include "sm90/launch_backward.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {
namespace {

constexpr bool all_head_dims_have_tiles() {
  for (int head_dim = 1; head_dim <= kMaxHeadDim; ++head_dim) {
    for (const bool sum_columns : {false, true}) {
      for (const bool few_rows : {false, true}) {
        if (forward_config_index(head_dim, sum_columns, few_rows) < 0) return false;
      }
    }
    if (backward_config_index(head_dim) < 0) return false;
  }
  return true;
}
static_assert(all_head_dims_have_tiles());

}  // namespace

bool backward_is_reproducible(const jaxflash_attention_backward_params& params) {
  const bool sums_dq = !kBackwardConfigs[backward_config(params.forward)].separate_dq();
  return params.forward.deterministic != 0 || !sums_dq || !wants_dq(params);
}

jaxflash_status run_forward(const jaxflash_attention_params& params, void* workspace,
                            const Device& device, Launcher& launcher) {
  const int config = forward_config(params);
  const int64_t q_tiles = divide_up(params.q_len, kForwardConfigs[config].block_q());
  JAXFLASH_RETURN_IF_ERROR(
      check_blocks(q_tiles * params.num_heads * batch_size(params)));
  ForwardArguments arguments = {};
  plan_forward(params, workspace, device.num_sms, &arguments);
  if (!launcher.only_explains()) {
    JAXFLASH_RETURN_IF_ERROR(
        check_cuda("tensor maps of the forward kernel", make_forward_maps(&arguments)));
  }
  visit_instance<std::size(kForwardConfigs)>(
      params.q.dtype, config, [&](auto element, auto index) {
        launch_forward<decltype(element), index>(arguments, launcher);
      });
  return check_cuda("launch of the forward kernel", launcher.error());
}

jaxflash_status run_backward(const jaxflash_attention_backward_params& params,
                             void* workspace, const Device& device,
                             Launcher& launcher) {
  const jaxflash_attention_params& forward = params.forward;
  constexpr int64_t kFewestRowsOfBlock = 64;  // of all the kernels
  const int64_t row_blocks =
      divide_up(forward.q_len, kRowPadding) * (kRowPadding / kFewestRowsOfBlock);
  JAXFLASH_RETURN_IF_ERROR(
      check_blocks(row_blocks * forward.num_heads * batch_size(forward)));
  constexpr int64_t kFewestKeysOfBlock = 64;
  JAXFLASH_RETURN_IF_ERROR(check_blocks(divide_up(forward.kv_len, kFewestKeysOfBlock) *
                                        forward.num_kv_heads * batch_size(forward)));
  BackwardArguments arguments = {};
  plan_backward(params, workspace, device.num_sms, &arguments);
  if (!launcher.only_explains()) {
    JAXFLASH_RETURN_IF_ERROR(check_cuda("tensor maps of the backward kernels",
                                        make_backward_maps(&arguments)));
  }
  const int config = backward_config(params.forward);
  visit_instance<std::size(kBackwardConfigs)>(
      params.forward.q.dtype, config, [&](auto element, auto index) {
        launch_backward<decltype(element), index>(arguments, launcher);
      });
  return check_cuda("launch of the backward kernels", launcher.error());
}

}  // namespace jaxflash::sm90
