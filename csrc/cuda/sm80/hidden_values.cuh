// SPDX-License-Identifier: Apache-2.0
//
// The product P V multiplies hidden values by P = 0, which is 0 unless the value is inf
// or NaN. Where a causal block ends with such numbers it runs again, on masked tiles of
// V without them (drop_nonfinite), and then the rows that do see them get them
// (add_visible_nonfinite). Finite values pay one test per block for it.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/tile.cuh"

namespace jaxflash::sm80 {

// Zeroes what is not finite in a tile in shared memory.
template <class Element, int kRows, int kCols, int kThreads>
__device__ __noinline__ void drop_nonfinite(uint32_t tile) {
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x; chunk < kRows * kCols / 8; chunk += kThreads) {
    uint4 words = ld_shared_v4(tile + chunk * 16);
    auto* elements = reinterpret_cast<Element*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!isfinite(to_float(elements[i]))) elements[i] = from_float<Element>(0.f);
    }
    st_shared_v4(tile + chunk * 16, words);
  }
  __syncthreads();  // the clean tile is visible to all
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
