// SPDX-License-Identifier: Apache-2.0
//
// The product P V multiplies hidden values by P = 0, which is 0 unless the value is inf
// or NaN. So such values are taken out of the tiles of V that only some rows see, and
// where there were any, the rows that do see them get them in the end
// (restore_visible_nonfinite).
#pragma once

#include <cstdint>

#include "element.cuh"
#include "problem.cuh"

namespace jaxflash {

// Looks for inf and NaN in chunks of 8 elements.
template <class Element>
class NonfiniteProbe {
 public:
  __device__ __forceinline__ void add(const uint4& chunk) {
    const auto* pairs = reinterpret_cast<const Pair<Element>*>(&chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      products_ = __hfma2(pairs[i], pair_of_zeros<Element>(), products_);
    }
  }

  __device__ __forceinline__ bool found() const {
    return !__hbeq2(products_, pair_of_zeros<Element>());
  }

 private:
  // 0 * x is 0, or NaN if x is not finite.
  Pair<Element> products_ = pair_of_zeros<Element>();
};

// The chunk with zeros in place of what is not finite.
template <class Element>
__device__ __forceinline__ uint4 finite_part(uint4 chunk) {
  auto* elements = reinterpret_cast<Element*>(&chunk);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!isfinite(to_float(elements[i]))) elements[i] = from_float<Element>(0.f);
  }
  return chunk;
}

// Adds the inf and NaN among keys [first_key, ...) of V to the rows of one warp that
// see them. The keys a row sees only grow with the row, so one walk serves all rows.
template <class Element>
__device__ __noinline__ void restore_visible_nonfinite(Element* out, int64_t out_stride,
                                                       const Element* v,
                                                       int64_t v_stride,
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

}  // namespace jaxflash
