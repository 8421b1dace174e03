// SPDX-License-Identifier: Apache-2.0
//
// Matrices of float32 accumulators in the registers of a warp, as mma.sync holds them,
// and the products and copies between them and tiles of shared memory (tile.cuh).
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/tile.cuh"

namespace jaxflash::sm80 {

// [16 kRows, 8 kCols] accumulators of a warp, in m16n8 fragments.
template <int kRows, int kCols>
using Fragments = float[kRows][kCols][4];

template <int kRows, int kCols>
__device__ __forceinline__ void set_zero(Fragments<kRows, kCols>& x) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] = 0.f;
    }
  }
}

// What is 0 stays 0 even if the factor is not finite: a key that no row sees has no
// gradient.
template <int kRows, int kCols>
__device__ __forceinline__ void multiply_nonzero(Fragments<kRows, kCols>& x,
                                                 float factor) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (x[m][n][i] != 0.f) x[m][n][i] *= factor;
      }
    }
  }
}

// A operands for k16 step j of a product over the columns of an accumulator.
template <class Element, int kRows, int kCols>
__device__ __forceinline__ void as_operand_a(uint32_t (&a)[kRows][4],
                                             const Fragments<kRows, kCols>& x, int j) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &x[m][2 * j + i / 2][2 * (i % 2)];
      a[m][i] = pack<Element>(pair[0], pair[1]);
    }
  }
}

// The same from a tile [rows, k]: the 16 of k are chunks `chunk` and its neighbour.
template <int kRows, int kTileCols>
__device__ __forceinline__ void load_operand_a(uint32_t (&a)[kRows][4],
                                               const LaneAddress<kTileCols>& lane,
                                               int chunk) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) ldmatrix_x4(a[m], lane.at(16 * m, chunk));
}

// c = A B^T over the head dim: A [16 kRows, H] and B [8 kCols, H] in shared memory.
template <class Element, int kHeadDim, int kRows, int kCols>
__device__ __forceinline__ void product_over_head(Fragments<kRows, kCols>& c,
                                                  const LaneAddress<kHeadDim>& a_lane,
                                                  const LaneAddress<kHeadDim>& b_lane) {
  set_zero(c);
#pragma unroll
  for (int h = 0; h < kHeadDim / 16; ++h) {
    uint32_t a[kRows][4];
    load_operand_a(a, a_lane, 2 * h);
#pragma unroll
    for (int n = 0; n < kCols / 2; ++n) {
      uint32_t b[4];
      ldmatrix_x4(b, b_lane.at(16 * n, 2 * h));
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        mma_m16n8k16(c[m][2 * n], a[m], b[0], b[1], Element());
        mma_m16n8k16(c[m][2 * n + 1], a[m], b[2], b[3], Element());
      }
    }
  }
}

// c += A B for one k16 step: B [k, H] in shared memory, from row `row` and chunk
// `chunk` on.
template <class Element, int kHeadDim, int kRows, int kCols>
__device__ __forceinline__ void add_product(Fragments<kRows, kCols>& c,
                                            const uint32_t (&a)[kRows][4],
                                            const LaneAddress<kHeadDim>& b_lane,
                                            int row, int chunk) {
#pragma unroll
  for (int n = 0; n < kCols / 2; ++n) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, b_lane.at(row, chunk + 2 * n));
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      mma_m16n8k16(c[m][2 * n], a[m], b[0], b[1], Element());
      mma_m16n8k16(c[m][2 * n + 1], a[m], b[2], b[3], Element());
    }
  }
}

// Writes an accumulator, rounded, to a tile: from its row `row` (a multiple of 16) and
// chunk `chunk` on.
template <class Element, int kTileCols, int kRows, int kCols>
__device__ __forceinline__ void store_fragments(uint32_t tile,
                                                const Fragments<kRows, kCols>& x,
                                                int row, int chunk, int lane) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        st_shared_b32(
            tile +
                chunk_offset<kTileCols>(row + 16 * m + 8 * half + lane / 4, chunk + n) +
                lane % 4 * 4,
            pack<Element>(x[m][n][2 * half], x[m][n][2 * half + 1]));
      }
    }
  }
}

// Writes an accumulator to a float32 matrix, element by element: only for gradients of
// operands that are shared over a batch axis.
template <int kRows, int kCols>
__device__ __forceinline__ void store_float32(float* matrix, int64_t row_stride,
                                              const Fragments<kRows, kCols>& x,
                                              int first_row, int num_rows,
                                              int first_col, int num_cols) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + 16 * m + i / 2 * 8;
        const int col = first_col + 8 * n + i % 2;
        if (row < num_rows && col < num_cols) {
          matrix[row * row_stride + col] = x[m][n][i];
        }
      }
    }
  }
}

}  // namespace jaxflash::sm80
