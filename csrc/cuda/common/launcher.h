// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one call, one after the other: launched, or only described. Both go
// through the same code, so that an explanation is what a launch would do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash {

// What a block works on; 0 where a kernel has no such tile.
struct TileShape {
  int block_q = 0;
  int block_kv = 0;
  int num_stages = 0;
};

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;  // dynamic
};

class Launcher {
 public:
  explicit Launcher(cudaStream_t stream) : stream_(stream) {}
  // Appends the kernels to the explanation instead, which needs no device.
  explicit Launcher(jaxflash_explanation* explanation) : explanation_(explanation) {}

  bool only_explains() const { return explanation_ != nullptr; }

  // A kernel with early_start may start before the one launched before it has ended,
  // and waits for it itself (griddepcontrol.wait). `name` is that of its function.
  // Nothing is launched after an error, or without blocks.
  template <class Arguments>
  void launch(const char* name, const TileShape& tile, const Grid& grid,
              void (*kernel)(Arguments), const Arguments& arguments,
              bool early_start = false) {
    if (grid.blocks == 0) return;
    if (only_explains()) {
      explain(name, tile, grid);
    } else if (error_ == cudaSuccess) {
      launch(reinterpret_cast<const void*>(kernel), grid, &arguments, early_start);
    }
  }

  // Zeroes a buffer of the workspace.
  void clear(void* buffer, size_t bytes);

  cudaError_t error() const { return error_; }

 private:
  void explain(const char* name, const TileShape& tile, const Grid& grid);
  void launch(const void* kernel, const Grid& grid, const void* arguments,
              bool early_start);

  cudaStream_t stream_ = nullptr;
  jaxflash_explanation* explanation_ = nullptr;
  cudaError_t error_ = cudaSuccess;
  bool launched_ = false;
};

}  // namespace jaxflash
