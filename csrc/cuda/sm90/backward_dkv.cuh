// SPDX-License-Identifier: Apache-2.0
//
// dK and dV for Hopper, H > 128 (equations: backward.cuh; dQ: backward_dq.cuh).
//
// Work: one thread block per (batch, key/value head, tile of 64 keys), which walks the
// tiles of Q of every query head of the group (backward_walk.cuh). One accumulator of
// [64, H] is all that the registers of a warpgroup hold, so the two warpgroups that
// compute have different roles:
//
//   probabilities   S^T = K Q^T,   P^T,  dV = P^T dO
//   gradients       dP^T = V dO^T, dS^T, dK = dS^T Q
//
// P^T goes from the first to the second through shared memory, rounded, in the order in
// which threads hold it. Each role issues the scores of the next step behind its sum of
// this one, so that exp and dS are what the other role's products run beside:
//
//   probabilities | S0 | P0 | dV0 S1 | P1 | dV1 S2 | ...
//   gradients     | dP0 |   | dS0 | dK0 dP1 | dS1 | dK1 dP2 | ...
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_config.h"
#include "backward_fragments.cuh"
#include "backward_tiles.cuh"
#include "backward_walk.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

template <int kConfigIndex>
struct DkvShared {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kWords = kConfig.block_q / 4;  // packed P^T of a thread
  OperandTiles<kConfigIndex> operands;
  uint4 p[kStages][kWords / 4][kWarpgroup];
  RowValues<kConfigIndex> rows;
  OperandBarriers barriers;
  uint64_t p_full[kStages];
  uint64_t p_empty[kStages];
  uint64_t keys_done;  // both roles have read K and V for the last time
};

// Named barrier of a role, + role.
constexpr int kDkvGradsStaged = 1;

// What both roles know.
template <int kConfigIndex>
struct DkvRole {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockKV = kConfig.block_kv;
  static constexpr int kScores = kBlockQ / 2;  // of a thread
  static_assert(kBlockKV == 64, "the rows of a warpgroup");
  using Shared = DkvShared<kConfigIndex>;
  using Walk = QueryWalk<kBlockQ, kBlockKV>;

  const BackwardArguments& arguments;
  Shared& shared;
  const KeyBlock& block;
  const Visible& visible;
  float scale;
  int thread;  // of the warpgroup
  int lane;
  Stage stage;

  __device__ __forceinline__ DkvRole(const BackwardArguments& arguments, Shared& shared,
                                     const KeyBlock& block, const Visible& visible)
      : arguments(arguments),
        shared(shared),
        block(block),
        visible(visible),
        scale(softmax_scale(arguments.params.forward, block.batch())),
        thread(threadIdx.x % kWarpgroup),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ int warp_row() const { return thread / 32 * 16; }
  __device__ __forceinline__ int lane_col() const { return lane % 4 * 2; }

  // Hands a stage back; its last reader in this warp is done.
  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // Stores `factor` times the gradient that this role has summed, by way of `tile`.
  template <class Element>
  __device__ __forceinline__ void store(const jaxflash_tensor& matrix,
                                        const CUtensorMap* map,
                                        float (&sum)[kHeadDim / 2], float factor,
                                        const Tile<kBlockKV, kHeadDim>& tile,
                                        int key_tile, int role) const {
    const int first_key = key_tile * kBlockKV;
    finish_gradient(sum, factor, visible, first_key + warp_row() + lane / 4);
    release(shared.keys_done);
    wait(shared.keys_done, 0);
    stage_gradient<Element>(arguments, matrix, sum, tile, block, first_key, warp_row());
    fence_proxy_async_shared();
    bar_sync(kDkvGradsStaged + role, kWarpgroup);
    if (thread != 0) return;
    copy_gradient(matrix, map, tile, block, first_key, /*tile_row=*/0);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
  }
};

template <class Element, int kConfigIndex>
struct ProbabilityRole : DkvRole<kConfigIndex> {
  using Base = DkvRole<kConfigIndex>;
  using Base::arguments, Base::shared, Base::block, Base::visible, Base::stage;
  using Base::kBlockQ, Base::kBlockKV, Base::kHeadDim, Base::kScores;
  using Base::lane;
  using typename Base::Walk;

  float dv[kHeadDim / 2];  // [64, kHeadDim]
  float s[kScores];        // [64, kBlockQ]
  uint32_t p_operand[kScores / 2];
  const int* large_lse;
  int tiles_of_head;
  bool any_natural;

  __device__ __forceinline__ ProbabilityRole(const Base& base) : Base(base) {
    tiles_of_head = static_cast<int>(arguments.num_rows_padded / kBlockQ);
    large_lse = arguments.large_lse +
                tile_of_all<kBlockQ>(arguments, block.batch_element,
                                     block.kv_head * arguments.group_size, 0);
    any_natural = any_large_lse(large_lse, arguments.group_size * tiles_of_head, lane);
  }

  __device__ __forceinline__ void start_s() {
    wait(shared.barriers.q_full[stage.index], stage.parity);
    start_scores<Element, kHeadDim, kBlockKV, kBlockQ>(
        s, k_major_descriptor(shared.operands.k.address()),
        k_major_descriptor(shared.operands.q[stage.index].address()));
  }

  // S^T and the sum of the step before are done.
  __device__ __forceinline__ void finish(bool first) {
    wgmma_wait_group<0>();
    hold_registers(s);
    hold_registers(dv);
    hold_registers(p_operand);
    if (!first) Base::release(shared.barriers.d_out_empty[stage.index ^ 1]);
  }

  // P^T, and starts to sum it into dV.
  __device__ __forceinline__ void step(const Walk& walk, int key_tile, bool first) {
    const int stage_index = stage.index;
    float p[kScores];
#pragma unroll
    for (int e = 0; e < kScores; ++e) p[e] = s[e];
    const float* lse = &shared.rows.lse[stage_index][Base::lane_col()];
    if (any_natural || walk.is_masked()) {
      const int q_tile = walk.q_tile;
      const bool natural =
          any_natural && large_lse[walk.head * tiles_of_head + q_tile] != 0;
      if (natural) {
        to_exact_probabilities(p, lse, Base::scale);
      } else {
        to_probabilities(p, lse, Base::scale);
      }
      uint32_t keep[2];
      visible_elements<kBlockQ>(keep, visible,
                                key_tile * kBlockKV + Base::warp_row() + lane / 4,
                                q_tile * kBlockQ + Base::lane_col());
      keep_elements(p, keep);
    } else {
      to_probabilities(p, lse, Base::scale);
    }
    as_operand<Element>(p_operand, p);
    wait(shared.p_empty[stage_index], stage.parity ^ 1);
#pragma unroll
    for (int q = 0; q < kScores / 8; ++q) {
      shared.p[stage_index][q][Base::thread] =
          make_uint4(p_operand[4 * q], p_operand[4 * q + 1], p_operand[4 * q + 2],
                     p_operand[4 * q + 3]);
    }
    Base::release(shared.p_full[stage_index]);
    Base::release(shared.barriers.q_empty[stage_index]);
    wait(shared.barriers.d_out_full[stage_index], stage.parity);
    start_sum<Element, kHeadDim, kBlockQ>(
        dv, p_operand, shared.operands.d_out[stage_index], /*accumulate=*/!first);
    stage.advance();
  }

  __device__ __forceinline__ void sum(Walk& walk, int key_tile) {
    const int num_steps = walk.num_steps();
    start_s();
#pragma unroll 1
    for (int n = 0; n < num_steps - 1; ++n) {
      finish(/*first=*/n == 0);
      step(walk, key_tile, /*first=*/n == 0);
      start_s();
      walk.advance();
    }
    finish(/*first=*/num_steps == 1);
    step(walk, key_tile, /*first=*/num_steps == 1);
    wgmma_wait_group<0>();
    hold_registers(dv);
    hold_registers(p_operand);
    Base::release(shared.barriers.d_out_empty[stage.index ^ 1]);
  }

  __device__ __forceinline__ void run() {
    const int key_tile = block.tile;
    Walk walk(arguments, block, visible);
    if (walk.num_steps() > 0) {
      wait(shared.barriers.kv_full, 0);
      sum(walk, key_tile);
    } else {
      set_zero(dv);
    }
    Base::template store<Element>(arguments.params.dv, &arguments.dv, dv, 1.f,
                                  shared.operands.v, key_tile, /*role=*/0);
  }
};

template <class Element, int kConfigIndex>
struct GradientRole : DkvRole<kConfigIndex> {
  using Base = DkvRole<kConfigIndex>;
  using Base::arguments, Base::shared, Base::block, Base::visible, Base::stage;
  using Base::kBlockQ, Base::kBlockKV, Base::kHeadDim, Base::kScores;
  using typename Base::Walk;

  float dk[kHeadDim / 2];  // [64, kHeadDim]
  float dp[kScores];       // [64, kBlockQ]
  uint32_t ds_operand[kScores / 2];

  __device__ __forceinline__ GradientRole(const Base& base) : Base(base) {}

  __device__ __forceinline__ void start_dp() {
    wait(shared.barriers.d_out_full[stage.index], stage.parity);
    start_scores<Element, kHeadDim, kBlockKV, kBlockQ>(
        dp, k_major_descriptor(shared.operands.v.address()),
        k_major_descriptor(shared.operands.d_out[stage.index].address()));
  }

  // dP^T and the sum of the step before are done.
  __device__ __forceinline__ void finish(bool first) {
    wgmma_wait_group<0>();
    hold_registers(dp);
    hold_registers(dk);
    hold_registers(ds_operand);
    if (!first) Base::release(shared.barriers.q_empty[stage.index ^ 1]);
  }

  // dS^T, and starts to sum it into dK.
  __device__ __forceinline__ void step(bool first) {
    const int stage_index = stage.index;
    const float* delta = &shared.rows.delta[stage_index][Base::lane_col()];
    wait(shared.p_full[stage_index], stage.parity);
#pragma unroll
    for (int q = 0; q < kScores / 8; ++q) {
      const uint4 words = shared.p[stage_index][q][Base::thread];
      const auto* p = reinterpret_cast<const Element*>(&words);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int element = 8 * q + e;
        const float2 row_delta = ld_shared_float2(delta + element / 4 * 8);
        ds_operand[element / 2] =
            pack<Element>(to_float(p[e]) * (dp[element] - row_delta.x),
                          to_float(p[e + 1]) * (dp[element + 1] - row_delta.y));
      }
    }
    Base::release(shared.p_empty[stage_index]);
    Base::release(shared.barriers.d_out_empty[stage_index]);
    wait(shared.barriers.q_full[stage_index], stage.parity);
    start_sum<Element, kHeadDim, kBlockQ>(
        dk, ds_operand, shared.operands.q[stage_index], /*accumulate=*/!first);
    stage.advance();
  }

  __device__ __forceinline__ void sum(int num_steps) {
    start_dp();
#pragma unroll 1
    for (int n = 0; n < num_steps - 1; ++n) {
      finish(/*first=*/n == 0);
      step(/*first=*/n == 0);
      start_dp();
    }
    finish(/*first=*/num_steps == 1);
    step(/*first=*/num_steps == 1);
    wgmma_wait_group<0>();
    hold_registers(dk);
    hold_registers(ds_operand);
    Base::release(shared.barriers.q_empty[stage.index ^ 1]);
  }

  __device__ __forceinline__ void run() {
    const int key_tile = block.tile;
    const int num_steps = Walk(arguments, block, visible).num_steps();
    if (num_steps > 0) {
      wait(shared.barriers.kv_full, 0);
      sum(num_steps);
    } else {
      set_zero(dk);
    }
    Base::template store<Element>(arguments.params.dk, &arguments.dk, dk, Base::scale,
                                  shared.operands.k, key_tile, /*role=*/1);
  }
};

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_dkv_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<DkvShared<kConfigIndex>*>(shared_memory);
  constexpr int kRoleWarps = kWarpgroup / 32;
  if (threadIdx.x == 0) {
    shared.barriers.init(/*q_releases=*/2 * kRoleWarps,
                         /*d_out_releases=*/2 * kRoleWarps);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(cvta_generic_to_shared(&shared.p_full[i]), kRoleWarps);
      mbarrier_init(cvta_generic_to_shared(&shared.p_empty[i]), kRoleWarps);
    }
    mbarrier_init(cvta_generic_to_shared(&shared.keys_done), 2 * kRoleWarps);
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers exist
  griddepcontrol_launch_dependents();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      load_operands(arguments, shared.operands, shared.rows, shared.barriers,
                    blockIdx.x);
    }
    return;
  }
  setmaxnreg_inc<kConsumerRegisters>();
  const KeyBlock block(arguments, blockIdx.x);
  const Visible visible(arguments.params.forward, block.batch());
  const DkvRole<kConfigIndex> role(arguments, shared, block, visible);
  griddepcontrol_wait();  // the row pass is done
  if (warpgroup == 1) {
    ProbabilityRole<Element, kConfigIndex>(role).run();
  } else {
    GradientRole<Element, kConfigIndex>(role).run();
  }
}

}  // namespace jaxflash::sm90
