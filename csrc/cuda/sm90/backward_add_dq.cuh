// SPDX-License-Identifier: Apache-2.0
//
// Adds what blocks contribute to dQ to an accumulator in global memory, where it lies
// in the order in which the tensor cores hold it (backward_rows.cuh), so that a staged
// tile is one contiguous bulk addition. Each computing warpgroup has a buffer and a
// warp that adds what is staged there: every other step, as an addition, with its place
// or turn (backward_turns.cuh), takes longer than a step.
#pragma once

#include <cstdint>

#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "backward_config.h"
#include "backward_tiles.cuh"
#include "backward_turns.cuh"
#include "backward_walk.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// Named barriers of a warpgroup and its adding warp.
enum DqBarrier {
  kDqFull = 8,    // + buffer
  kDqEmpty = 10,  // likewise
};

constexpr int kDqThreads = kWarpgroup + 32;

// One of the two warps: the steps whose parity is `buffer`. stage: the tile that a
// warpgroup puts there.
template <int kConfigIndex>
__device__ __forceinline__ void add_dq(const BackwardArguments& arguments,
                                       const float* stage, int buffer,
                                       uint32_t block_number) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr int kBlockQ = kConfig.block_q;
  constexpr int kBlockKV = kConfig.block_kv;
  const KeyBlock block(arguments, block_number);
  const Visible visible(arguments.params.forward, block.batch());
  const int lane = threadIdx.x % 32;
  const bool wanted = arguments.dq_accumulator != nullptr;
  const bool by_turns = arguments.order.by_turns;
  const Turns<kBlockQ, kBlockKV> turns(arguments, visible);
  const int64_t rows_of_sum =
      static_cast<int64_t>(arguments.num_query_heads) * arguments.num_rows_padded;
  griddepcontrol_wait();  // dq_state is zero
  bar_arrive(kDqEmpty + buffer, kDqThreads);
  const int key_tile = block.tile;
  QueryWalk<kBlockQ, kBlockKV> walk(arguments, block, visible);
  const int num_steps = walk.num_steps();
  const int first_head = block.kv_head * arguments.group_size;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, walk.advance()) {
    if (step % kStages != buffer) continue;
    const int q_tile = walk.q_tile;
    const uint32_t tile = tile_of_all<kBlockQ>(arguments, block.batch_element,
                                               first_head + walk.head, q_tile);
    int64_t row = int64_t{tile} * kBlockQ;
    int* state = arguments.dq_state + int64_t{tile} * kDqSums;
    bool first_to_come = false;
    if (by_turns) {
      const int sum = turns.sum_of(key_tile, walk.tiles, q_tile);
      const int number = turns.turn(sum, q_tile, key_tile);
      state += sum;
      row += sum * rows_of_sum;
      first_to_come = number == 0;
      if (lane == 0) wait_for_turn(state, number);
      __syncwarp();
    }
    bar_sync(kDqFull + buffer, kDqThreads);
    if (lane == 0 && wanted) {
      if (!by_turns) first_to_come = take_place(state);
      float* target = arguments.dq_accumulator + row * kConfig.head_dim;
      const uint32_t source = cvta_generic_to_shared(stage);
      constexpr uint32_t kBytes = kBlockQ * kConfig.head_dim * sizeof(float);
      if (first_to_come) {
        cp_async_bulk_store(target, source, kBytes);
      } else {
        cp_reduce_async_bulk_add_f32(target, source, kBytes);
      }
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();
    }
    __syncwarp();
    bar_arrive(kDqEmpty + buffer, kDqThreads);
    if (lane == 0 && wanted) {
      if (by_turns) {
        tell_others(state, 1);
      } else if (first_to_come) {
        tell_others(state, kStored);
      }
    }
    __syncwarp();
  }
  if (lane == 0) cp_async_bulk_wait_group<0>();
}

}  // namespace jaxflash::sm90
