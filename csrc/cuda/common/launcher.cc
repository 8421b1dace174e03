// SPDX-License-Identifier: Apache-2.0
#include "common/launcher.h"

namespace jaxflash {

void Launcher::launch(const void* kernel, const Grid& grid, const void* arguments,
                      bool early_start) {
  if (grid.shared_bytes > 0) {
    error_ = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(grid.shared_bytes));
    if (error_ != cudaSuccess) return;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned int>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream_;
  config.attrs = &attribute;
  config.numAttrs = early_start && launched_ ? 1 : 0;
  void* all[] = {const_cast<void*>(arguments)};
  error_ = cudaLaunchKernelExC(&config, kernel, all);
  launched_ = true;
}

void Launcher::explain(const char* name, const TileShape& tile, const Grid& grid) {
  if (explanation_->num_kernels == JAXFLASH_MAX_KERNELS) {
    error_ = cudaErrorInvalidValue;  // the header has room for fewer than a pass needs
    return;
  }
  jaxflash_kernel& kernel = explanation_->kernels[explanation_->num_kernels++];
  kernel.name = name;
  kernel.block_q = tile.block_q;
  kernel.block_kv = tile.block_kv;
  kernel.num_stages = tile.num_stages;
  kernel.num_threads = grid.threads;
  kernel.num_blocks = grid.blocks;
  kernel.shared_memory_bytes = static_cast<int64_t>(grid.shared_bytes);
}

void Launcher::clear(void* buffer, size_t bytes) {
  if (only_explains() || error_ != cudaSuccess) return;
  error_ = cudaMemsetAsync(buffer, 0, bytes, stream_);
}

}  // namespace jaxflash
