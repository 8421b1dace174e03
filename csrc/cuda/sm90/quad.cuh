// SPDX-License-Identifier: Apache-2.0
//
// The four threads that share a row of an accumulator: lanes 4 i to 4 i + 3.
#pragma once

#include <cstdint>

namespace jaxflash::sm90 {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Thread t (of 4) gives 16 bits x[i] to each thread i and gets what threads 0, 1, 2, 3
// gave to t, in this order.
__device__ __forceinline__ uint2 quad_transpose(const uint32_t (&x)[4], int t) {
  constexpr uint32_t kLowHalves = 0x5410;
  constexpr uint32_t kHighHalves = 0x7632;
  // What is for threads 0 and 1, and for 2 and 3.
  const uint32_t front = x[0] | x[1] << 16;
  const uint32_t back = x[2] | x[3] << 16;
  const uint32_t crossed = __shfl_xor_sync(~0u, t < 2 ? back : front, 2);
  // From threads t % 2 and t % 2 + 2: for the even one of this pair, then the odd one.
  const uint32_t first = t < 2 ? front : crossed;
  const uint32_t second = t < 2 ? crossed : back;
  const bool odd = t % 2 != 0;
  const uint32_t mine = __byte_perm(first, second, odd ? kHighHalves : kLowHalves);
  const uint32_t others = __byte_perm(first, second, odd ? kLowHalves : kHighHalves);
  const uint32_t theirs = __shfl_xor_sync(~0u, others, 1);
  const uint32_t from_0_and_2 = odd ? theirs : mine;
  const uint32_t from_1_and_3 = odd ? mine : theirs;
  return make_uint2(__byte_perm(from_0_and_2, from_1_and_3, kLowHalves),
                    __byte_perm(from_0_and_2, from_1_and_3, kHighHalves));
}

}  // namespace jaxflash::sm90
