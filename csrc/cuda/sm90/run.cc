// SPDX-License-Identifier: Apache-2.0
#include "sm90/run.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <utility>

#include "api/status.h"
#include "api/validate.h"
#include "sm90/backward_config.h"
#include "sm90/launch.h"
#include "sm90/launch_backward.h"
#include "sm90/tile_config.h"

namespace jaxflash::sm90 {
namespace {

using ForwardLauncher = void (*)(const ForwardArguments&, Launcher&);
using BackwardLauncher = void (*)(const BackwardArguments&, Launcher&);

template <class Element, int... kIndex>
constexpr auto forward_launchers(std::integer_sequence<int, kIndex...>) {
  return std::array{static_cast<ForwardLauncher>(launch_forward<Element, kIndex>)...};
}

template <class Element, int... kIndex>
constexpr auto backward_launchers(std::integer_sequence<int, kIndex...>) {
  return std::array{static_cast<BackwardLauncher>(launch_backward<Element, kIndex>)...};
}

ForwardLauncher forward_launcher(int32_t dtype, int config) {
  using Indices =
      std::make_integer_sequence<int, static_cast<int>(std::size(kForwardConfigs))>;
  static constexpr auto kBfloat16 = forward_launchers<__nv_bfloat16>(Indices{});
  static constexpr auto kFloat16 = forward_launchers<__half>(Indices{});
  return dtype == JAXFLASH_BFLOAT16 ? kBfloat16[config] : kFloat16[config];
}

BackwardLauncher backward_launcher(int32_t dtype, int config) {
  using Indices =
      std::make_integer_sequence<int, static_cast<int>(std::size(kBackwardConfigs))>;
  static constexpr auto kBfloat16 = backward_launchers<__nv_bfloat16>(Indices{});
  static constexpr auto kFloat16 = backward_launchers<__half>(Indices{});
  return dtype == JAXFLASH_BFLOAT16 ? kBfloat16[config] : kFloat16[config];
}

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
  forward_launcher(params.q.dtype, config)(arguments, launcher);
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
  backward_launcher(params.forward.q.dtype, config)(arguments, launcher);
  return check_cuda("launch of the backward kernels", launcher.error());
}

}  // namespace jaxflash::sm90
