// SPDX-License-Identifier: Apache-2.0
//
// The rows of a warp in the portable forward kernel: running softmax, output, and how
// they leave.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/out_low.cuh"
#include "../common/problem.cuh"
#include "../common/tile.cuh"

namespace jaxflash::sm80 {

// Rows, running softmax and output of one warp. Lane l holds rows l / 4 and l / 4 + 8
// of each 16-row tile, columns 2 (l % 4) + {0, 1} of each group of 8.
template <class Element, int kHeadDim, int kBlockKV, int kRowTiles>
struct ForwardRows {
  static constexpr int kRowsPerLane = 2 * kRowTiles;

  float s[kRowTiles][kBlockKV / 8][4];  // [16 kRowTiles, kBlockKV]
  float o[kRowTiles][kHeadDim / 8][4];  // [16 kRowTiles, kHeadDim]
  float row_max[kRowsPerLane];          // of unscaled S
  float row_sum[kRowsPerLane];          // of this lane's columns only, until the end
  // Row sums of P as rounded for P V, as a product with ones: every column is the sum.
  // O is divided by this one, so that it is an exact mean of rows of V; lse needs the
  // other.
  float rounded_sum[kRowTiles][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rounded_sum[m][i] = 0.f;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0.f;
      }
    }
  }

  // S = Q K^T. q addresses this warp's rows of the Q tile, k the K tile.
  __device__ __forceinline__ void scores(const LaneAddress<kHeadDim>& q,
                                         const LaneAddress<kHeadDim>& k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kBlockKV / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0.f;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadDim / 16; ++h) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(a[m], q.at(16 * m, 2 * h));
#pragma unroll
      for (int n = 0; n < kBlockKV / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, k.at(16 * n, 2 * h));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16(s[m][2 * n], a[m], b[0], b[1], Element());
          mma_m16n8k16(s[m][2 * n + 1], a[m], b[2], b[3], Element());
        }
      }
    }
  }

  // Hides the keys that a row does not see. first_row and first_col are those of this
  // lane's first element.
  __device__ __forceinline__ void mask(const Visible& visible, int first_row,
                                       int first_col) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int limit = visible.key_limit(first_row + 16 * m + 8 * half) - first_col;
#pragma unroll
        for (int n = 0; n < kBlockKV / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * n + i >= limit) s[m][n][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }

  // Brings the running maximum up to date with S, and the sum and O to it. The maximum
  // only has to keep exp in range, so a row keeps its old one until a new one is 2^8
  // times as large: P stays below 256, and most tiles rescale nothing.
  __device__ __forceinline__ void update_maximum(float scale_log2) {
    constexpr float kThresholdLog2 = 8.f;
    float rescale[kRowsPerLane];
    bool any_rescale = false;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      float maximum = s[r / 2][0][2 * (r % 2)];
#pragma unroll
      for (int n = 0; n < kBlockKV / 8; ++n) {
        maximum = fmaxf(maximum,
                        fmaxf(s[r / 2][n][2 * (r % 2)], s[r / 2][n][2 * (r % 2) + 1]));
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
      const float old = row_max[r];
      const bool raise = (maximum - old) * scale_log2 > kThresholdLog2;
      any_rescale |= raise;
      row_max[r] = raise ? maximum : old;
      // Exactly 1 where the maximum stays.
      rescale[r] = ex2_approx_ftz(__fmul_rn(old, scale_log2) - shift(r, scale_log2));
    }
    if (!__any_sync(~0u, any_rescale)) return;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      row_sum[r] *= rescale[r];
      rounded_sum[r / 2][2 * (r % 2)] *= rescale[r];
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        o[r / 2][n][2 * (r % 2)] *= rescale[r];
        o[r / 2][n][2 * (r % 2) + 1] *= rescale[r];
      }
    }
  }

  // What exp subtracts. A row that has seen no key yet must not compute inf - inf. The
  // same rounded number everywhere, hence no fused multiply-add.
  __device__ __forceinline__ float shift(int r, float scale_log2) const {
    return row_max[r] == -INFINITY ? 0.f : __fmul_rn(row_max[r], scale_log2);
  }

  // With logits so large that float32 rounds lse visibly, P of the backward pass is
  // only right if lse holds the row's maximum in the very rounding that scale * S has
  // there. So the rounding of the shift in base 2 leaves the sum, and the maximum comes
  // back in natural units.
  __device__ __forceinline__ float log_sum_exp(int r, float sum, float scale,
                                               float scale_log2) const {
    const float shift_error = fmaf(row_max[r], scale_log2, -shift(r, scale_log2));
    return __fmul_rn(row_max[r], scale) + (log2f(sum) - shift_error) * kLn2;
  }

  // P = exp(S - m), O += P V, by steps of 16 keys so that exp of one step runs beside
  // the product of another. The accumulator layout of P is the A operand's: it only
  // needs rounding.
  __device__ __forceinline__ void accumulate(const LaneAddress<kHeadDim>& v,
                                             float scale_log2) {
    float shifts[kRowsPerLane];
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) shifts[r] = shift(r, scale_log2);
    const uint32_t ones = pack<Element>(1.f, 1.f);
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = 2 * m + i % 2;
          float* pair = &s[m][2 * j + i / 2][2 * (i % 2)];
          pair[0] = ex2_approx_ftz(pair[0] * scale_log2 - shifts[r]);
          pair[1] = ex2_approx_ftz(pair[1] * scale_log2 - shifts[r]);
          row_sum[r] += pair[0] + pair[1];
          a[m][i] = pack<Element>(pair[0], pair[1]);
        }
        mma_m16n8k16(rounded_sum[m], a[m], ones, ones, Element());
      }
#pragma unroll
      for (int h = 0; h < kHeadDim / 16; ++h) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, v.at(16 * j, 2 * h));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16(o[m][2 * h], a[m], b[0], b[1], Element());
          mma_m16n8k16(o[m][2 * h + 1], a[m], b[2], b[3], Element());
        }
      }
    }
  }

  // out = O / l in place; lse[row * lse_stride] of the rows below q_len.
  __device__ __forceinline__ void finish(int lane, const Visible& visible, int lane_row,
                                         int q_len, float scale, float scale_log2,
                                         float* lse, int64_t lse_stride) {
    bool empty[kRowsPerLane];
    bool any_empty = false;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      float sum = row_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = lane_row + 8 * r;
      // Padded rows are zeros in shared memory and saw keys all the same; and with a
      // scale of NaN, hidden keys count.
      empty[r] = sum == 0.f || !visible.sees_keys(row);
      any_empty |= empty[r];
      const float inverse = 1.f / rounded_sum[r / 2][2 * (r % 2)];
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        o[r / 2][n][2 * (r % 2)] *= inverse;
        o[r / 2][n][2 * (r % 2) + 1] *= inverse;
      }
      if (lane % 4 == 0 && row < q_len) {
        lse[row * lse_stride] =
            empty[r] ? -INFINITY : log_sum_exp(r, sum, fabsf(scale), scale_log2);
      }
    }
    // What such rows have summed up may be inf or NaN, which no factor makes 0.
    if (!__any_sync(~0u, any_empty)) return;
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        if (empty[r]) o[r / 2][n][2 * (r % 2)] = o[r / 2][n][2 * (r % 2) + 1] = 0.f;
      }
    }
  }

  // O, rounded, to a tile of 16 * kRowTiles rows that belongs to this warp.
  __device__ __forceinline__ void stage_out(uint32_t tile, int lane) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float* pair = &o[r / 2][n][2 * (r % 2)];
        st_shared_b32(tile + chunk_offset<kHeadDim>(8 * r + lane / 4, n) + lane % 4 * 4,
                      pack<Element>(pair[0], pair[1]));
      }
    }
    __syncwarp();
  }

  // What rounding O took, to the same place in the layout of store_out_low.
  __device__ __forceinline__ void stage_out_low(unsigned char* tile, int lane) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const float* pair = &o[r / 2][n][2 * (r % 2)];
        unsigned char* row = tile + (8 * r + lane / 4) * kOutLowRow<kHeadDim>;
        *reinterpret_cast<uint16_t*>(row + 8 * n + lane % 4 * 2) =
            static_cast<uint16_t>(low_bytes<Element>(pair[0], pair[1], 0));
      }
    }
    __syncwarp();
  }
};

}  // namespace jaxflash::sm80
