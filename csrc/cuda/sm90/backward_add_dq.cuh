// SPDX-License-Identifier: Apache-2.0
//
// Adds what blocks contribute to dQ to an accumulator in global memory, where it lies
// in the order in which the tensor cores hold it (backward_rows.cuh), so that a staged
// part is one contiguous bulk addition. Two warps with a buffer each, for every other
// step: an addition, with the turns of a deterministic call, takes longer than a step.
#pragma once

#include <cstdint>

#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_config.h"
#include "backward_rows.cuh"
#include "backward_tiles.cuh"
#include "backward_turns.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// Named barriers of a warpgroup w and the adding warp of a buffer.
enum DqBarrier {
  kDqFull = 8,    // + 2 * buffer + w
  kDqEmpty = 12,  // likewise
};

constexpr int kDqThreads = kWarpgroup + 32;

// Where a warpgroup's part of a tile of dQ starts in the order of the accumulator, and
// its length: the first or second 64 rows of a tile of 128, else the columns of a
// panel.
template <int kConfigIndex>
struct DqPart {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr bool kByRows = kConfig.block_q == 2 * kDqRows;
  static_assert(kByRows ? kConfig.head_dim == kPanelColumns
                        : kConfig.block_q == kDqRows,
                "one m64n64 product per warpgroup");

  __device__ __forceinline__ static int first_float(int warpgroup) {
    return warpgroup * (kPanelColumns / 8) * kDqPieceFloats;
  }
  // Pieces of 8 columns.
  __device__ __forceinline__ static int pieces(int warpgroup) {
    return kByRows || warpgroup == 0 ? kPanelColumns / 8
                                     : kConfig.head_dim / 8 - kPanelColumns / 8;
  }
};

// One of the two warps: the steps whose parity is `buffer`. stage: the tile that the
// warpgroups put there.
template <int kConfigIndex>
__device__ __forceinline__ void add_dq(const BackwardArguments& arguments,
                                       const float* stage, int buffer,
                                       uint32_t block_number) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr int kBlockQ = kConfig.block_q;
  constexpr int kBlockKV = kConfig.block_kv;
  const jaxflash_attention_params& forward = arguments.params.forward;
  const int group_size = static_cast<int>(forward.num_heads / forward.num_kv_heads);
  const KeyBlock block(arguments, block_number);
  const Visible visible(forward, block.batch());
  const int lane = threadIdx.x % 32;
  const bool wanted = arguments.dq_accumulator != nullptr;
  const bool by_turns = arguments.dq_turn != nullptr;
  const Turns<kBlockQ, kBlockKV> turns(arguments, visible);
  const int64_t rows_of_sum =
      static_cast<int64_t>(arguments.num_query_heads) * arguments.num_rows_padded;
  griddepcontrol_wait();  // dq_turn is zero
#pragma unroll
  for (int w = 0; w < 2; ++w) bar_arrive(kDqEmpty + 2 * buffer + w, kDqThreads);
  int steps = 0;
#pragma unroll 1
  for (int i = 0; i < block.num_tiles(); ++i) {
    const int key_tile = block.tile(i);
    const QueryTiles<kBlockQ, kBlockKV> walk(visible, key_tile);
#pragma unroll 1
    for (int g = 0; g < group_size; ++g) {
      const int64_t head_row =
          padded_row(arguments, block.batch_element, block.kv_head * group_size + g);
#pragma unroll 1
      for (int step = 0; step < walk.count; ++step) {
        if (steps++ % kStages != buffer) continue;
        const int q_tile = walk[step];
        int64_t row = head_row + q_tile * kBlockQ;
        int* turn = nullptr;
        bool first_to_come = false;
        if (by_turns) {
          const int sum = turns.sum_of(key_tile, walk, q_tile);
          const int number = turns.turn(sum, q_tile, key_tile);
          turn = arguments.dq_turn + row / kBlockQ * kDqSums + sum;
          row += sum * rows_of_sum;
          first_to_come = number == 0;
          if (lane == 0) wait_for_turn(turn, number);
          __syncwarp();
        }
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const int first = DqPart<kConfigIndex>::first_float(w);
          bar_sync(kDqFull + 2 * buffer + w, kDqThreads);
          if (lane == 0 && wanted) {
            float* target = arguments.dq_accumulator + row * kConfig.head_dim + first;
            const uint32_t source = cvta_generic_to_shared(stage + first);
            constexpr uint32_t kPieceBytes = kDqPieceFloats * sizeof(float);
            const uint32_t bytes = DqPart<kConfigIndex>::pieces(w) * kPieceBytes;
            if (first_to_come) {
              cp_async_bulk_store(target, source, bytes);
            } else {
              cp_reduce_async_bulk_add_f32(target, source, bytes);
            }
          }
          if (lane == 0) cp_async_bulk_commit_group();
          __syncwarp();  // before the next barrier, which takes the warp as a whole
        }
        if (lane == 0) cp_async_bulk_wait_group_read<1>();
        __syncwarp();  // the first part has been read
        bar_arrive(kDqEmpty + 2 * buffer, kDqThreads);
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        __syncwarp();  // the second part too
        bar_arrive(kDqEmpty + 2 * buffer + 1, kDqThreads);
        if (by_turns && lane == 0) pass_turn(turn);
        __syncwarp();
      }
    }
  }
  if (lane == 0) cp_async_bulk_wait_group<0>();
}

}  // namespace jaxflash::sm90
