// SPDX-License-Identifier: Apache-2.0
//
// The product P V multiplies hidden values by P = 0, which is 0 unless the value is inf
// or NaN. So such values are taken out of the tiles of V that only some rows see
// (drop_nonfinite), and where there were any, the rows that do see them get them in the
// end (add_visible_nonfinite).
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/tile.cuh"

namespace jaxflash::sm80 {

// Zeroes what is not finite in a tile in shared memory, which is visible to the block
// before and after. Returns whether there was any.
template <class Element, int kRows, int kCols, int kThreads>
__device__ __forceinline__ bool drop_nonfinite(uint32_t tile) {
  constexpr int kChunks = kRows * kCols / 8;
  constexpr int kSteps = (kChunks + kThreads - 1) / kThreads;
  // 0 * x is 0, or NaN if x is not finite.
  Pair<Element> probe = pair_of_zeros<Element>();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t chunk = threadIdx.x + step * kThreads;
    if (kChunks % kThreads != 0 && chunk >= kChunks) break;
    const uint4 words = ld_shared_v4(tile + chunk * 16);
    const auto* pairs = reinterpret_cast<const Pair<Element>*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      probe = __hfma2(pairs[i], pair_of_zeros<Element>(), probe);
    }
  }
  const bool bad = !__hbeq2(probe, pair_of_zeros<Element>());
  if (!__syncthreads_or(bad)) return false;
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x; chunk < kChunks; chunk += kThreads) {
    uint4 words = ld_shared_v4(tile + chunk * 16);
    auto* elements = reinterpret_cast<Element*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!isfinite(to_float(elements[i]))) elements[i] = from_float<Element>(0.f);
    }
    st_shared_v4(tile + chunk * 16, words);
  }
  __syncthreads();  // the clean tile is visible to all
  return true;
}

// Adds the inf and NaN among keys [first_key, ...) of V to the rows of one warp that
// see them. The keys a row sees only grow with the row, so one walk serves all rows.
template <class Element>
__device__ __noinline__ void add_visible_nonfinite(Element* out, int64_t out_stride,
                                                   const Element* v, int64_t v_stride,
                                                   Visible visible, int first_key,
                                                   int first_row, int end_row,
                                                   int head_dim, int lane) {
  for (int col = lane; col < head_dim; col += 32) {
    float sum = 0.f;
    int key = first_key;
    for (int row = first_row; row < end_row; ++row) {
      for (; key < visible.key_limit(row); ++key) {
        const float value = to_float(v[key * v_stride + col]);
        if (!isfinite(value)) sum += value;
      }
      Element& target = out[(row - first_row) * out_stride + col];
      if (sum != 0.f) target = from_float<Element>(to_float(target) + sum);
    }
  }
}

}  // namespace jaxflash::sm80
