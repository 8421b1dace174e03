// SPDX-License-Identifier: Apache-2.0
//
// The order of float32 additions decides the last bits of dQ. In deterministic calls
// the blocks that add to a tile of dQ take turns, in the order in which they arrive if
// all take the same time: QueryTiles lets them start at different tiles, so that the
// next one comes when the last one is done and nobody waits for long.
//
// A block waits for blocks that may have a higher number than its own, which the GPU
// has to run at the same time. So the blocks of a head form groups of at most as many
// as the GPU holds, and a group's turns come after those of the groups before it.
#pragma once

#include <cstdint>

#include "backward_tiles.cuh"

namespace jaxflash::sm90 {

template <int kBlockQ, int kBlockKV>
struct Turns {
  const Visible& visible;
  int group_begin;  // tiles of keys [begin, end)
  int group_end;
  int key_tile;
  uint32_t blocks_in_turn;

  __device__ __forceinline__ Turns(const Visible& visible, int key_tile,
                                   uint32_t blocks_in_turn)
      : visible(visible), key_tile(key_tile), blocks_in_turn(blocks_in_turn) {
    const int num_key_tiles = (visible.kv_rows + kBlockKV - 1) / kBlockKV;
    const int group = static_cast<int>(blocks_in_turn);
    group_begin = key_tile / group * group;
    group_end = min(group_begin + group, num_key_tiles);
  }

  // How many steps after its start the block of `tile` comes to a tile of Q, or -1.
  __device__ __forceinline__ int arrival(int tile, int q_tile) const {
    const QueryTiles<kBlockQ, kBlockKV> walk(visible, tile, blocks_in_turn);
    const int step = q_tile - walk.first - walk.start;
    return visible.causal || step >= 0 ? step : step + walk.count;
  }

  // How many blocks add to a tile of Q before this one; computed by a warp. All tiles
  // of keys of earlier groups are seen by the rows that see one of this group.
  __device__ __forceinline__ int turn(int q_tile, int lane) const {
    const int own = arrival(key_tile, q_tile);
    int before = group_begin;
#pragma unroll 1
    for (int tile = group_begin + lane; tile - lane < group_end; tile += 32) {
      const int other = tile < group_end ? arrival(tile, q_tile) : -1;
      const bool first =
          other >= 0 && (other < own || (other == own && tile > key_tile));
      before += __popc(__ballot_sync(~0u, first));
    }
    return before;
  }
};

// One lane waits until `number` blocks have added.
__device__ __forceinline__ void wait_for_turn(const int* turn, int number) {
  while (ld_acquire_gpu(turn) != number) {
  }
  fence_proxy_async_global();  // before the additions of this block
}

// After the additions of this lane.
__device__ __forceinline__ void pass_turn(int* turn) {
  cp_async_bulk_wait_group<0>();  // they are done
  fence_proxy_async_global();
  __threadfence();
  red_release_gpu_add(turn, 1);
}

}  // namespace jaxflash::sm90
