// SPDX-License-Identifier: Apache-2.0
//
// dK, dV and dQ for Hopper, H <= 128 (equations: backward.cuh).
//
// Work: one thread block per (batch, key/value head, tile of keys), which walks the
// tiles of Q of every query head of the group and keeps dK and dV in registers: grouped
// heads are summed there in float32 (backward_walk.cuh).
//
// Two warpgroups compute, each for 64 keys. Scores are transposed, S^T = K Q^T, so that
// the accumulators of P^T and dS^T are the A operands of dV and dK as they stand. Only
// dQ, a sum over all keys, needs the dS of both warpgroups: it goes through shared
// memory. They make dQ in alternate steps, and one step late, so that they hardly wait
// for each other, and stage it for a warp that adds it to a float32 accumulator in
// global memory (backward_add_dq.cuh).
//
//   loading warp    | Q, lse  dO, delta of the next step                        |
//   tensor cores    | S^T   dP^T |         dV  dK  (dQ of the step before)      |
//   a warpgroup     |        P   | dS, to shared memory              stage dQ   |
//   its adding warp |                                                   += dQ   |
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_add_dq.cuh"
#include "backward_config.h"
#include "backward_fragments.cuh"
#include "backward_rows.cuh"
#include "backward_tiles.cuh"
#include "backward_turns.cuh"
#include "backward_walk.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

template <int kConfigIndex>
struct FusedShared {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  OperandTiles<kConfigIndex> operands;
  Tile<kConfig.block_q, kConfig.block_kv> ds[kStages];  // [rows of Q, keys]
  // Of each warpgroup, staged.
  alignas(1024) float dq[kStages][kConfig.block_q * kConfig.head_dim];
  RowValues<kConfigIndex> rows;
  OperandBarriers barriers;
  uint32_t block_number;
};

// Named barriers; those from 8 on are of DqBarrier. Of the dS in stage s, warpgroup s
// makes dQ; the other one hands its half over.
enum FusedBarrier {
  kKeysDone = 1,     // both warpgroups
  kGradsStaged = 2,  // + the warpgroup: itself
  kDsFull = 4,       // + the stage: both
  kDsEmpty = 6,      // likewise
};

constexpr int kNumConsumers = 2;
constexpr int kConsumers = kNumConsumers * kWarpgroup;

// One of the two warpgroups that compute.
template <class Element, int kConfigIndex>
struct FusedConsumer {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockKV = kConfig.block_kv;
  static constexpr int kScores = kBlockQ / 2;  // of a thread, in S^T [64, kBlockQ]
  using Shared = FusedShared<kConfigIndex>;
  using Walk = QueryWalk<kBlockQ, kBlockKV>;
  using DqTile = float[kBlockQ / kDqRows][kHeadDim / 2];
  static_assert(kBlockKV == kNumConsumers * 64 && kBlockQ % kDqRows == 0);
  // A stage of dS for each warpgroup to make dQ of.
  static_assert(kStages == kNumConsumers);

  const BackwardArguments& arguments;
  Shared& shared;
  const Visible& visible;
  int warpgroup;  // 0 or 1
  int thread;     // of the warpgroup
  int lane;
  float scale;
  Stage stage;
  bool dq_is_due = false;  // that of the step before
  float dk[kHeadDim / 2];  // [64, kHeadDim]
  float dv[kHeadDim / 2];

  __device__ __forceinline__ FusedConsumer(const BackwardArguments& arguments,
                                           Shared& shared, const Visible& visible,
                                           int warpgroup, float scale)
      : arguments(arguments),
        shared(shared),
        visible(visible),
        warpgroup(warpgroup),
        thread(threadIdx.x % kWarpgroup),
        lane(threadIdx.x % 32),
        scale(scale) {}

  // First row of a key tile that this warp has.
  __device__ __forceinline__ int warp_row() const {
    return warpgroup * 64 + thread / 32 * 16;
  }

  // Operand A of the scores: this warpgroup's 64 rows of K or V.
  __device__ __forceinline__ uint64_t
  own_keys(const Tile<kBlockKV, kHeadDim>& tile) const {
    return k_major_descriptor(tile.address() + warpgroup * 64 * kPanelRowBytes);
  }

  // dQ = dS K, in 64 rows; starts it.
  __device__ __forceinline__ void start_dq(DqTile& dq, int own) {
    const uint64_t ds = k_major_descriptor(shared.ds[own].address());
    const uint64_t keys =
        mn_major_descriptor<kBlockKV>(opaque(shared.operands.k.address()));
    constexpr uint64_t kRowsStep = kDqRows * kPanelRowBytes >> 4;
#pragma unroll
    for (int rows = 0; rows < kBlockQ / kDqRows; ++rows) hold_registers(dq[rows]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; ++k) {
#pragma unroll
      for (int rows = 0; rows < kBlockQ / kDqRows; ++rows) {
        Wgmma<kHeadDim>::template ss<Element, Major::kK, Major::kMN>(
            dq[rows], ds + rows * kRowsStep + k_major_step<kBlockQ>(k),
            keys + mn_major_step(k), k != 0);
      }
    }
    wgmma_commit_group();
  }

  // dP^T -> dS^T. delta: of the thread's first row of Q.
  __device__ __forceinline__ static void score_gradients(float (&dp)[kScores],
                                                         const float (&p)[kScores],
                                                         const float* delta) {
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 row_delta = ld_shared_float2(delta + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dp[i + j] = p[i + j] * (dp[i + j] - (j % 2 ? row_delta.y : row_delta.x));
      }
    }
  }

  // dS^T -> dS [rows of Q, keys] in shared memory.
  __device__ __forceinline__ void store_ds(const Tile<kBlockQ, kBlockKV>& ds,
                                           const uint32_t (&ds_t)[kScores / 2]) const {
    const uint32_t panel = ds.address() + warpgroup * ds.kPanelBytes;
    const uint32_t lane_row = lane % 8 + lane / 16 * 8;
    const uint32_t chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < kBlockQ / 16; ++j) {
      stmatrix_x4_trans(
          panel + (16 * j + lane_row) * kPanelRowBytes + ((chunk ^ lane_row % 8) << 4),
          ds_t[4 * j], ds_t[4 * j + 1], ds_t[4 * j + 2], ds_t[4 * j + 3]);
    }
  }

  // Hands dQ to the adding warp.
  __device__ __forceinline__ void stage_dq(const DqTile& dq, int own) {
    // The buffer has been read; and all warps are done with the dS of their own stage,
    // which they will overwrite without asking.
    bar_sync(kDqEmpty + own, kDqThreads);
#pragma unroll
    for (int rows = 0; rows < kBlockQ / kDqRows; ++rows) {
      float* pieces = shared.dq[own] + rows * (kDqRows * kHeadDim) + 4 * thread;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const float* x = &dq[rows][4 * i];
        *reinterpret_cast<float4*>(pieces + i * kDqPieceFloats) =
            make_float4(x[0], x[1], x[2], x[3]);
      }
    }
    fence_proxy_async_shared();
    bar_arrive(kDqFull + own, kDqThreads);
  }

  // dQ of the step before. `done` is for what is left to do when the product that runs
  // already, if any, has ended.
  template <class Done>
  __device__ __forceinline__ void make_dq(const Done& done) {
    const int own = static_cast<int>(opaque(warpgroup));
    DqTile dq;
    bar_sync(kDsFull + own, kConsumers);
    start_dq(dq, own);
    wgmma_wait_group<1>();
    done();
    wgmma_wait_group<0>();
#pragma unroll
    for (int rows = 0; rows < kBlockQ / kDqRows; ++rows) hold_registers(dq[rows]);
    bar_arrive(kDsEmpty + own, kConsumers);
    stage_dq(dq, own);
    dq_is_due = false;
  }

  // One tile of Q. kCareful: some (key, row) may be hidden, or lse natural.
  template <bool kCareful>
  __device__ __forceinline__ void step(int key_tile, int q_tile, bool natural) {
    const int s = stage.index;
    const auto& q = shared.operands.q[s];
    const auto& d_out = shared.operands.d_out[s];
    float p[kScores];
    float ds[kScores];
    wait(shared.barriers.q_full[s], stage.parity);
    start_scores<Element, kHeadDim, kBlockKV, kBlockQ>(p, own_keys(shared.operands.k),
                                                       k_major_descriptor(q.address()));
    wait(shared.barriers.d_out_full[s], stage.parity);
    start_scores<Element, kHeadDim, kBlockKV, kBlockQ>(
        ds, own_keys(shared.operands.v), k_major_descriptor(d_out.address()));

    wgmma_wait_group<1>();  // S^T
    hold_registers(p);
    const int lane_col = 2 * (lane % 4);
    if (kCareful && natural) {
      to_exact_probabilities(p, &shared.rows.lse[s][lane_col], scale);
    } else {
      to_probabilities(p, &shared.rows.lse[s][lane_col], scale);
    }
    wgmma_wait_group<0>();  // dP^T
    hold_registers(ds);
    score_gradients(ds, p, &shared.rows.delta[s][lane_col]);
    if constexpr (kCareful) {
      uint32_t keep[2];
      visible_elements<kBlockQ>(keep, visible,
                                key_tile * kBlockKV + warp_row() + lane / 4,
                                q_tile * kBlockQ + lane_col);
      keep_elements(p, keep);
      keep_elements(ds, keep);
    }
    uint32_t p_operand[kScores / 2];
    uint32_t ds_operand[kScores / 2];
    as_operand<Element>(p_operand, p);
    as_operand<Element>(ds_operand, ds);
    const bool is_own_stage = warpgroup == s;
    if (!is_own_stage) bar_sync(kDsEmpty + s, kConsumers);
    store_ds(shared.ds[s], ds_operand);
    start_sum<Element, kHeadDim, kBlockQ>(dv, p_operand, d_out, /*accumulate=*/true);
    start_sum<Element, kHeadDim, kBlockQ>(dk, ds_operand, q, /*accumulate=*/true);
    fence_proxy_async_shared();
    if (!is_own_stage) bar_arrive(kDsFull + s, kConsumers);
    wgmma_wait_group<1>();  // dV
    hold_registers(dv);
    hold_registers(p_operand);
    if (lane == 0) arrive(shared.barriers.d_out_empty[s]);
    const auto dk_is_done = [&] {
      hold_registers(dk);
      hold_registers(ds_operand);
      if (lane == 0) arrive(shared.barriers.q_empty[s]);
    };
    if (dq_is_due) {
      make_dq(dk_is_done);
    } else {
      wgmma_wait_group<0>();
      dk_is_done();
    }
    dq_is_due = is_own_stage;
    stage.advance();
  }

  // Whether no row of a tile of Q sees a key of this warpgroup.
  __device__ __forceinline__ bool sees_none(int key_tile, int q_tile) const {
    const int last_row = min((q_tile + 1) * kBlockQ, visible.q_rows) - 1;
    return visible.key_limit(last_row) <= key_tile * kBlockKV + warpgroup * 64;
  }

  // The step of such a tile: no products, but dQ of all keys needs dS = 0.
  __device__ __forceinline__ void pass_over() {
    const int s = stage.index;
    wait(shared.barriers.q_full[s], stage.parity);
    wait(shared.barriers.d_out_full[s], stage.parity);
    __syncwarp();  // no lane waits for what may be overwritten
    if (lane == 0) {
      arrive(shared.barriers.q_empty[s]);
      arrive(shared.barriers.d_out_empty[s]);
    }
    const bool is_own_stage = warpgroup == s;
    if (!is_own_stage) bar_sync(kDsEmpty + s, kConsumers);
    const auto& tile = shared.ds[s];
    const uint32_t panel = tile.address() + warpgroup * tile.kPanelBytes;
#pragma unroll
    for (int offset = 16 * thread; offset < tile.kPanelBytes;
         offset += 16 * kWarpgroup) {
      st_shared_v4(panel + offset, make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async_shared();
    if (!is_own_stage) bar_arrive(kDsFull + s, kConsumers);
    if (dq_is_due) make_dq([] {});
    dq_is_due = is_own_stage;
    stage.advance();
  }

  // All steps. large_lse: of the group's tiles of Q; lse of some may be natural:
  // any_natural.
  __device__ __forceinline__ void walk_tiles(Walk& walk, const int* large_lse,
                                             int tiles_of_head, int key_tile,
                                             bool any_natural) {
    int left = walk.num_steps();
#pragma unroll 1
    while (left > 0) {
#pragma unroll 1
      for (; left > 0 && (any_natural || walk.is_masked()); --left, walk.advance()) {
        if (sees_none(key_tile, walk.q_tile)) {
          pass_over();
          continue;
        }
        const bool natural =
            any_natural && large_lse[walk.head * tiles_of_head + walk.q_tile] != 0;
        step</*kCareful=*/true>(key_tile, walk.q_tile, natural);
      }
      if (left == 0) break;
      const int num_plain = walk.skip_unmasked();
#pragma unroll 1
      for (int i = 0; i < num_plain; ++i) step</*kCareful=*/false>(key_tile, 0, false);
      left -= num_plain;
    }
  }

  // dK and dV, by way of the shared memory of K and V.
  __device__ __forceinline__ void store_gradients(const KeyBlock& block) {
    const auto& tiles = shared.operands;
    const jaxflash_tensor& d_k = arguments.params.dk;
    const jaxflash_tensor& d_v = arguments.params.dv;
    const int first_key = block.tile * kBlockKV;
    const int thread_key = first_key + warp_row() + lane / 4;
    finish_gradient(dv, 1.f, visible, thread_key);
    finish_gradient(dk, scale, visible, thread_key);
    bar_sync(kKeysDone, kConsumers);  // K and V are not read any more
    stage_gradient<Element>(arguments, d_v, dv, tiles.v, block, first_key, warp_row());
    stage_gradient<Element>(arguments, d_k, dk, tiles.k, block, first_key, warp_row());
    fence_proxy_async_shared();
    bar_sync(kGradsStaged + warpgroup, kWarpgroup);
    if (thread != 0) return;
    copy_gradient(d_v, &arguments.dv, tiles.v, block, first_key, warpgroup * 64);
    copy_gradient(d_k, &arguments.dk, tiles.k, block, first_key, warpgroup * 64);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();  // shared memory stays until then
  }

  __device__ __forceinline__ void run(const KeyBlock& block) {
    const int group_size = arguments.group_size;
    const auto tiles_of_head = static_cast<int>(arguments.num_rows_padded / kBlockQ);
    const int* large_lse =
        arguments.large_lse + tile_of_all<kBlockQ>(arguments, block.batch_element,
                                                   block.kv_head * group_size, 0);
    griddepcontrol_wait();  // large_lse is written
    const bool any_natural = any_large_lse(large_lse, group_size * tiles_of_head, lane);
    bar_arrive(kDsEmpty + warpgroup, kConsumers);
    Walk walk(arguments, block, visible);
    set_zero(dk);
    set_zero(dv);
    if (walk.num_steps() > 0) {
      wait(shared.barriers.kv_full, 0);
      walk_tiles(walk, large_lse, tiles_of_head, block.tile, any_natural);
      if (dq_is_due) make_dq([] {});
    }
    store_gradients(block);
  }
};

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_fused_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<FusedShared<kConfigIndex>*>(shared_memory);
  constexpr int kConsumerWarps = kConsumers / 32;
  if (threadIdx.x == 0) {
    shared.barriers.init(/*q_releases=*/kConsumerWarps,
                         /*d_out_releases=*/kConsumerWarps);
    fence_mbarrier_init();
    shared.block_number = draw_number(arguments);
  }
  __syncthreads();  // the barriers and the number exist
  griddepcontrol_launch_dependents();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t block_number = __shfl_sync(~0u, shared.block_number, 0);
  // Each role looks up the problem for itself: few registers live through setmaxnreg.
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      load_operands(arguments, shared.operands, shared.rows, shared.barriers,
                    block_number);
    } else if (warp <= kStages) {
      add_dq<kConfigIndex>(arguments, shared.dq[warp - 1], /*buffer=*/warp - 1,
                           block_number);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    const KeyBlock block(arguments, block_number);
    const Visible visible(arguments.params.forward, block.batch());
    FusedConsumer<Element, kConfigIndex> consumer(
        arguments, shared, visible, warpgroup - 1,
        softmax_scale(arguments.params.forward, block.batch()));
    consumer.run(block);
  }
}

}  // namespace jaxflash::sm90
