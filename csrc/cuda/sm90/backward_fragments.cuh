// SPDX-License-Identifier: Apache-2.0
//
// What a warpgroup does with accumulators of the tensor cores in the Hopper backward
// kernels. Layout: see wgmma.cuh. A thread has two rows of an accumulator, 8 apart, and
// of each the columns 8 i + 2 (lane % 4) + {0, 1}.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_tiles.cuh"

namespace jaxflash::sm90 {

template <int kCount>
__device__ __forceinline__ void set_zero(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0.f;
}

// An accumulator as A operands of the next product.
template <class Element, int kCount>
__device__ __forceinline__ void as_operand(uint32_t (&operand)[kCount / 2],
                                           const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    operand[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
  }
}

// The first elements that a thread has of a row of an accumulator, as bits: those in
// columns below `limit`, which counts from the thread's first column.
template <int kColumns>
__device__ __forceinline__ uint32_t elements_below(int limit) {
  static_assert(kColumns <= 128, "a bit for each of a thread's elements of a row");
  if (limit <= 0) return 0;
  if (limit >= kColumns) return ~0u;
  const int count = limit / 8 * 2 + min(limit % 8, 2);
  return (uint64_t{1} << count) - 1;
}

// Zeroes the elements of the thread's two rows whose bit is not set.
template <int kCount>
__device__ __forceinline__ void keep_elements(float (&x)[kCount],
                                              const uint32_t (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int element = i / 4 * 2 + i % 2;
    if (!(keep[i / 2 % 2] >> element & 1)) x[i] = 0.f;
  }
}

// Which of this thread's elements of S^T [keys, kRows] are visible. first_key,
// first_row: of its first element.
template <int kRows>
__device__ __forceinline__ void visible_elements(uint32_t (&keep)[2],
                                                 const Visible& visible, int first_key,
                                                 int first_row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 8 * half;
    const int hidden_rows = visible.first_row(key) - first_row;
    keep[half] = key < visible.kv_rows ? ~elements_below<kRows>(hidden_rows) : 0;
  }
}

// The compiler would rather keep what follows from a value, such as the descriptors of
// all steps of a product, through the whole loop, in more registers than there are.
// From one that it knows nothing about it makes them when they are needed, with the
// adders of the uniform registers.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  uint32_t registers[1] = {value};
  hold_registers(registers);
  return registers[0];
}

// C[64, kRowsB] = A B^T over the head dim, from descriptors of K-major tiles with
// kRowsA and kRowsB rows; starts it.
template <class Element, int kHeadDim, int kRowsA, int kRowsB>
__device__ __forceinline__ void start_scores(float (&c)[kRowsB / 2], uint64_t a,
                                             uint64_t b) {
  hold_registers(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    Wgmma<kRowsB>::template ss<Element, Major::kK, Major::kK>(
        c, a + k_major_step<kRowsA>(k), b + k_major_step<kRowsB>(k), k != 0);
  }
  wgmma_commit_group();
}

// Columns of one instruction of start_sum: with all 256, an accumulator of 128
// registers in one piece, the compiler finds no allocation.
constexpr int sum_columns(int head_dim) { return head_dim == 256 ? 128 : head_dim; }

// sum[64, kHeadDim] += A B, where B is the rows of a tile and A, the operand, in
// registers; starts it. Without `accumulate` the sum starts from zero.
template <class Element, int kHeadDim, int kRows>
__device__ __forceinline__ void start_sum(float (&sum)[kHeadDim / 2],
                                          uint32_t (&operand)[kRows / 4],
                                          const Tile<kRows, kHeadDim>& rows,
                                          bool accumulate) {
  constexpr int kColumns = sum_columns(kHeadDim);
  using Part = float[kColumns / 2];
  const uint64_t b = mn_major_descriptor<kRows>(rows.address());
  hold_registers(sum);
  hold_registers(operand);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
    for (int part = 0; part < kHeadDim / kColumns; ++part) {
      constexpr uint64_t kPartStep =
          kColumns / kPanelColumns * Tile<kRows, kHeadDim>::kPanelBytes >> 4;
      Wgmma<kColumns>::template rs<Element, Major::kMN>(
          reinterpret_cast<Part&>(sum[part * (kColumns / 2)]), operand + 4 * k,
          b + part * kPartStep + mn_major_step(k), accumulate || k != 0);
    }
  }
  wgmma_commit_group();
}

__device__ __forceinline__ float2 ld_shared_float2(const float* values) {
  return *reinterpret_cast<const float2*>(values);
}

// S^T -> P^T = exp(scale S - lse). lse: log2(e) times that of the thread's first row.
template <int kCount>
__device__ __forceinline__ void to_probabilities(float (&s)[kCount], const float* lse,
                                                 float scale) {
  const float scale_log2 = scale * kLog2E;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 row_lse = ld_shared_float2(lse + 2 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[i + j] =
          ex2_approx_ftz(s[i + j] * scale_log2 - (j % 2 ? row_lse.y : row_lse.x));
    }
  }
}

// The exponent of P, in base 2, where lse is large: the product is rounded as in the
// forward pass, which put the rounded maximum into lse, so that their difference is
// exact.
__device__ __forceinline__ float exact_exponent(float s, float scale, float lse) {
  return (__fmul_rn(s, scale) - lse) * kLog2E;
}

// The same as to_probabilities with lse as it is.
template <int kCount>
__device__ __forceinline__ void to_exact_probabilities(float (&s)[kCount],
                                                       const float* lse, float scale) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 row_lse = ld_shared_float2(lse + 2 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[i + j] = ex2_approx_ftz(
          exact_exponent(s[i + j], scale, j % 2 ? row_lse.y : row_lse.x));
    }
  }
}

// Rounds an accumulator into the panels of a tile, from row `row` on, which is the
// warp's first.
template <class Element, int kTileRows, int kCount>
__device__ __forceinline__ void stage_rows(uint32_t tile, const float (&x)[kCount],
                                           int row, int lane) {
  const uint32_t lane_row = row + lane % 16;
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const uint32_t chunk = i % 4 * 2 + lane / 16;
    stmatrix_x4(tile + i / 4 * (kTileRows * kPanelRowBytes) +
                    lane_row * kPanelRowBytes + ((chunk ^ lane_row % 8) << 4),
                pack<Element>(x[8 * i], x[8 * i + 1]),
                pack<Element>(x[8 * i + 2], x[8 * i + 3]),
                pack<Element>(x[8 * i + 4], x[8 * i + 5]),
                pack<Element>(x[8 * i + 6], x[8 * i + 7]));
  }
}

// Writes an accumulator to a float32 matrix, element by element: only for gradients of
// operands that are shared over a batch axis. row: the lane's first.
template <int kCount>
__device__ __forceinline__ void store_float32(float* matrix, int64_t row_stride,
                                              const float (&x)[kCount], int row,
                                              int num_rows, int num_columns, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= num_rows) continue;
    float* target = matrix + (row + 8 * half) * row_stride;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 8 * i + 2 * (lane % 4) + j;
        if (column < num_columns) target[column] = x[4 * i + 2 * half + j];
      }
    }
  }
}

// The sum of dK or dV of a warpgroup times `factor`. A key that no row sees gets 0,
// whatever the products that it took part in gave. first_key: of the thread.
template <int kCount>
__device__ __forceinline__ void finish_gradient(float (&sum)[kCount], float factor,
                                                const Visible& visible, int first_key) {
  const bool seen[2] = {first_key < visible.kv_rows, first_key + 8 < visible.kv_rows};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[i] = seen[i / 2 % 2] ? sum[i] * factor : 0.f;
  }
}

// Stages the 64 rows of dK or dV that a warpgroup has in a tile of the shape of K, or
// stores them where they are float32. tile_row: the first one of the warp.
template <class Element, int kRows, int kHeadDim>
__device__ __forceinline__ void stage_gradient(const BackwardArguments& arguments,
                                               const jaxflash_tensor& matrix,
                                               const float (&x)[kHeadDim / 2],
                                               const Tile<kRows, kHeadDim>& tile,
                                               const KeyBlock& block, int first_key,
                                               int tile_row) {
  if (matrix.data == nullptr) return;
  const int lane = threadIdx.x % 32;
  if (matrix.dtype != JAXFLASH_FLOAT32) {
    stage_rows<Element, kRows>(tile.address(), x, tile_row, lane);
    return;
  }
  const jaxflash_attention_params& forward = arguments.params.forward;
  store_float32(
      batch_pointer<float>(matrix, block.batch()) + block.kv_head * matrix.strides[1],
      matrix.strides[0], x, first_key + tile_row + lane / 4,
      static_cast<int>(forward.kv_len), static_cast<int>(forward.head_dim), lane);
}

// Copies what stage_gradient has staged, from tile_row on; one thread.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void copy_gradient(const jaxflash_tensor& matrix,
                                              const CUtensorMap* map,
                                              const Tile<kRows, kHeadDim>& tile,
                                              const KeyBlock& block, int first_key,
                                              int tile_row) {
  if (matrix.data == nullptr || matrix.dtype == JAXFLASH_FLOAT32) return;
#pragma unroll
  for (int panel = 0; panel < tile.kNumPanels; ++panel) {
    cp_async_bulk_tensor_4d_store(
        map, tile.address() + panel * tile.kPanelBytes + tile_row * kPanelRowBytes,
        panel * kPanelColumns, first_key + tile_row, block.kv_head,
        static_cast<int>(block.batch_element));
  }
}

}  // namespace jaxflash::sm90
