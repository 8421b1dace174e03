// SPDX-License-Identifier: Apache-2.0
//
// What a block of the portable forward kernel does about inf and NaN in hidden values:
// see common/hidden_values.cuh.
#pragma once

#include <cstdint>

#include "../common/hidden_values.cuh"
#include "../common/tile.cuh"

namespace jaxflash::sm80 {

// Zeroes what is not finite in a tile in shared memory, which is visible to the block
// before and after. Returns whether there was any.
template <class Element, int kRows, int kCols, int kThreads>
__device__ __forceinline__ bool drop_nonfinite(uint32_t tile) {
  constexpr int kChunks = kRows * kCols / 8;
  constexpr int kSteps = (kChunks + kThreads - 1) / kThreads;
  NonfiniteProbe<Element> probe;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t chunk = threadIdx.x + step * kThreads;
    if (kChunks % kThreads != 0 && chunk >= kChunks) break;
    probe.add(ld_shared_v4(tile + chunk * 16));
  }
  if (!__syncthreads_or(probe.found())) return false;
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x; chunk < kChunks; chunk += kThreads) {
    const uint32_t place = tile + chunk * 16;
    st_shared_v4(place, finite_part<Element>(ld_shared_v4(place)));
  }
  __syncthreads();  // the clean tile is visible to all
  return true;
}

}  // namespace jaxflash::sm80
