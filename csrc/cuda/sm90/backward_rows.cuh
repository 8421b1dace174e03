// SPDX-License-Identifier: Apache-2.0
//
// The two passes over rows of Q around the Hopper backward kernels; both only move
// bytes.
//
//   before: delta = rowsum(dO o O) - dlse, lse, and that nobody has added to dQ yet. O
//           is out with the bits that out_low has for it
//   after:  dq = scale * dQ,  dscale[row] = rowsum(Q o dQ), dQ = dS K without the scale
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/out_low.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "backward_config.h"
#include "backward_turns.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// The accumulator lies as the tensor cores hold a [64, 8] piece of dQ: thread t of a
// warpgroup has four floats of it, in rows 16 (t / 32) + t % 32 / 4 + {0, 8} and
// columns 2 (t % 4) + {0, 1}. The pieces of 64 rows follow each other.
constexpr int kDqRows = 64;
constexpr int kDqPieceFloats = kDqRows * 8;

constexpr int kRowsThreads = 256;

// A group of kLanes lanes takes one row, 8 columns a lane.
template <int kHeadDim>
struct RowLanes {
  static constexpr int kLanes = kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;
  static constexpr int kRowsPerStep = kRowsThreads / kLanes;

  __device__ static float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
  }
};

// Which rows of which head a block works on.
struct RowBlock {
  int64_t padded;  // number of the first row among all padded rows of all heads
  int first_row;
  uint32_t head;
  uint32_t batch_element;

  __device__ RowBlock(const BackwardArguments& arguments, int rows) {
    const uint32_t blocks_of_head = arguments.num_rows_padded / rows;
    const uint32_t batch_head = blockIdx.x / blocks_of_head;
    const auto num_heads = static_cast<uint32_t>(arguments.params.forward.num_heads);
    padded = static_cast<int64_t>(blockIdx.x) * rows;
    first_row = static_cast<int>(blockIdx.x % blocks_of_head) * rows;
    head = batch_head % num_heads;
    batch_element = batch_head / num_heads;
  }
};

template <class T>
__device__ __forceinline__ T* row_pointer(const jaxflash_tensor& matrix,
                                          const BatchIndex& batch, uint32_t head,
                                          int row) {
  return batch_pointer<T>(matrix, batch) + row * matrix.strides[0] +
         head * matrix.strides[1];
}

template <class T>
__device__ __forceinline__ T& row_value(const jaxflash_tensor& values,
                                        const BatchIndex& batch, uint32_t head,
                                        int row) {
  return batch_pointer<T>(values,
                          batch)[head * values.strides[0] + row * values.strides[1]];
}

template <class Element>
__device__ __forceinline__ void to_floats(float (&x)[8], const uint4& words) {
  const auto* elements = reinterpret_cast<const Element*>(&words);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(elements[i]);
}

// One block: one tile of Q.
template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kRowsThreads)
    backward_rows_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kHeadDim = kBackwardConfigs[kConfigIndex].head_dim;
  constexpr int kRows = kBackwardConfigs[kConfigIndex].block_q;
  using Lanes = RowLanes<kHeadDim>;
  __shared__ float products[kRows];
  griddepcontrol_launch_dependents();

  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  const RowBlock block(arguments, kRows);
  const BatchIndex batch = unravel_batch(forward, block.batch_element);
  const Visible visible(forward, batch);
  const int rows_left = visible.q_rows - block.first_row;

  const int col = threadIdx.x % Lanes::kLanes * 8;
#pragma unroll 4
  for (int step = 0; step < kRows / Lanes::kRowsPerStep; ++step) {
    const int row = step * Lanes::kRowsPerStep + threadIdx.x / Lanes::kLanes;
    float product = 0.f;
    if (row < rows_left && col < forward.value_head_dim) {
      const auto chunk_of = [&](const jaxflash_tensor& matrix) {
        return *reinterpret_cast<const uint4*>(
            row_pointer<const Element>(matrix, batch, block.head,
                                       block.first_row + row) +
            col);
      };
      float out[8];
      float d_out[8];
      to_floats<Element>(out, chunk_of(forward.out));
      to_floats<Element>(d_out, chunk_of(p.d_out));
      uint2 low_words = make_uint2(0, 0);
      if (forward.out_low.data != nullptr) {
        low_words = *reinterpret_cast<const uint2*>(
            row_pointer<const int8_t>(forward.out_low, batch, block.head,
                                      block.first_row + row) +
            col);
      }
      const auto* low = reinterpret_cast<const int8_t*>(&low_words);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        product += with_low_bits<Element>(out[i], low[i]) * d_out[i];
      }
    }
    product = Lanes::sum(product);
    if (col == 0) products[row] = product;
  }

  // From here on a thread has a row.
  const int row = threadIdx.x;
  const bool valid = row < kRows && row < rows_left;
  const float lse = valid ? row_value<const float>(forward.lse, batch, block.head,
                                                   block.first_row + row)
                          : -INFINITY;
  // A row that sees no key takes part with P = exp(S - inf) = 0.
  const bool takes_part = !isinf(lse);
  const bool large = __syncthreads_or(takes_part && fabsf(lse) > kLargeLse);
  if (row >= kRows) return;
  const float d_lse =
      takes_part && p.d_lse.data != nullptr
          ? row_value<const float>(p.d_lse, batch, block.head, block.first_row + row)
          : 0.f;
  arguments.lse[block.padded + row] =
      takes_part ? lse * (large ? 1.f : kLog2E) : INFINITY;
  arguments.delta[block.padded + row] = takes_part ? products[row] - d_lse : 0.f;
  if (row == 0) {
    arguments.large_lse[blockIdx.x] = large;
    if (arguments.dq_accumulator != nullptr) {
#pragma unroll
      for (int sum = 0; sum < kDqSums; ++sum) {
        arguments.dq_state[static_cast<int64_t>(blockIdx.x) * kDqSums + sum] = 0;
      }
    }
    if (arguments.order.by_turns && blockIdx.x == 0) *arguments.num_tickets = 0;
  }
}

// One block: 64 rows.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kRowsThreads)
    dq_conversion_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[backward_config_index(kHeadDim)];
  static_assert(kConfig.head_dim == kHeadDim);
  using Lanes = RowLanes<kHeadDim>;
  // The 4 rows that half a warp writes at a time hit different banks.
  __shared__ __align__(16) float rows[kDqRows][kHeadDim + 8];
  griddepcontrol_wait();

  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  const RowBlock block(arguments, kDqRows);
  if (block.first_row >= forward.q_len) return;
  const BatchIndex batch = unravel_batch(forward, block.batch_element);
  const Visible visible(forward, batch);
  const float scale = softmax_scale(forward, batch);

  // A sum that nobody has added to has no value.
  bool has_sum[kDqSums] = {};
  const Turns<kConfig.block_q, kConfig.block_kv> turns(arguments, visible);
  const int q_tile = block.first_row / kConfig.block_q;
  if (turns.num_tiles(q_tile) > 0) {
#pragma unroll
    for (int sum = 0; sum < kDqSums; ++sum) {
      has_sum[sum] =
          arguments.order.by_turns ? turns.num_adding(sum, q_tile, 0) > 0 : sum == 0;
    }
  }
  const int64_t rows_of_sum =
      static_cast<int64_t>(arguments.num_query_heads) * arguments.num_rows_padded;
  constexpr int kPieces = kDqRows * kHeadDim / 4 / kRowsThreads;  // of a thread
  float4 x[kPieces] = {};
#pragma unroll
  for (int sum = 0; sum < kDqSums; ++sum) {
    if (!has_sum[sum]) continue;
    const auto* accumulator = reinterpret_cast<const float4*>(
        arguments.dq_accumulator + (sum * rows_of_sum + block.padded) * kHeadDim);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 part = __ldcs(accumulator + i * kRowsThreads + threadIdx.x);
      x[i].x += part.x;
      x[i].y += part.y;
      x[i].z += part.z;
      x[i].w += part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int index = i * kRowsThreads + threadIdx.x;
    const int thread = index % kWarpgroup;
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const int col = index / kWarpgroup * 8 + thread % 4 * 2;
    *reinterpret_cast<float2*>(&rows[row][col]) = make_float2(x[i].x, x[i].y);
    *reinterpret_cast<float2*>(&rows[row + 8][col]) = make_float2(x[i].z, x[i].w);
  }
  __syncthreads();

  const int col = threadIdx.x % Lanes::kLanes * 8;
#pragma unroll 1
  for (int step = 0; step < kDqRows / Lanes::kRowsPerStep; ++step) {
    const int row_in_block = step * Lanes::kRowsPerStep + threadIdx.x / Lanes::kLanes;
    const int row = block.first_row + row_in_block;
    const bool valid = row < forward.q_len && col < forward.head_dim;
    const bool sees_keys = visible.sees_keys(row);
    float dq[8] = {};
    if (valid && sees_keys) {
      const auto* source = reinterpret_cast<const float4*>(&rows[row_in_block][col]);
      *reinterpret_cast<float4*>(&dq[0]) = source[0];
      *reinterpret_cast<float4*>(&dq[4]) = source[1];
    }
    if (p.dscale.data != nullptr) {
      float product = 0.f;
      if (valid && sees_keys) {
        float q[8];
        to_floats<Element>(
            q,
            *reinterpret_cast<const uint4*>(
                row_pointer<const Element>(forward.q, batch, block.head, row) + col));
#pragma unroll
        for (int i = 0; i < 8; ++i) product += q[i] * dq[i];
      }
      product = Lanes::sum(product);
      if (valid && col == 0) {
        row_value<float>(p.dscale, batch, block.head, row) = product;
      }
    }
    if (!valid || p.dq.data == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) dq[i] = sees_keys ? dq[i] * scale : 0.f;
    if (p.dq.dtype == JAXFLASH_FLOAT32) {
      float* target = row_pointer<float>(p.dq, batch, block.head, row) + col;
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i] = dq[i];
      continue;
    }
    *reinterpret_cast<uint4*>(row_pointer<Element>(p.dq, batch, block.head, row) +
                              col) =
        make_uint4(pack<Element>(dq[0], dq[1]), pack<Element>(dq[2], dq[3]),
                   pack<Element>(dq[4], dq[5]), pack<Element>(dq[6], dq[7]));
  }
}

}  // namespace jaxflash::sm90
