// SPDX-License-Identifier: Apache-2.0
//
// The two 16-bit element types and their packed pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxflash {

template <class Element>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <class Element>
using Pair = typename PairOf<Element>::Type;

template <class Element>
__device__ __forceinline__ Pair<Element> pair_of_zeros() {
  const uint32_t zeros = 0;
  return *reinterpret_cast<const Pair<Element>*>(&zeros);
}

// Two elements as the tensor cores hold them: the first in the low half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class Element>
__device__ __forceinline__ float to_float(Element x) {
  return static_cast<float>(x);
}

template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  return static_cast<Element>(x);
}

}  // namespace jaxflash
