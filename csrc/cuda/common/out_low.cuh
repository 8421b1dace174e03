// SPDX-License-Identifier: Apache-2.0
//
// out_low: eight bits of the float32 result behind those that fit into out.
//
// Delta = rowsum(dO o out) takes from dS = P o (dP - delta) what all keys of a row have
// in common. An error of delta is common to the row too: dQ gets it times sum_j P k_j,
// which drowns dQ where the keys have a large common part. Rounding of out is by far
// its largest cause, so the forward pass hands on what rounding took: the difference of
// the two floats' bits (floats of one sign are ordered as their bits), in units of 2^-8
// of the last place of Element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "element.cuh"
#include "ptx_sm80.cuh"

namespace jaxflash {

template <class Element>
constexpr int kLowShift = 0;
template <>
inline constexpr int kLowShift<__nv_bfloat16> = 16 - 8;
template <>
inline constexpr int kLowShift<__half> = 13 - 8;

// What rounding x to Element takes, in units of 2^-8 of the last place: more than eight
// bits can tell where a tie was rounded down, where Element is subnormal, and where a
// large x becomes inf.
template <class Element>
__device__ __forceinline__ int low_bits(float x) {
  constexpr int kHalf = 1 << (kLowShift<Element> - 1);
  const float rounded = to_float(from_float<Element>(x));
  const int lost = __float_as_int(x) - __float_as_int(rounded);
  return (lost + kHalf) >> kLowShift<Element>;
}

// That of two elements, saturated to bytes, in the low half of a word; the low half of
// `upper` in its high half.
template <class Element>
__device__ __forceinline__ uint32_t low_bytes(float x0, float x1, uint32_t upper) {
  return cvt_pack_sat_s8_s32(low_bits<Element>(x1), low_bits<Element>(x0), upper);
}

template <class Element>
__device__ __forceinline__ float with_low_bits(float rounded, int low) {
  if (!isfinite(rounded)) return rounded;
  return __int_as_float(__float_as_int(rounded) + low * (1 << kLowShift<Element>));
}

// Bytes from row to row where a warp stages out_low in shared memory: 8 more than the
// row has, so that the 8 rows which the lanes of a warp write at a time hit 8 different
// pairs of banks.
template <int kHeadDim>
constexpr int kOutLowRow = kHeadDim + 8;

// Rows [0, kRows) x columns [0, cols) from shared to global memory, by one warp.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void store_out_low(int8_t* destination, int64_t row_stride,
                                              int rows_left, int cols,
                                              const unsigned char* stage, int lane,
                                              bool vector_access) {
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll 1
  for (int index = lane; index < kRows * kChunks; index += 32) {
    const int row = index / kChunks;
    const int col = index % kChunks * 8;
    if (row >= rows_left || col >= cols) continue;
    const uint2 bytes =
        *reinterpret_cast<const uint2*>(stage + row * kOutLowRow<kHeadDim> + col);
    int8_t* target = destination + row * row_stride + col;
    if (vector_access) {
      *reinterpret_cast<uint2*>(target) = bytes;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = i < 4 ? bytes.x : bytes.y;
      if (col + i < cols) target[i] = static_cast<int8_t>(word >> (8 * (i % 4)));
    }
  }
}

}  // namespace jaxflash
