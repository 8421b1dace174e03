// SPDX-License-Identifier: Apache-2.0
//
// Attention backward for every NVIDIA GPU from sm_80 on: FlashAttention-2, algorithm 2
// (arXiv 2307.08691), with mma.sync and cp.async.
//
//   delta = rowsum(dO o O) - dlse                            (backward_rows.cuh)
//   P  = exp(scale Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                        dK = scale dS^T Q
//   dS = P o (dP - delta)              dQ = scale dS K
//
// Work: one thread block per (batch, key/value head, block of keys), which walks the
// rows of Q of every query head of the group and keeps dK and dV in registers: grouped
// heads are summed there in float32. dQ, to which all blocks of a head add, goes to a
// float32 accumulator (backward_rows.cuh converts it).
//
// Scores are computed transposed, S^T = K Q^T, so that the accumulators of P^T and dS^T
// are the A operands of dV and dK as they stand. A warp computes [16 row_tiles keys,
// block_q / split rows] of them but needs all rows of Q for its columns of dK and dV:
// it starts with the part it holds, and takes the parts of its neighbours from shared
// memory after the barrier, like the dS of all warps for dQ.
//
//   copy   | K V Q0 dO0 | Q1 dO1               | Q2 dO2
//   tensor |            | S dP dV dK | dV dK dQ | S dP ...
//   barrier             ^            ^ P, dS    ^
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/tile.cuh"
#include "backward_rows.cuh"
#include "launch.h"
#include "tile_config.h"

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

// c = A B^T over the head dim: A [keys, H] and B [rows of Q, H] in shared memory.
template <class Element, int kHeadDim, int kRows, int kCols>
__device__ __forceinline__ void product_over_head(Fragments<kRows, kCols>& c,
                                                  const LaneAddress<kHeadDim>& a_lane,
                                                  const LaneAddress<kHeadDim>& b_lane) {
  set_zero(c);
#pragma unroll
  for (int h = 0; h < kHeadDim / 16; ++h) {
    uint32_t a[kRows][4];
#pragma unroll
    for (int m = 0; m < kRows; ++m) ldmatrix_x4(a[m], a_lane.at(16 * m, 2 * h));
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

// Up to here the rounding of lse * log2(e) moves P by less than 2^-13.
constexpr float kLargeLse = 1024.f;

// S -> (scale S - lse) log2(e) for rows beyond: the product is rounded as in the
// forward pass, which put the rounded maximum into lse, so that their difference is
// exact. lse points at the value of the lane's first column.
template <int kRows, int kCols>
__device__ __forceinline__ void to_exact_exponents(Fragments<kRows, kCols>& s,
                                                   const float* lse, float scale) {
#pragma unroll
  for (int n = 0; n < kCols; ++n) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] = (__fmul_rn(s[m][n][i], scale) - lse[8 * n + i % 2]) * kLog2E;
      }
    }
  }
}

// Zeroes the (key, row) that are hidden. first_key and first_row are those of this
// lane's first element.
template <int kRows, int kCols>
__device__ __forceinline__ void zero_hidden(Fragments<kRows, kCols>& x,
                                            const Visible& visible, int first_key,
                                            int first_row) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + 16 * m + 8 * half;
      const int hidden_rows =
          key >= visible.kv_rows ? INT_MAX : visible.first_row(key) - first_row;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * n + i < hidden_rows) x[m][n][2 * half + i] = 0.f;
        }
      }
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

// The order of float32 additions decides the last bits of dQ. Deterministic calls add
// in the order of the keys: the blocks of keys that see a tile of rows are the first
// ones of the head, so each waits for its predecessor. That one has started, since GPUs
// start blocks in the order of their numbers, though CUDA does not promise it.
__device__ __forceinline__ void wait_for_turn(const int* turn, int number) {
  if (threadIdx.x == 0) {
    while (ld_acquire_gpu(turn) != number) __nanosleep(32);
  }
  __syncthreads();  // the additions of all blocks before are done
}

__device__ __forceinline__ void pass_turn(int* turn) {
  __threadfence();
  __syncthreads();  // the additions of this block are done
  if (threadIdx.x == 0) red_release_gpu_add(turn, 1);
}

// The walk over the query heads of a group and the Q tiles of each.
struct QueryTile {
  int head;
  int tile;

  __device__ __forceinline__ void advance(int first_tile, int end_tile) {
    if (++tile == end_tile) {
      tile = first_tile;
      ++head;
    }
  }
};

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kBackwardConfigs[kConfigIndex].num_threads())
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr int kHeadDim = kConfig.head_dim;
  constexpr int kBlockQ = kConfig.block_q;
  constexpr int kBlockKV = kConfig.block_kv;
  constexpr int kThreads = kConfig.num_threads();
  constexpr int kSplit = kConfig.split;
  constexpr int kStages = kConfig.num_stages;
  constexpr int kRows = kConfig.row_tiles;          // a warp's 16-key tiles
  constexpr int kScoreCols = kBlockQ / kSplit / 8;  // and chunks of S^T and dP^T
  constexpr int kHeadCols = kHeadDim / kSplit / 8;  // of dK and dV
  constexpr int kDqRows = kConfig.dq_row_tiles();   // of dQ
  constexpr int kDqRowWarps = kConfig.dq_row_warps();
  constexpr int kDqCols = kHeadDim * kDqRowWarps / kConfig.num_warps() / 8;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  const uint32_t k_smem =
      cvta_generic_to_shared(shared_memory);                 // [kBlockKV, kHeadDim]
  const uint32_t v_smem = k_smem + kConfig.kv_tile_bytes();  // [kBlockKV, kHeadDim]
  const uint32_t ds_smem =
      v_smem + kConfig.kv_tile_bytes();  // dS^T [kBlockKV, kBlockQ]
  const uint32_t p_smem = ds_smem + kConfig.score_tile_bytes();  // P^T, if kSplit > 1
  const uint32_t stages = ds_smem + kConfig.score_tile_bytes() * (kSplit > 1 ? 2 : 1);
  const auto q_smem = [&](int stage) { return stages + stage * kConfig.stage_bytes(); };
  const auto do_smem = [&](int stage) {
    return q_smem(stage) + kConfig.q_tile_bytes();
  };
  const auto lse_smem = [&](int stage) {  // lse [kBlockQ], then delta [kBlockQ]
    return do_smem(stage) + kConfig.q_tile_bytes();
  };

  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  const bool vector_access = arguments.vector_access;
  const bool deterministic = forward.deterministic != 0;
  const int num_kv_heads = static_cast<int>(forward.num_kv_heads);
  const int group_size = static_cast<int>(forward.num_heads) / num_kv_heads;
  // Blocks of one head run together and share its Q and dO in L2; the early ones,
  // which the most rows of a causal call see, start first.
  const int first_key =
      static_cast<int>(blockIdx.x % arguments.num_kv_tiles) * kBlockKV;
  const uint32_t batch_head = blockIdx.x / arguments.num_kv_tiles;
  const int kv_head = static_cast<int>(batch_head % num_kv_heads);
  const uint32_t batch_element = batch_head / num_kv_heads;
  const BatchIndex batch = unravel_batch(forward, batch_element);

  const Visible visible(forward, batch);
  const int head_dim = static_cast<int>(forward.head_dim);
  const int first_tile = visible.first_row(first_key) / kBlockQ;
  const int end_tile =
      first_key < visible.kv_rows ? (visible.q_rows + kBlockQ - 1) / kBlockQ : 0;
  const int num_steps = max(0, end_tile - first_tile) * group_size;

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_key = warp / kSplit * 16 * kRows;
  const int part = warp % kSplit;
  const int part_row = part * kScoreCols * 8;  // first row of Q of this warp's scores
  const int part_chunk = part * kHeadCols;     // first chunk of its dK and dV
  const int dq_row = warp % kDqRowWarps * 16 * kDqRows;
  const int dq_chunk = warp / kDqRowWarps * kDqCols;
  const int lane_key = first_key + warp_key + lane / 4;
  const int lane_col = 2 * (lane % 4);

  const auto k_rows = operand_a<kHeadDim>(k_smem + warp_key * kHeadDim * 2, lane);
  const auto v_rows = operand_a<kHeadDim>(v_smem + warp_key * kHeadDim * 2, lane);
  const auto k_all = operand_a<kHeadDim>(k_smem, lane);
  const auto ds_all = operand_b<kBlockQ>(ds_smem, lane);
  const auto ds_rows = operand_a<kBlockQ>(ds_smem + warp_key * kBlockQ * 2, lane);
  const auto p_rows = operand_a<kBlockQ>(p_smem + warp_key * kBlockQ * 2, lane);

  const float scale = softmax_scale(forward, batch);
  const float scale_log2 = scale * kLog2E;

  const auto padded_row = [&](const QueryTile& at) {
    const int64_t head = static_cast<int64_t>(batch_element) * forward.num_heads +
                         kv_head * group_size + at.head;
    return head * arguments.num_rows_padded + at.tile * kBlockQ;
  };
  const Element* q = batch_pointer<const Element>(forward.q, batch) +
                     kv_head * group_size * forward.q.strides[1];
  const Element* d_out = batch_pointer<const Element>(p.d_out, batch) +
                         kv_head * group_size * p.d_out.strides[1];
  const auto load_stage = [&](const QueryTile& at, int stage) {
    const int row = at.tile * kBlockQ;
    const auto load = [&](uint32_t tile, const Element* heads,
                          const int64_t (&strides)[3]) {
      load_tile<kBlockQ, kHeadDim, kThreads>(
          tile, heads + at.head * strides[1] + row * strides[0], strides[0],
          visible.q_rows - row, head_dim, vector_access);
    };
    load(q_smem(stage), q, forward.q.strides);
    load(do_smem(stage), d_out, p.d_out.strides);
    if (threadIdx.x < 2 * kBlockQ / 4) {
      const float* source = threadIdx.x < kBlockQ / 4 ? arguments.lse : arguments.delta;
      cp_async_cg_16(lse_smem(stage) + threadIdx.x * 16,
                     source + padded_row(at) + threadIdx.x % (kBlockQ / 4) * 4, 16);
    }
    cp_async_commit_group();
  };

  Fragments<kRows, kHeadCols> dk;
  Fragments<kRows, kHeadCols> dv;
  set_zero(dk);
  set_zero(dv);

  QueryTile current = {0, first_tile};
  QueryTile next = current;
  if (num_steps > 0) {
    const auto load = [&](uint32_t tile, const jaxflash_tensor& matrix) {
      load_tile<kBlockKV, kHeadDim, kThreads>(
          tile,
          batch_pointer<const Element>(matrix, batch) + kv_head * matrix.strides[1] +
              first_key * matrix.strides[0],
          matrix.strides[0], visible.kv_rows - first_key, head_dim, vector_access);
    };
    load(k_smem, forward.k);
    load(v_smem, forward.v);
    load_stage(current, 0);
  }

#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % kStages;
    const int first_row = current.tile * kBlockQ;
    next.advance(first_tile, end_tile);
    cp_async_wait_group<0>();
    __syncthreads();  // Q and dO visible; all are done with the last stage, P and dS
    if (kStages > 1 && step + 1 < num_steps) load_stage(next, (step + 1) % kStages);

    const float* lse = reinterpret_cast<const float*>(
        shared_memory + (lse_smem(stage) - k_smem) + (part_row + lane_col) * 4);
    float2 row_lse[kScoreCols];
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < kScoreCols; ++n) {
      row_lse[n] = *reinterpret_cast<const float2*>(lse + 8 * n);
      largest = fmaxf(largest, fmaxf(fabsf(row_lse[n].x), fabsf(row_lse[n].y)));
    }
    const bool large_lse = __any_sync(~0u, largest > kLargeLse);

    Fragments<kRows, kScoreCols> scores;
    product_over_head<Element, kHeadDim>(
        scores, k_rows,
        operand_b<kHeadDim>(q_smem(stage) + part_row * kHeadDim * 2, lane));
    if (large_lse) to_exact_exponents(scores, lse, scale);
    Fragments<kRows, kScoreCols> ds;
    product_over_head<Element, kHeadDim>(
        ds, v_rows,
        operand_b<kHeadDim>(do_smem(stage) + part_row * kHeadDim * 2, lane));

    const float factor = large_lse ? 1.f : scale_log2;
#pragma unroll
    for (int n = 0; n < kScoreCols; ++n) {
      const float shift[2] = {large_lse ? 0.f : row_lse[n].x * kLog2E,
                              large_lse ? 0.f : row_lse[n].y * kLog2E};
      const float2 row_delta = *reinterpret_cast<const float2*>(lse + kBlockQ + 8 * n);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& prob = scores[m][n][i];
          prob = ex2_approx_ftz(prob * factor - shift[i % 2]);
          ds[m][n][i] = prob * (ds[m][n][i] - (i % 2 ? row_delta.y : row_delta.x));
        }
      }
    }
    const bool masked = first_key + kBlockKV > visible.kv_rows ||
                        visible.first_row(first_key + kBlockKV - 1) > first_row;
    if (masked) {
      zero_hidden(scores, visible, lane_key, first_row + part_row + lane_col);
      zero_hidden(ds, visible, lane_key, first_row + part_row + lane_col);
    }
    store_fragments<Element, kBlockQ>(ds_smem, ds, warp_key, part_row / 8, lane);
    if constexpr (kSplit > 1) {
      store_fragments<Element, kBlockQ>(p_smem, scores, warp_key, part_row / 8, lane);
    }

    const auto q_all = operand_a<kHeadDim>(q_smem(stage), lane);
    const auto do_all = operand_a<kHeadDim>(do_smem(stage), lane);
    uint32_t a[kRows][4];
#pragma unroll
    for (int j = 0; j < kScoreCols / 2; ++j) {
      as_operand_a<Element>(a, scores, j);
      add_product<Element>(dv, a, do_all, part_row + 16 * j, part_chunk);
    }
#pragma unroll
    for (int j = 0; j < kScoreCols / 2; ++j) {
      as_operand_a<Element>(a, ds, j);
      add_product<Element>(dk, a, q_all, part_row + 16 * j, part_chunk);
    }
    __syncthreads();  // P and dS visible to all
#pragma unroll
    for (int other = 1; other < kSplit; ++other) {
      const int row = (part + other) % kSplit * kScoreCols * 8;
#pragma unroll
      for (int j = 0; j < kScoreCols / 2; ++j) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          ldmatrix_x4(a[m], p_rows.at(16 * m, row / 8 + 2 * j));
        }
        add_product<Element>(dv, a, do_all, row + 16 * j, part_chunk);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          ldmatrix_x4(a[m], ds_rows.at(16 * m, row / 8 + 2 * j));
        }
        add_product<Element>(dk, a, q_all, row + 16 * j, part_chunk);
      }
    }
    if (kStages == 1 && step + 1 < num_steps) {
      __syncthreads();  // all are done with Q and dO
      load_stage(next, 0);
    }

    if (p.dq.data != nullptr || p.dscale.data != nullptr) {
      Fragments<kDqRows, kDqCols> dq;
      set_zero(dq);
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; ++j) {
        uint32_t ds_a[kDqRows][4];
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) {
          ldmatrix_x4_trans(ds_a[m], ds_all.at(16 * j, (dq_row + 16 * m) / 8));
        }
        add_product<Element>(dq, ds_a, k_all, 16 * j, dq_chunk);
      }
      float* accumulator =
          arguments.dq_accumulator +
          dq_fragment<kHeadDim>(padded_row(current) + dq_row, dq_chunk);
      int* turn = arguments.dq_turn + padded_row(current) / kMinBlockQ;
      if (deterministic) wait_for_turn(turn, first_key / kBlockKV);
#pragma unroll
      for (int m = 0; m < kDqRows; ++m) {
#pragma unroll
        for (int n = 0; n < kDqCols; ++n) {
          red_add_v4(accumulator + dq_fragment<kHeadDim>(16 * m, n), lane, dq[m][n]);
        }
      }
      if (deterministic) pass_turn(turn);
    }
    current = next;
  }

#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int n = 0; n < kHeadCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[m][n][i] *= scale;
    }
  }
  __syncthreads();  // all are done with K and V, whose tiles now stage dK and dV
  const int keys_left = static_cast<int>(forward.kv_len) - first_key;
  const auto store = [&](const jaxflash_tensor& matrix,
                         const Fragments<kRows, kHeadCols>& x, uint32_t tile) {
    if (matrix.data == nullptr) return;
    const int64_t offset = kv_head * matrix.strides[1] + first_key * matrix.strides[0];
    if (matrix.dtype == JAXFLASH_FLOAT32) {
      store_float32(batch_pointer<float>(matrix, batch) + offset, matrix.strides[0], x,
                    warp_key + lane / 4, keys_left, part_chunk * 8 + lane_col,
                    head_dim);
      return;
    }
    store_fragments<Element, kHeadDim>(tile, x, warp_key, part_chunk, lane);
    __syncthreads();  // the whole tile is staged
    store_tile<kBlockKV, kHeadDim, kThreads>(
        batch_pointer<Element>(matrix, batch) + offset, matrix.strides[0], keys_left,
        head_dim, tile, threadIdx.x, vector_access);
  };
  store(p.dk, dk, k_smem);
  store(p.dv, dv, v_smem);
}

template <class Element, int kConfigIndex>
cudaError_t launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  cudaError_t error =
      launch_backward_rows<Element, kConfig.head_dim>(arguments, stream);
  if (error != cudaSuccess) return error;
  if (arguments.num_blocks > 0) {
    const auto kernel = backward_kernel<Element, kConfigIndex>;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kConfig.shared_bytes());
    if (error != cudaSuccess) return error;
    kernel<<<arguments.num_blocks, kConfig.num_threads(), kConfig.shared_bytes(),
             stream>>>(arguments);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return launch_dq_conversion<Element, kConfig.head_dim>(arguments, stream);
}

}  // namespace jaxflash::sm80
