// SPDX-License-Identifier: Apache-2.0
//
// The running softmax of the 64 rows of a warpgroup, on accumulators as wgmma.cuh
// describes them: each thread has two rows, 8 apart, element i belongs to row i / 2 %
// 2, and the four threads of a quad share a row.
//
//   m = max(m, rowmax S),  P = exp(scale (S - m)),
//   l = exp(scale (m_old - m)) l + rowsum P
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm80.cuh"
#include "quad.cuh"

namespace jaxflash::sm90 {

// Hides what lies at or past `limit` columns after this thread's first one, in its row
// r of S. The comparison of constant columns with one bit mask per 128 of them costs a
// seventh of comparing each with the limit.
template <int kBlockKV>
__device__ __forceinline__ void hide_columns(float (&s)[kBlockKV / 2], int r,
                                             int limit) {
#pragma unroll
  for (int first = 0; first < kBlockKV; first += 128) {
    // Of the thread's 32 columns 8 j + {0, 1} here, how many are below the limit.
    const int left = max(0, min(128, limit - first));
    const int count = left / 8 * 2 + min(left % 8, 2);
    const uint32_t keep = count >= 32 ? ~0u : (1u << count) - 1;
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const int i = first / 2 + bit / 2 * 4 + 2 * r + bit % 2;
      if (i < kBlockKV / 2 && (keep >> bit & 1) == 0) s[i] = -INFINITY;
    }
  }
}

template <int kBlockKV>
struct OnlineSoftmax {
  float scale_log2;      // |scale| log2(e)
  float row_max[2];      // of unscaled S
  float row_sum[2];      // of this thread's columns only, until the end
  float rounded_sum[2];  // the same of P as rounded for P V
  float rescale[2];      // what the last update multiplies l and O by

  __device__ __forceinline__ explicit OnlineSoftmax(float scale) {
    // Never zero, so that a hidden -inf stays -inf; a scale this small is a uniform P.
    constexpr float kSmallest = 1e-37f;
    const float magnitude = fabsf(scale) * kLog2E;
    scale_log2 = magnitude < kSmallest ? kSmallest : magnitude;  // NaN stays NaN
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
      rounded_sum[r] = 0.f;
    }
  }

  // What exp subtracts. A row that has seen no key yet must not compute inf - inf. The
  // same rounded number everywhere, hence no fused multiply-add.
  __device__ __forceinline__ float shift(int r) const {
    return row_max[r] == -INFINITY ? 0.f : __fmul_rn(row_max[r], scale_log2);
  }

  // Turns S into P and brings m and l up to date. The maximum only has to keep exp in
  // range: a lazy one stays until a new one is 2^8 times as large, P stays below 256,
  // and most tiles rescale nothing.
  __device__ __forceinline__ void update(float (&s)[kBlockKV / 2]) {
    constexpr float kThresholdLog2 = 8.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float old = row_max[r];
      float maximum = old;
#pragma unroll
      for (int i = 2 * r; i < kBlockKV / 2; i += 4) {
        maximum = fmaxf(fmaxf(maximum, s[i]), s[i + 1]);
      }
      maximum = quad_max(maximum);
      const bool raise = (maximum - old) * scale_log2 > kThresholdLog2;
      row_max[r] = raise ? maximum : old;
      // Exactly 1 where the maximum stays.
      rescale[r] = ex2_approx_ftz(__fmul_rn(old, scale_log2) - shift(r));
      row_sum[r] *= rescale[r];
      rounded_sum[r] *= rescale[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_shift = shift(r);
#pragma unroll
      for (int i = 2 * r; i < kBlockKV / 2; i += 4) {
        s[i] = ex2_approx_ftz(s[i] * scale_log2 - row_shift);
        s[i + 1] = ex2_approx_ftz(s[i + 1] * scale_log2 - row_shift);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 2 * r; i < kBlockKV / 2; i += 4) {
        row_sum[r] += s[i];
        row_sum[r] += s[i + 1];
      }
    }
  }

  // Brings O up to date with the last update of the maximum.
  template <int kCount>
  __device__ __forceinline__ void rescale_output(float (&o)[kCount]) const {
    if (!__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // Sums P as it was rounded. O divided by this sum is an exact mean of rows of V,
  // which out_low needs; lse needs the other.
  template <class Element>
  __device__ __forceinline__ void add_rounded(const uint32_t (&p)[kBlockKV / 4]) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      const auto pair = *reinterpret_cast<const Pair<Element>*>(&p[i]);
      rounded_sum[i % 2] += __low2float(pair) + __high2float(pair);
    }
  }

  // With logits so large that float32 rounds lse visibly, P of the backward pass is
  // only right if lse holds the row's maximum in the very rounding that scale * S has
  // there. So the rounding of the shift in base 2 leaves the sum, and the maximum comes
  // back in natural units.
  __device__ __forceinline__ float log_sum_exp(int r, float sum, float scale) const {
    const float shift_error = fmaf(row_max[r], scale_log2, -shift(r));
    return __fmul_rn(row_max[r], fabsf(scale)) + (__log2f(sum) - shift_error) * kLn2;
  }
};

}  // namespace jaxflash::sm90
