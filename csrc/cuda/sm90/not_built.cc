// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the Hopper kernels in a build without architecture 90.
#include "api/status.h"
#include "sm90/run.h"

namespace jaxflash::sm90 {
namespace {

constexpr char kObstacle[] = "this build has no kernels for sm_90a";

jaxflash_status refuse() { return fail(JAXFLASH_UNAVAILABLE, kObstacle); }

}  // namespace

const char* forward_obstacle(const jaxflash_attention_params&) { return kObstacle; }
const char* backward_obstacle(const jaxflash_attention_backward_params&) {
  return kObstacle;
}

size_t forward_workspace_bytes(const jaxflash_attention_params&) { return 0; }
size_t backward_workspace_bytes(const jaxflash_attention_backward_params&) { return 0; }

bool backward_is_reproducible(const jaxflash_attention_backward_params&) {
  return false;
}

jaxflash_status run_forward(const jaxflash_attention_params&, void*, const Device&,
                            Launcher&) {
  return refuse();
}
jaxflash_status run_backward(const jaxflash_attention_backward_params&, void*,
                             const Device&, Launcher&) {
  return refuse();
}

}  // namespace jaxflash::sm90
