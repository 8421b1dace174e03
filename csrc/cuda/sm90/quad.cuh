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

// Thread t (of 4) gives x[i] to each thread i and gets what threads 0, 1, 2, 3 gave to
// t, in this order.
__device__ __forceinline__ uint4 quad_transpose_32(const uint32_t (&x)[4], int t) {
  const bool odd = t % 2 != 0;
  const bool late = t >= 2;
  // From both threads of this pair: for t % 2, then for t % 2 + 2.
  const uint32_t other_0 = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
  const uint32_t other_2 = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  const uint32_t front_even = odd ? other_0 : x[0];
  const uint32_t front_odd = odd ? x[1] : other_0;
  const uint32_t back_even = odd ? other_2 : x[2];
  const uint32_t back_odd = odd ? x[3] : other_2;
  // The same from the other pair.
  const uint32_t far_even = __shfl_xor_sync(~0u, late ? front_even : back_even, 2);
  const uint32_t far_odd = __shfl_xor_sync(~0u, late ? front_odd : back_odd, 2);
  return late ? make_uint4(far_even, far_odd, back_even, back_odd)
              : make_uint4(front_even, front_odd, far_even, far_odd);
}

// The same with 16 bits for each thread, in x[0] for threads 0 and 1, in x[1] for 2
// and 3.
__device__ __forceinline__ uint2 quad_transpose_16(const uint32_t (&x)[2], int t) {
  constexpr uint32_t kLowHalves = 0x5410;
  constexpr uint32_t kHighHalves = 0x7632;
  const uint32_t crossed = __shfl_xor_sync(~0u, t < 2 ? x[1] : x[0], 2);
  // From threads t % 2 and t % 2 + 2: for the even one of this pair, then the odd one.
  const uint32_t first = t < 2 ? x[0] : crossed;
  const uint32_t second = t < 2 ? crossed : x[1];
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
