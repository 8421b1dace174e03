// SPDX-License-Identifier: Apache-2.0
//
// dQ for Hopper, H > 128 (equations: backward.cuh; dK and dV: backward_dkv.cuh). Costs
// S and dP a second time and saves what dQ of the other kernel needs: additions of
// float32 by all blocks of a head, which at this H take more time than the products.
//
// Work: one thread block per (batch, query head, tile of 128 rows of Q), which keeps Q
// and dO in shared memory and walks the tiles of keys, last ones first: those of a
// causal call need a mask. Two warpgroups compute, each 64 rows; two stages of K and V.
//
//   tensor cores | S0 dP0 |         | dQ0 S1 dP1 |          | dQ1 S2 dP2 | ...
//   warpgroup    |      P0 | dS0    |         P1 | dS1      |
#pragma once

#include <climits>
#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_config.h"
#include "backward_fragments.cuh"
#include "backward_tiles.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

template <int kConfigIndex>
struct DqShared {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  Tile<kConfig.dq_block_q, kConfig.head_dim> q;  // then stages dQ
  Tile<kConfig.dq_block_q, kConfig.head_dim> d_out;
  Tile<kConfig.dq_block_kv, kConfig.head_dim> k[kStages];
  Tile<kConfig.dq_block_kv, kConfig.head_dim> v[kStages];
  uint64_t rows_full;  // Q and dO
  uint64_t k_full[kStages];
  uint64_t k_empty[kStages];
  uint64_t v_full[kStages];
  uint64_t v_empty[kStages];
  uint64_t landed;

  __device__ __forceinline__ void init_barriers() {
    constexpr int kConsumerWarps = 2 * kWarpgroup / 32;
    mbarrier_init(cvta_generic_to_shared(&rows_full), 1);
    mbarrier_init(cvta_generic_to_shared(&landed), 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(cvta_generic_to_shared(&k_full[i]), 1);
      mbarrier_init(cvta_generic_to_shared(&k_empty[i]), kConsumerWarps);
      mbarrier_init(cvta_generic_to_shared(&v_full[i]), 1);
      mbarrier_init(cvta_generic_to_shared(&v_empty[i]), kConsumerWarps);
    }
  }
};

// Named barriers: of each warpgroup.
enum DqKernelBarrier { kRowsDone = 1, kDqStaged = 3 };

// The rows of a block, and the keys that they see.
template <int kConfigIndex>
struct DqBlock {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  uint32_t batch_element;
  int head;
  int first_row;
  int num_key_tiles;

  // Blocks of one head run together and share its K and V in L2; the late rows, which
  // see the most keys of a causal call, start first.
  __device__ __forceinline__ explicit DqBlock(const BackwardArguments& arguments) {
    const auto num_heads = static_cast<uint32_t>(arguments.params.forward.num_heads);
    const uint32_t num_tiles = arguments.num_rows_padded / kConfig.dq_block_q;
    const uint32_t batch_head = blockIdx.x / num_tiles;
    batch_element = batch_head / num_heads;
    head = static_cast<int>(batch_head % num_heads);
    first_row =
        static_cast<int>(num_tiles - 1 - blockIdx.x % num_tiles) * kConfig.dq_block_q;
    const Visible visible(arguments.params.forward, batch());
    const int end_row = min(first_row + kConfig.dq_block_q, visible.q_rows);
    const int end_key = end_row > first_row ? visible.key_limit(end_row - 1) : 0;
    num_key_tiles = (end_key + kConfig.dq_block_kv - 1) / kConfig.dq_block_kv;
  }

  __device__ __forceinline__ BatchIndex batch() const {
    BatchIndex index = {};
    index.axis[0] = batch_element;
    return index;
  }
};

// The loading warp.
template <int kConfigIndex>
__device__ __forceinline__ void load_dq_operands(const BackwardArguments& arguments,
                                                 DqShared<kConfigIndex>& shared) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  const jaxflash_attention_params& forward = arguments.params.forward;
  const DqBlock<kConfigIndex> block(arguments);
  if (block.num_key_tiles == 0) return;
  const int lane = threadIdx.x % 32;
  const auto batch_of = [&](const jaxflash_tensor& tensor) {
    return map_batch(tensor, block.batch_element);
  };
  if (lane == 0) {
    const uint32_t full = cvta_generic_to_shared(&shared.rows_full);
    mbarrier_arrive_expect_tx(full,
                              sizeof(shared.q.bytes) + sizeof(shared.d_out.bytes));
    constexpr int kBoxes = kConfig.dq_block_q / kConfig.block_q;
#pragma unroll 1
    for (int box = 0; box < kBoxes * shared.q.kNumPanels; ++box) {
      const int panel = box / kBoxes;
      const int row = box % kBoxes * kConfig.block_q;
      const uint32_t offset = panel * shared.q.kPanelBytes + row * kPanelRowBytes;
      const auto copy = [&](uint32_t tile, const CUtensorMap* map,
                            const jaxflash_tensor& tensor) {
        cp_async_bulk_tensor_4d_load(tile + offset, map, full, panel * kPanelColumns,
                                     block.first_row + row, block.head,
                                     batch_of(tensor));
      };
      copy(shared.q.address(), &arguments.q, forward.q);
      copy(shared.d_out.address(), &arguments.d_out, arguments.params.d_out);
    }
  }
  const int kv_head = block.head / arguments.group_size;
  // Products with dS = 0 do not free dQ from inf or NaN in keys that no row sees; what
  // V makes of them is thrown away with the scores.
  const Visible visible(forward, block.batch());
  const int end_key = visible.kv_rows < forward.kv_len ? visible.kv_rows : INT_MAX;
  TileLoader loader(shared.landed, lane);
  Stage stage;
#pragma unroll 1
  for (int tile = block.num_key_tiles - 1; tile >= 0; --tile) {
    const int key = tile * kConfig.dq_block_kv;
    const int s = stage.index;
    wait(shared.k_empty[s], stage.parity ^ 1);
    loader.load(shared.k[s], &arguments.dq_k, shared.k_full[s], 0, key, 0, end_key,
                kv_head, batch_of(forward.k));
    wait(shared.v_empty[s], stage.parity ^ 1);
    loader.load(shared.v[s], &arguments.dq_v, shared.v_full[s], 0, key, 0, INT_MAX,
                kv_head, batch_of(forward.v));
    __syncwarp();  // a lane two phases ahead of the others would keep them waiting
    stage.advance();
  }
}

// One of the two warpgroups that compute: 64 rows.
template <class Element, int kConfigIndex>
struct DqConsumer {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.dq_block_q;
  static constexpr int kBlockKV = kConfig.dq_block_kv;
  static constexpr int kScores = kBlockKV / 2;  // of a thread, in S [64, kBlockKV]

  const BackwardArguments& arguments;
  DqShared<kConfigIndex>& shared;
  const DqBlock<kConfigIndex>& block;
  const Visible& visible;
  int warpgroup;  // 0 or 1
  int thread;     // of the warpgroup
  int lane;
  float scale;
  int first_row;       // of the thread; the other one is 8 further on
  int key_limit[2];    // of its rows, counted from the thread's first column
  int num_full_tiles;  // of keys, the first ones, which all rows of the block see
  float lse[2];
  float delta[2];
  bool natural;  // lse, else in units of log2
  Stage stage;
  float dq[kHeadDim / 2];            // [64, kHeadDim]
  uint32_t ds_operand[kScores / 2];  // [64, kBlockKV]

  __device__ __forceinline__ DqConsumer(const BackwardArguments& arguments,
                                        DqShared<kConfigIndex>& shared,
                                        const DqBlock<kConfigIndex>& block,
                                        const Visible& visible, int warpgroup)
      : arguments(arguments),
        shared(shared),
        block(block),
        visible(visible),
        warpgroup(warpgroup),
        thread(threadIdx.x % kWarpgroup),
        lane(threadIdx.x % 32),
        scale(softmax_scale(arguments.params.forward, block.batch())) {
    first_row = block.first_row + warp_row() + lane / 4;
    const uint32_t tile = tile_of_all<kBlockQ>(arguments, block.batch_element,
                                               block.head, block.first_row / kBlockQ);
    const int64_t padded = int64_t{tile} * kBlockQ + warp_row() + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      key_limit[half] = visible.key_limit(first_row + 8 * half) - lane % 4 * 2;
      lse[half] = arguments.lse[padded + 8 * half];
      delta[half] = arguments.delta[padded + 8 * half];
    }
    num_full_tiles = visible.key_limit(block.first_row) / kBlockKV;
    natural = arguments.large_lse[padded / kConfig.block_q] != 0;
  }

  // First row of the block's tile that this warp has.
  __device__ __forceinline__ int warp_row() const {
    return warpgroup * 64 + thread / 32 * 16;
  }

  __device__ __forceinline__ uint64_t
  own_rows(const Tile<kBlockQ, kHeadDim>& tile) const {
    return k_major_descriptor(opaque(tile.address() + warpgroup * 64 * kPanelRowBytes));
  }

  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // Starts dQ += dS K with the K of the step before this one.
  __device__ __forceinline__ void start_dq(bool accumulate) {
    start_sum<Element, kHeadDim, kBlockKV>(dq, ds_operand, shared.k[stage.index ^ 1],
                                           accumulate);
  }

  // S -> P = exp(scale S - lse).
  __device__ __forceinline__ void to_p(float (&s)[kScores]) const {
    if (natural) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        s[i] = ex2_approx_ftz(exact_exponent(s[i], scale, lse[i / 2 % 2]));
      }
      return;
    }
    const float scale_log2 = scale * kLog2E;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ex2_approx_ftz(s[i] * scale_log2 - lse[i / 2 % 2]);
    }
  }

  // dS of a tile of keys, as the operand of start_dq.
  template <bool kFirst>
  __device__ __forceinline__ void step(int key_tile) {
    const int stage_index = stage.index;
    float p[kScores];
    float ds[kScores];
    wait(shared.k_full[stage_index], stage.parity);
    start_scores<Element, kHeadDim, kBlockQ, kBlockKV>(
        p, own_rows(shared.q), k_major_descriptor(shared.k[stage_index].address()));
    wait(shared.v_full[stage_index], stage.parity);
    start_scores<Element, kHeadDim, kBlockQ, kBlockKV>(
        ds, own_rows(shared.d_out),
        k_major_descriptor(shared.v[stage_index].address()));
    wgmma_wait_group<1>();  // S, and dQ of the step before
    hold_registers(p);
    if constexpr (!kFirst) {
      hold_registers(dq);
      hold_registers(ds_operand);
      release(shared.k_empty[stage_index ^ 1]);
    }
    to_p(p);
    wgmma_wait_group<0>();  // dP
    hold_registers(ds);
    release(shared.v_empty[stage_index]);
#pragma unroll
    for (int i = 0; i < kScores; ++i) ds[i] = p[i] * (ds[i] - delta[i / 2 % 2]);

    if (key_tile >= num_full_tiles) {
      const int first_key = key_tile * kBlockKV;
      const uint32_t keep[2] = {elements_below<kBlockKV>(key_limit[0] - first_key),
                                elements_below<kBlockKV>(key_limit[1] - first_key)};
      keep_elements(ds, keep);
    }
    as_operand<Element>(ds_operand, ds);
    stage.advance();
  }

  __device__ __forceinline__ void sum() {
    wait(shared.rows_full, 0);
    int tile = block.num_key_tiles - 1;
    step</*kFirst=*/true>(tile);
#pragma unroll 1
    while (--tile >= 0) {
      start_dq(/*accumulate=*/tile != block.num_key_tiles - 2);
      step</*kFirst=*/false>(tile);
    }
    start_dq(/*accumulate=*/block.num_key_tiles > 1);
    wgmma_wait_group<0>();
    hold_registers(dq);
    hold_registers(ds_operand);
  }

  // dscale[row] = rowsum(Q o dQ), with Q from shared memory.
  __device__ __forceinline__ void store_dscale() const {
    const jaxflash_tensor& dscale = arguments.params.dscale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = warp_row() + lane / 4 + 8 * half;
      float product = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const auto* pair = reinterpret_cast<const Element*>(
            shared.q.bytes + i / 8 * shared.q.kPanelBytes + tile_row * kPanelRowBytes +
            (i % 8 ^ tile_row % 8) * 16 + lane % 4 * 4);
        product += to_float(pair[0]) * dq[4 * i + 2 * half];
        product += to_float(pair[1]) * dq[4 * i + 2 * half + 1];
      }
      product += __shfl_xor_sync(~0u, product, 1);
      product += __shfl_xor_sync(~0u, product, 2);
      const int row = first_row + 8 * half;
      if (lane % 4 == 0 && row < arguments.params.forward.q_len) {
        batch_pointer<float>(
            dscale,
            block.batch())[block.head * dscale.strides[0] + row * dscale.strides[1]] =
            visible.sees_keys(row) ? product : 0.f;
      }
    }
  }

  __device__ __forceinline__ void store_dq() {
    const jaxflash_tensor& target = arguments.params.dq;
    const jaxflash_attention_params& forward = arguments.params.forward;
    const bool sees_keys[2] = {visible.sees_keys(first_row),
                               visible.sees_keys(first_row + 8)};
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      dq[i] = sees_keys[i / 2 % 2] ? dq[i] * scale : 0.f;
    }
    if (target.dtype == JAXFLASH_FLOAT32) {
      store_float32(
          batch_pointer<float>(target, block.batch()) + block.head * target.strides[1],
          target.strides[0], dq, first_row, static_cast<int>(forward.q_len),
          static_cast<int>(forward.head_dim), lane);
      return;
    }
    bar_sync(kRowsDone + warpgroup, kWarpgroup);  // its rows of Q are not read any more
    stage_rows<Element, kBlockQ>(shared.q.address(), dq, warp_row(), lane);
    fence_proxy_async_shared();
    bar_sync(kDqStaged + warpgroup, kWarpgroup);
    if (thread != 0) return;
    const int tile_row = warpgroup * 64;
#pragma unroll
    for (int panel = 0; panel < shared.q.kNumPanels; ++panel) {
      cp_async_bulk_tensor_4d_store(
          &arguments.dq,
          shared.q.address() + panel * shared.q.kPanelBytes + tile_row * kPanelRowBytes,
          panel * kPanelColumns, block.first_row + tile_row, block.head,
          static_cast<int>(block.batch_element));
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
  }

  __device__ __forceinline__ void run() {
    if (block.num_key_tiles > 0) {
      sum();
    } else {
      set_zero(dq);
    }
    if (arguments.params.dscale.data != nullptr) store_dscale();
    if (arguments.params.dq.data != nullptr) store_dq();
  }
};

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_dq_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<DqShared<kConfigIndex>*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.init_barriers();
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers exist

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) load_dq_operands(arguments, shared);
    return;
  }
  setmaxnreg_inc<kConsumerRegisters>();
  const DqBlock<kConfigIndex> block(arguments);
  const Visible visible(arguments.params.forward, block.batch());
  griddepcontrol_wait();  // the row pass is done
  DqConsumer<Element, kConfigIndex> consumer(arguments, shared, block, visible,
                                             warpgroup - 1);
  consumer.run();
}

}  // namespace jaxflash::sm90
