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

#include "../common/problem.cuh"
#include "../common/tile.cuh"
#include "backward_block.cuh"
#include "backward_rows.cuh"
#include "fragments.cuh"
#include "launch.h"
#include "tile_config.h"

namespace jaxflash::sm80 {

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

// P = exp(scale S - lse) and dS = P o (dP - delta), hidden elements included. k and v
// address a warp's keys, q and d_out its rows of Q; lse and delta point at the values
// of the lane's first column.
template <class Element, int kHeadDim, int kRows, int kCols>
__device__ __forceinline__ void compute_scores(
    Fragments<kRows, kCols>& p, Fragments<kRows, kCols>& ds,
    const LaneAddress<kHeadDim>& k, const LaneAddress<kHeadDim>& v,
    const LaneAddress<kHeadDim>& q, const LaneAddress<kHeadDim>& d_out,
    const float* lse, const float* delta, float scale) {
  float2 row_lse[kCols];
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < kCols; ++n) {
    row_lse[n] = *reinterpret_cast<const float2*>(lse + 8 * n);
    largest = fmaxf(largest, fmaxf(fabsf(row_lse[n].x), fabsf(row_lse[n].y)));
  }
  const bool large_lse = __any_sync(~0u, largest > kLargeLse);

  product_over_head<Element>(p, k, q);
  if (large_lse) to_exact_exponents(p, lse, scale);
  product_over_head<Element>(ds, v, d_out);

  const float factor = large_lse ? 1.f : scale * kLog2E;
#pragma unroll
  for (int n = 0; n < kCols; ++n) {
    const float shift[2] = {large_lse ? 0.f : row_lse[n].x * kLog2E,
                            large_lse ? 0.f : row_lse[n].y * kLog2E};
    const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& prob = p[m][n][i];
        prob = ex2_approx_ftz(prob * factor - shift[i % 2]);
        ds[m][n][i] = prob * (ds[m][n][i] - (i % 2 ? row_delta.y : row_delta.x));
      }
    }
  }
}

// dV += P^T dO and dK += dS^T Q over the rows from `row` on, whose scores the warp
// holds.
template <class Element, int kHeadDim, int kRows, int kScoreCols, int kHeadCols>
__device__ __forceinline__ void add_own_rows(Fragments<kRows, kHeadCols>& dk,
                                             Fragments<kRows, kHeadCols>& dv,
                                             const Fragments<kRows, kScoreCols>& p,
                                             const Fragments<kRows, kScoreCols>& ds,
                                             const LaneAddress<kHeadDim>& q,
                                             const LaneAddress<kHeadDim>& d_out,
                                             int row, int chunk) {
#pragma unroll
  for (int j = 0; j < kScoreCols / 2; ++j) {
    uint32_t a[kRows][4];
    as_operand_a<Element>(a, p, j);
    add_product<Element>(dv, a, d_out, row + 16 * j, chunk);
  }
#pragma unroll
  for (int j = 0; j < kScoreCols / 2; ++j) {
    uint32_t a[kRows][4];
    as_operand_a<Element>(a, ds, j);
    add_product<Element>(dk, a, q, row + 16 * j, chunk);
  }
}

// The same over kNumRows rows whose scores lie in the tiles of P^T and dS^T, where p
// and ds address the warp's keys.
template <class Element, int kNumRows, int kHeadDim, int kBlockQ, int kRows,
          int kHeadCols>
__device__ __forceinline__ void add_shared_rows(Fragments<kRows, kHeadCols>& dk,
                                                Fragments<kRows, kHeadCols>& dv,
                                                const LaneAddress<kBlockQ>& p,
                                                const LaneAddress<kBlockQ>& ds,
                                                const LaneAddress<kHeadDim>& q,
                                                const LaneAddress<kHeadDim>& d_out,
                                                int row, int chunk) {
#pragma unroll
  for (int j = 0; j < kNumRows / 16; ++j) {
    uint32_t a[kRows][4];
    load_operand_a(a, p, row / 8 + 2 * j);
    add_product<Element>(dv, a, d_out, row + 16 * j, chunk);
    load_operand_a(a, ds, row / 8 + 2 * j);
    add_product<Element>(dk, a, q, row + 16 * j, chunk);
  }
}

// Adds dS K for a tile of Q, whose first row is padded_row, to dQ: a warp's part. ds
// and k address all of both tiles; kv_tile is the block's number, counted from key 0.
template <class Element, int kConfigIndex, int kBlockQ, int kHeadDim>
__device__ __forceinline__ void add_dq(const BackwardArguments& arguments,
                                       const BackwardWarp<kConfigIndex>& warp,
                                       const LaneAddress<kBlockQ>& ds,
                                       const LaneAddress<kHeadDim>& k,
                                       int64_t padded_row, int kv_tile) {
  using Warp = BackwardWarp<kConfigIndex>;
  Fragments<Warp::kDqRows, Warp::kDqCols> dq;
  set_zero(dq);
#pragma unroll
  for (int j = 0; j < Warp::kConfig.block_kv / 16; ++j) {
    uint32_t a[Warp::kDqRows][4];
#pragma unroll
    for (int m = 0; m < Warp::kDqRows; ++m) {
      ldmatrix_x4_trans(a[m], ds.at(16 * j, (warp.dq_row + 16 * m) / 8));
    }
    add_product<Element>(dq, a, k, 16 * j, warp.dq_chunk);
  }
  float* accumulator = arguments.dq_accumulator +
                       dq_fragment<kHeadDim>(padded_row + warp.dq_row, warp.dq_chunk);
  int* turn = arguments.dq_turn + padded_row / kMinBlockQ;
  const bool deterministic = arguments.params.forward.deterministic != 0;
  if (deterministic) wait_for_turn(turn, kv_tile);
#pragma unroll
  for (int m = 0; m < Warp::kDqRows; ++m) {
#pragma unroll
    for (int n = 0; n < Warp::kDqCols; ++n) {
      red_add_v4(accumulator + dq_fragment<kHeadDim>(16 * m, n), warp.lane, dq[m][n]);
    }
  }
  if (deterministic) pass_turn(turn);
}

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kBackwardConfigs[kConfigIndex].num_threads())
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr int kHeadDim = kConfig.head_dim;
  constexpr int kBlockQ = kConfig.block_q;
  constexpr int kBlockKV = kConfig.block_kv;
  constexpr int kStages = kConfig.num_stages;
  constexpr int kPartRows = kBlockQ / kConfig.split;
  using Warp = BackwardWarp<kConfigIndex>;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  const BackwardTiles<Element, kConfigIndex> tiles(shared_memory);
  const jaxflash_attention_backward_params& p = arguments.params;
  const jaxflash_attention_params& forward = p.forward;
  const KeyBlock block(arguments, kBlockKV);
  const BatchIndex batch = unravel_batch(forward, block.batch_element);
  const Visible visible(forward, batch);
  const QueryTiles<kBlockQ> q_tiles(visible, block);
  const Warp warp;
  const int lane = warp.lane;
  const int lane_key = block.first_key + warp.key + lane / 4;

  const auto k_rows = operand_a<kHeadDim>(tiles.k() + warp.key * kHeadDim * 2, lane);
  const auto v_rows = operand_a<kHeadDim>(tiles.v() + warp.key * kHeadDim * 2, lane);
  const auto k_all = operand_a<kHeadDim>(tiles.k(), lane);
  const auto ds_all = operand_b<kBlockQ>(tiles.ds(), lane);
  const auto ds_rows = operand_a<kBlockQ>(tiles.ds() + warp.key * kBlockQ * 2, lane);
  const auto p_rows = operand_a<kBlockQ>(tiles.p() + warp.key * kBlockQ * 2, lane);
  const float scale = softmax_scale(forward, batch);

  // Number of a tile's first row among the padded rows of all heads.
  const auto padded_row = [&](const QueryTile& at) {
    const int64_t head = static_cast<int64_t>(block.batch_element) * forward.num_heads +
                         block.kv_head * block.group_size + at.head;
    return head * arguments.num_rows_padded + at.tile * kBlockQ;
  };
  const BackwardCopies<Element, kConfigIndex> copies(arguments, block, batch, visible,
                                                     tiles);
  Fragments<Warp::kRows, Warp::kHeadCols> dk;
  Fragments<Warp::kRows, Warp::kHeadCols> dv;
  set_zero(dk);
  set_zero(dv);
  QueryTile current = {0, q_tiles.first};
  QueryTile next = current;
  if (q_tiles.num_steps > 0) {
    copies.load_keys();
    copies.load_stage(0, current, padded_row(current));
  }

#pragma unroll 1
  for (int step = 0; step < q_tiles.num_steps; ++step) {
    const int stage = step % kStages;
    const int first_row = current.tile * kBlockQ;
    next.advance(q_tiles.first, q_tiles.end);
    cp_async_wait_group<0>();
    __syncthreads();  // Q and dO visible; all are done with the last stage, P and dS
    if (kStages > 1 && step + 1 < q_tiles.num_steps) {
      copies.load_stage((step + 1) % kStages, next, padded_row(next));
    }

    const auto part_of = [&](uint32_t tile) {
      return operand_b<kHeadDim>(tile + warp.part_row * kHeadDim * 2, lane);
    };
    const float* lse = tiles.row_values(stage) + warp.part_row + warp.lane_col;
    Fragments<Warp::kRows, Warp::kScoreCols> probs;
    Fragments<Warp::kRows, Warp::kScoreCols> ds;
    compute_scores<Element>(probs, ds, k_rows, v_rows, part_of(tiles.q(stage)),
                            part_of(tiles.d_out(stage)), lse, lse + kBlockQ, scale);
    const bool masked = block.first_key + kBlockKV > visible.kv_rows ||
                        visible.first_row(block.first_key + kBlockKV - 1) > first_row;
    if (masked) {
      const int lane_row = first_row + warp.part_row + warp.lane_col;
      zero_hidden(probs, visible, lane_key, lane_row);
      zero_hidden(ds, visible, lane_key, lane_row);
    }
    const int chunk = warp.part_row / 8;
    store_fragments<Element, kBlockQ>(tiles.ds(), ds, warp.key, chunk, lane);
    store_fragments<Element, kBlockQ>(tiles.p(), probs, warp.key, chunk, lane);

    const auto q_all = operand_a<kHeadDim>(tiles.q(stage), lane);
    const auto do_all = operand_a<kHeadDim>(tiles.d_out(stage), lane);
    add_own_rows<Element>(dk, dv, probs, ds, q_all, do_all, warp.part_row,
                          warp.part_chunk);
    __syncthreads();  // P and dS visible to all
#pragma unroll
    for (int other = 1; other < kConfig.split; ++other) {
      const int row = (warp.part + other) % kConfig.split * kPartRows;
      add_shared_rows<Element, kPartRows>(dk, dv, p_rows, ds_rows, q_all, do_all, row,
                                          warp.part_chunk);
    }
    if (kStages == 1 && step + 1 < q_tiles.num_steps) {
      __syncthreads();  // all are done with Q and dO
      copies.load_stage(0, next, padded_row(next));
    }
    if (p.dq.data != nullptr || p.dscale.data != nullptr) {
      add_dq<Element>(arguments, warp, ds_all, k_all, padded_row(current),
                      block.first_key / kBlockKV);
    }
    current = next;
  }

  multiply_nonzero(dk, scale);
  __syncthreads();  // all are done with K and V, whose tiles now stage dK and dV
  copies.store(p.dk, dk, tiles.k(), warp);
  copies.store(p.dv, dv, tiles.v(), warp);
}

template <class Element, int kConfigIndex>
void launch_backward(const BackwardArguments& arguments, Launcher& launcher) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static_assert(sizeof(BackwardSharedMemory<Element, kConfigIndex>) ==
                kConfig.shared_bytes());
  launch_backward_rows<Element, kConfig.head_dim>(arguments, launcher);
  launcher.launch("backward_kernel",
                  {kConfig.block_q, kConfig.block_kv, kConfig.num_stages},
                  {arguments.num_blocks, kConfig.num_threads(), kConfig.shared_bytes()},
                  backward_kernel<Element, kConfigIndex>, arguments);
  launch_dq_conversion<Element, kConfig.head_dim>(arguments, launcher);
}

}  // namespace jaxflash::sm80
