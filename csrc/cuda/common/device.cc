// SPDX-License-Identifier: Apache-2.0
#include "common/device.h"

#include "api/status.h"

namespace jaxflash {
namespace {

jaxflash_status check_capability(const Device& device) {
  if (device.compute_capability >= 80) return JAXFLASH_OK;
  return fail(JAXFLASH_UNAVAILABLE,
              "the CUDA kernels need compute capability 8.0 or later, this device has "
              "%d.%d",
              device.compute_capability / 10, device.compute_capability % 10);
}

}  // namespace

jaxflash_status check_cuda(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return JAXFLASH_OK;
  // The runtime keeps the error for whoever asks next: the launch of another call.
  cudaGetLastError();
  return fail(JAXFLASH_INTERNAL, "%s: %s: %s (%d)", call, cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<int>(error));
}

jaxflash_status find_device(Device* device) {
  int index = 0;
  JAXFLASH_RETURN_IF_ERROR(check_cuda("cudaGetDevice", cudaGetDevice(&index)));
  cudaError_t error = cudaSuccess;
  const auto read = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, index);
    return value;
  };
  const int major = read(cudaDevAttrComputeCapabilityMajor);
  device->compute_capability = 10 * major + read(cudaDevAttrComputeCapabilityMinor);
  device->num_sms = read(cudaDevAttrMultiProcessorCount);
  device->shared_memory_of_block = read(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->shared_memory_of_sm = read(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  JAXFLASH_RETURN_IF_ERROR(check_cuda("cudaDeviceGetAttribute", error));
  return check_capability(*device);
}

jaxflash_status check_device(const Device& device) {
  if (device.num_sms < 1 || device.shared_memory_of_block < 1 ||
      device.shared_memory_of_sm < 1) {
    return fail(JAXFLASH_INVALID_ARGUMENT,
                "device: num_sms, shared_memory_of_block and shared_memory_of_sm must "
                "be positive, got %d, %d and %d",
                device.num_sms, device.shared_memory_of_block,
                device.shared_memory_of_sm);
  }
  return check_capability(device);
}

jaxflash_status check_blocks(int64_t blocks) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  if (blocks <= kMaxBlocks) return JAXFLASH_OK;
  return fail(JAXFLASH_UNSUPPORTED,
              "batch * heads * tiles: at most %lld thread blocks, got %lld",
              static_cast<long long>(kMaxBlocks), static_cast<long long>(blocks));
}

}  // namespace jaxflash
