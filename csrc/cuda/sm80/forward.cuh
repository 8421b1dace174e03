// SPDX-License-Identifier: Apache-2.0
//
// Attention forward for every NVIDIA GPU from sm_80 on: FlashAttention-2, algorithm 1
// (arXiv 2307.08691), with mma.sync and cp.async.
//
//   S = Q K^T,  m = max(m, rowmax S),  P = exp(scale (S - m)),
//   l = exp(scale (m_old - m)) l + rowsum P,  O = exp(scale (m_old - m)) O + P V
//   out = O / l,  lse = scale m + log l
//
// Work: one thread block per (batch, head, block of Q rows); each warp owns
// 16 * row_tiles of those rows for the whole kernel, so m, l and O never leave its
// registers. K and V tiles are visited from the last visible one down: the tiles that
// need a mask (the diagonal, the ragged end) come first and the rest runs without one.
//
// With two stages of K and V:
//
//   copy    | Q K0 V0 | K1 V1         | K2 V2         | ...
//   compute |         | S0  P0  O+=PV | S1  P1  O+=PV |
//   barrier           ^               ^               ^
//
// With one, for SMs whose shared memory would hold only one such block:
//
//   copy    | Q K0 | V0 | K1        | V1 | K2        | ...
//   compute |      | S0 | P0  O+=PV | S1 | P1  O+=PV |
//   barrier        ^    ^           ^    ^
//
// The other block on the SM fills the gaps. Any H: the tile's spare columns are zero.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/hidden_values.cuh"
#include "../common/out_low.cuh"
#include "../common/problem.cuh"
#include "../common/tile.cuh"
#include "forward_rows.cuh"
#include "hidden_values.cuh"
#include "launch.h"
#include "tile_config.h"

namespace jaxflash::sm80 {

// Changes the sign of a tile in place, so that a negative scale becomes a positive one
// and the row maximum of S stays the maximum of scale * S.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void negate_tile(uint32_t tile) {
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x; chunk < kRows * kCols / 8; chunk += kThreads) {
    uint4 x = ld_shared_v4(tile + chunk * 16);
    constexpr uint32_t kSigns = 0x80008000u;
    x = make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
    st_shared_v4(tile + chunk * 16, x);
  }
}

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kForwardConfigs[kConfigIndex].num_threads())
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  constexpr int kHeadDim = kConfig.head_dim;
  constexpr int kBlockQ = kConfig.block_q;
  constexpr int kBlockKV = kConfig.block_kv;
  constexpr int kThreads = kConfig.num_threads();
  constexpr int kRowTiles = kConfig.row_tiles();
  constexpr int kStages = kConfig.num_stages;

  extern __shared__ __align__(128) unsigned char shared_memory[];
  // Q [kBlockQ, kHeadDim], then per stage K and V [kBlockKV, kHeadDim].
  const uint32_t q_smem = cvta_generic_to_shared(shared_memory);
  const auto k_smem = [&](int stage) {
    return q_smem + kBlockQ * kHeadDim * 2 + stage * 2 * kConfig.kv_tile_bytes();
  };
  const auto v_smem = [&](int stage) {
    return k_smem(stage) + kConfig.kv_tile_bytes();
  };

  const jaxflash_attention_params& p = arguments.params;
  const bool vector_access = arguments.vector_access;
  const uint32_t num_q_tiles = arguments.num_q_tiles;
  const uint32_t num_heads = static_cast<uint32_t>(p.num_heads);
  // Tiles of one head run together and share its K and V in L2; the late tiles, which
  // see the most keys of a causal call, start first.
  const uint32_t q_tile = num_q_tiles - 1 - blockIdx.x % num_q_tiles;
  const uint32_t head = blockIdx.x / num_q_tiles % num_heads;
  const BatchIndex batch = unravel_batch(p, blockIdx.x / num_q_tiles / num_heads);
  const uint32_t kv_head = head / static_cast<uint32_t>(p.num_heads / p.num_kv_heads);

  const Visible visible(p, batch);
  const int head_dim = static_cast<int>(p.head_dim);
  const int first_row = static_cast<int>(q_tile) * kBlockQ;
  const int end_row = min(first_row + kBlockQ, visible.q_rows);
  const int kv_end = end_row > first_row ? visible.key_limit(end_row - 1) : 0;
  const int num_tiles = (kv_end + kBlockKV - 1) / kBlockKV;
  const int num_full_tiles = visible.key_limit(first_row) / kBlockKV;

  const Element* q = batch_pointer<const Element>(p.q, batch) +
                     first_row * p.q.strides[0] + head * p.q.strides[1];
  const Element* k =
      batch_pointer<const Element>(p.k, batch) + kv_head * p.k.strides[1];
  const Element* v =
      batch_pointer<const Element>(p.v, batch) + kv_head * p.v.strides[1];
  const auto load_kv = [&](uint32_t smem, const Element* matrix, int64_t row_stride,
                           int tile, bool whole) {
    load_tile<kBlockKV, kHeadDim, kThreads>(
        smem, matrix + tile * kBlockKV * row_stride, row_stride,
        whole ? kBlockKV : visible.kv_rows - tile * kBlockKV, head_dim, vector_access);
  };
  const auto load_k = [&](int tile, int stage, bool whole) {
    load_kv(k_smem(stage), k, p.k.strides[0], tile, whole);
  };
  const auto load_v = [&](int tile, int stage, bool whole) {
    load_kv(v_smem(stage), v, p.v.strides[0], tile, whole);
  };

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * (16 * kRowTiles);
  const auto q_lane = operand_a<kHeadDim>(q_smem + warp_row * kHeadDim * 2, lane);
  const int lane_row = first_row + warp_row + lane / 4;
  const int lane_col = 2 * (lane % 4);

  const float scale = softmax_scale(p, batch);
  // Never zero, so that a hidden -inf stays -inf; a scale this small is a uniform P.
  // A NaN, which fmaxf would lose, stays too.
  const float magnitude = fabsf(scale) * kLog2E;
  const float scale_log2 = magnitude < 1e-37f ? 1e-37f : magnitude;

  ForwardRows<Element, kHeadDim, kBlockKV, kRowTiles> rows;
  rows.reset();
  bool dropped = false;  // an inf or NaN from a tile of V

  if (num_tiles > 0) {
    load_tile<kBlockQ, kHeadDim, kThreads>(
        q_smem, q, p.q.strides[0], end_row - first_row, head_dim, vector_access);
    load_k(num_tiles - 1, 0, /*whole=*/false);
    if (kStages > 1) load_v(num_tiles - 1, 0, /*whole=*/false);
    cp_async_commit_group();
    if (scale < 0.f) {
      cp_async_wait_group<0>();
      __syncthreads();
      negate_tile<kBlockQ, kHeadDim, kThreads>(q_smem);
    }
    int stage = 0;
    const auto step = [&](int tile, bool masked) {
      const int next_stage = kStages > 1 ? stage ^ 1 : 0;
      cp_async_wait_group<0>();
      __syncthreads();  // this K tile visible to all; all are done with the last V tile
      if (kStages == 1) {
        load_v(tile, 0, /*whole=*/!masked);
      } else if (tile > 0) {
        load_k(tile - 1, next_stage, /*whole=*/!masked);
        load_v(tile - 1, next_stage, /*whole=*/!masked);
      }
      cp_async_commit_group();
      rows.scores(q_lane, operand_b<kHeadDim>(k_smem(stage), lane));
      if (masked) rows.mask(visible, lane_row, tile * kBlockKV + lane_col);
      if (kStages == 1) {
        cp_async_wait_group<0>();
        __syncthreads();  // V tile visible to all; all are done with the K tile
        if (tile > 0) load_k(tile - 1, 0, /*whole=*/!masked);
        cp_async_commit_group();
      }
      // Only a causal block visits keys that some of its rows see and others do not.
      if (masked && visible.causal) {
        dropped |= drop_nonfinite<Element, kBlockKV, kHeadDim, kThreads>(v_smem(stage));
      }
      rows.update_maximum(scale_log2);
      rows.accumulate(operand_a<kHeadDim>(v_smem(stage), lane), scale_log2);
      stage = next_stage;
    };
    int tile = num_tiles - 1;
#pragma unroll 1
    for (; tile >= num_full_tiles; --tile) step(tile, /*masked=*/true);
#pragma unroll 1
    for (; tile >= 0; --tile) step(tile, /*masked=*/false);
  }

  rows.finish(lane, visible, lane_row, static_cast<int>(p.q_len), scale, scale_log2,
              batch_pointer<float>(p.lse, batch) + head * p.lse.strides[0],
              p.lse.strides[1]);
  // Each warp stages its rows of O in its own rows of the Q tile, which nobody else
  // reads, and writes them out in whole chunks.
  const int warp_first_row = first_row + warp_row;
  const int rows_left = static_cast<int>(p.q_len) - warp_first_row;
  unsigned char* stage = shared_memory + warp_row * kHeadDim * 2;
  Element* out = batch_pointer<Element>(p.out, batch) + head * p.out.strides[1] +
                 warp_first_row * p.out.strides[0];
  rows.stage_out(cvta_generic_to_shared(stage), lane);
  store_tile<16 * kRowTiles, kHeadDim, 32>(out, p.out.strides[0], rows_left, head_dim,
                                           cvta_generic_to_shared(stage), lane,
                                           vector_access);
  if (p.out_low.data != nullptr) {
    rows.stage_out_low(stage, lane);
    store_out_low<16 * kRowTiles, kHeadDim>(
        batch_pointer<int8_t>(p.out_low, batch) + head * p.out_low.strides[1] +
            warp_first_row * p.out_low.strides[0],
        p.out_low.strides[0], rows_left, head_dim, stage, lane, vector_access);
  }
  if (dropped) {
    __syncwarp();  // the rows written above are visible to the warp
    restore_visible_nonfinite(out, p.out.strides[0], v, p.v.strides[0], visible,
                              num_full_tiles * kBlockKV, warp_first_row,
                              min(warp_first_row + 16 * kRowTiles, visible.q_rows),
                              head_dim, lane);
  }
}

template <class Element, int kConfigIndex>
void launch_forward(const ForwardArguments& arguments, Launcher& launcher) {
  constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  static_assert(kConfig.shared_bytes() <= kSharedMemoryEverywhere);
  launcher.launch("forward_kernel",
                  {kConfig.block_q, kConfig.block_kv, kConfig.num_stages},
                  {arguments.num_blocks, kConfig.num_threads(), kConfig.shared_bytes()},
                  forward_kernel<Element, kConfigIndex>, arguments);
}

}  // namespace jaxflash::sm80
