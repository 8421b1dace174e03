// SPDX-License-Identifier: Apache-2.0
//
// The two passes over rows of Q around the backward kernel; both only move bytes.
//
//   before: delta = rowsum(dO o O) - dlse, lse, and a zeroed dQ accumulator. O is out
//           with the bits that out_low has for it
//   after:  dq = scale * dQ,  dscale[row] = rowsum(Q o dQ), dQ = dS K without the scale
//
// A group of kLanes lanes takes one row, 8 columns a lane.
#pragma once

#include <cstdint>

#include "../common/device.h"
#include "../common/element.cuh"
#include "../common/out_low.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm80.cuh"
#include "launch.h"
#include "tile_config.h"

namespace jaxflash::sm80 {

// The accumulator lies in fragments as the tensor cores hold them: 16 rows x 8 columns
// are 128 floats, four of each lane. Where the fragment at a row (a multiple of 16) and
// a chunk of columns starts:
template <int kHeadDim>
__device__ __forceinline__ int64_t dq_fragment(int64_t row, int chunk) {
  return row * kHeadDim + chunk * 128;
}

constexpr int kRowsThreads = 256;

template <int kHeadDim>
struct RowLanes {
  static constexpr int kLanes = kHeadDim <= 32    ? 4
                                : kHeadDim <= 64  ? 8
                                : kHeadDim <= 128 ? 16
                                                  : 32;
  static constexpr int kRowsPerBlock = kRowsThreads / kLanes;

  __device__ static float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
  }
};

// Which row of which head a group of lanes works on.
struct RowIndex {
  int64_t padded;  // number of the row among all padded rows of all heads
  int row;
  uint32_t head;
  uint32_t batch_element;

  __device__ RowIndex(const BackwardArguments& arguments, int64_t padded_row)
      : padded(padded_row),
        row(static_cast<int>(padded_row % arguments.num_rows_padded)) {
    const auto batch_head =
        static_cast<uint32_t>(padded_row / arguments.num_rows_padded);
    const auto num_heads = static_cast<uint32_t>(arguments.params.forward.num_heads);
    head = batch_head % num_heads;
    batch_element = batch_head / num_heads;
  }
};

// Columns [col, col + 8) of a row as float32, zeros past num_cols.
template <class Element>
__device__ __forceinline__ void load_columns(float (&x)[8], const Element* row, int col,
                                             int num_cols, bool vector_access) {
  if (vector_access) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (col < num_cols) words = *reinterpret_cast<const uint4*>(row + col);
    const auto* elements = reinterpret_cast<const Element*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(elements[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = col + i < num_cols ? to_float(row[col + i]) : 0.f;
}

// Adds to out[col, col + 8) what rounding took from it. row_low is out_low's row.
template <class Element>
__device__ __forceinline__ void add_low_bits(float (&out)[8], const int8_t* row_low,
                                             int col, int num_cols,
                                             bool vector_access) {
  uint2 bytes = make_uint2(0, 0);
  auto* low = reinterpret_cast<int8_t*>(&bytes);
  if (vector_access) {
    if (col < num_cols) bytes = *reinterpret_cast<const uint2*>(row_low + col);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = col + i < num_cols ? row_low[col + i] : 0;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = with_low_bits<Element>(out[i], low[i]);
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kRowsThreads)
    backward_rows_kernel(const __grid_constant__ BackwardArguments arguments) {
  using Lanes = RowLanes<kHeadDim>;
  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  const int64_t padded_row = static_cast<int64_t>(blockIdx.x) * Lanes::kRowsPerBlock +
                             threadIdx.x / Lanes::kLanes;
  const RowIndex index(arguments, padded_row);
  const int col = threadIdx.x % Lanes::kLanes * 8;
  const BatchIndex batch = unravel_batch(forward, index.batch_element);
  const Visible visible(forward, batch);
  const bool valid = index.row < visible.q_rows;

  float product = 0.f;
  if (valid && col < kHeadDim) {
    const int head_dim = static_cast<int>(forward.value_head_dim);
    const auto row_of = [&](const jaxflash_tensor& matrix) {
      return batch_pointer<const Element>(matrix, batch) +
             index.row * matrix.strides[0] + index.head * matrix.strides[1];
    };
    float out[8];
    float d_out[8];
    load_columns(out, row_of(forward.out), col, head_dim, arguments.vector_access);
    load_columns(d_out, row_of(p.d_out), col, head_dim, arguments.vector_access);
    if (forward.out_low.data != nullptr) {
      const int8_t* row_low = batch_pointer<const int8_t>(forward.out_low, batch) +
                              index.row * forward.out_low.strides[0] +
                              index.head * forward.out_low.strides[1];
      add_low_bits<Element>(out, row_low, col, head_dim, arguments.vector_access);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) product += out[i] * d_out[i];
  }
  product = Lanes::sum(product);

  // Any order of zeros is the right one.
  if (col < kHeadDim) {
    auto* accumulator = reinterpret_cast<float4*>(arguments.dq_accumulator +
                                                  index.padded * kHeadDim + col);
    accumulator[0] = make_float4(0.f, 0.f, 0.f, 0.f);
    accumulator[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (col != 0) return;
  if (forward.deterministic && index.row % kMinBlockQ == 0) {
    arguments.dq_turn[index.padded / kMinBlockQ] = 0;
  }
  const auto value_of_row = [&](const jaxflash_tensor& values) {
    return batch_pointer<const float>(
        values, batch)[index.head * values.strides[0] + index.row * values.strides[1]];
  };
  const float lse = valid ? value_of_row(forward.lse) : -INFINITY;
  // A row that sees no key takes part with P = exp(S - inf) = 0.
  const bool takes_part = !isinf(lse);
  const float d_lse =
      takes_part && p.d_lse.data != nullptr ? value_of_row(p.d_lse) : 0.f;
  arguments.lse[index.padded] = takes_part ? lse : INFINITY;
  arguments.delta[index.padded] = takes_part ? product - d_lse : 0.f;
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kRowsThreads)
    dq_conversion_kernel(const __grid_constant__ BackwardArguments arguments) {
  using Lanes = RowLanes<kHeadDim>;
  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  // Rows r and r + 8 share the sectors of a fragment, so neighbours take those.
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * Lanes::kRowsPerBlock +
                       threadIdx.x / Lanes::kLanes;
  const RowIndex index(arguments, slot / 16 * 16 + slot % 2 * 8 + slot % 16 / 2);
  const bool valid = index.row < forward.q_len;
  const int col = threadIdx.x % Lanes::kLanes * 8;
  const int head_dim = static_cast<int>(forward.head_dim);
  const BatchIndex batch = unravel_batch(forward, index.batch_element);
  const Visible visible(forward, batch);

  const bool sees_keys = visible.sees_keys(index.row);
  float dq[8] = {};
  if (sees_keys && col < head_dim) {
    const int row = static_cast<int>(index.padded % 16);
    const float* fragment =
        arguments.dq_accumulator + dq_fragment<kHeadDim>(index.padded - row, col / 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dq[i] = fragment[add_v4_index(row % 8 * 4 + i / 2, row / 8 * 2 + i % 2)];
    }
  }
  if (p.dscale.data != nullptr) {
    float product = 0.f;
    if (sees_keys && col < head_dim) {
      float q[8];
      load_columns(q,
                   batch_pointer<const Element>(forward.q, batch) +
                       index.row * forward.q.strides[0] +
                       index.head * forward.q.strides[1],
                   col, head_dim, arguments.vector_access);
#pragma unroll
      for (int i = 0; i < 8; ++i) product += q[i] * dq[i];
    }
    product = Lanes::sum(product);
    if (valid && col == 0) {
      batch_pointer<float>(
          p.dscale,
          batch)[index.head * p.dscale.strides[0] + index.row * p.dscale.strides[1]] =
          product;
    }
  }
  if (!valid || col >= head_dim || p.dq.data == nullptr) return;
  const float scale = softmax_scale(forward, batch);
#pragma unroll
  for (int i = 0; i < 8; ++i) dq[i] = sees_keys ? dq[i] * scale : 0.f;
  const int64_t offset =
      index.row * p.dq.strides[0] + index.head * p.dq.strides[1] + col;
  if (p.dq.dtype == JAXFLASH_FLOAT32) {
    float* target = batch_pointer<float>(p.dq, batch) + offset;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < head_dim) target[i] = dq[i];
    }
    return;
  }
  Element* target = batch_pointer<Element>(p.dq, batch) + offset;
  if (arguments.vector_access) {
    *reinterpret_cast<uint4*>(target) =
        make_uint4(pack<Element>(dq[0], dq[1]), pack<Element>(dq[2], dq[3]),
                   pack<Element>(dq[4], dq[5]), pack<Element>(dq[6], dq[7]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < head_dim) target[i] = from_float<Element>(dq[i]);
  }
}

template <int kHeadDim>
Grid row_grid(const BackwardArguments& arguments) {
  constexpr int kRows = RowLanes<kHeadDim>::kRowsPerBlock;
  static_assert(kRowPadding % kRows == 0, "no block has rows of two heads");
  const int64_t blocks = static_cast<int64_t>(arguments.num_query_heads) *
                         arguments.num_rows_padded / kRows;
  return {blocks, kRowsThreads};
}

template <class Element, int kHeadDim>
void launch_backward_rows(const BackwardArguments& arguments, Launcher& launcher) {
  launcher.launch("backward_rows_kernel", {RowLanes<kHeadDim>::kRowsPerBlock},
                  row_grid<kHeadDim>(arguments),
                  backward_rows_kernel<Element, kHeadDim>, arguments);
}

template <class Element, int kHeadDim>
void launch_dq_conversion(const BackwardArguments& arguments, Launcher& launcher) {
  if (!wants_dq(arguments.params)) return;
  launcher.launch("dq_conversion_kernel", {RowLanes<kHeadDim>::kRowsPerBlock},
                  row_grid<kHeadDim>(arguments),
                  dq_conversion_kernel<Element, kHeadDim>, arguments);
}

}  // namespace jaxflash::sm80
