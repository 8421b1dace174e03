// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of the forward kernel that does not compute: the loader, which hands
// out work items and starts all copies from global memory, and the screener.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../common/hidden_values.cuh"
#include "../common/ptx_sm90.cuh"
#include "forward_storage.cuh"
#include "launch.h"
#include "schedule.cuh"
#include "tile_config.h"

namespace jaxflash::sm90 {

// One thread.
template <int kConfigIndex>
struct Loader {
  using Storage = ForwardStorage<kConfigIndex>;
  static constexpr ForwardConfig kConfig = Storage::kConfig;

  Storage& storage;
  const ForwardArguments& arguments;
  RingPosition<Storage::kStages> ring;
  uint32_t q_parity = 0;

  // Starts the copy of a tile, panel by panel.
  template <class Tile>
  __device__ __forceinline__ void load(Tile& tile, const CUtensorMap& map,
                                       uint64_t& full, int row, int head, int batch) {
    const uint32_t barrier = cvta_generic_to_shared(&full);
    mbarrier_arrive_expect_tx(barrier, sizeof(Tile));
#pragma unroll
    for (int panel = 0; panel < Storage::kPanels; ++panel) {
      cp_async_bulk_tensor_4d_load(cvta_generic_to_shared(&tile[panel]), &map, barrier,
                                   panel * kPanelColumns, row, head, batch);
    }
  }

  __device__ __forceinline__ void load_item(const WorkItem& item) {
    wait(storage.q_empty, q_parity ^ 1);
    q_parity ^= 1;
    load(storage.q, arguments.q_map, storage.q_full, item.first_row, item.head,
         item.batch * arguments.q_batch_step);
    const int kv_head = item.head / arguments.heads_per_kv_head;
    const int k_batch = item.batch * arguments.k_batch_step;
    const int v_batch = item.batch * arguments.v_batch_step;
#pragma unroll 1
    for (int tile = item.num_tiles - 1; tile >= 0; --tile) {
      const int stage = ring.stage;
      wait(storage.k_empty[stage], ring.parity ^ 1);
      load(storage.k[stage], arguments.k_map, storage.k_full[stage],
           tile * kConfig.block_kv, kv_head, k_batch);
      wait(storage.v_empty[stage], ring.parity ^ 1);
      const bool whole = tile < item.num_full_tiles;
      load(storage.value(stage), arguments.v_map,
           whole ? storage.v_full[stage] : storage.v_loaded[stage],
           tile * kConfig.block_kv, kv_head, v_batch);
      ring.advance();
    }
  }

  __device__ __forceinline__ void run() {
    RingPosition<Storage::kWorkSlots> slot;
    uint32_t index = blockIdx.x;
#pragma unroll 1
    while (true) {
      const WorkItem item =
          describe_work<kConfig.block_q(), kConfig.block_kv>(arguments, index);
      wait(storage.work_empty[slot.stage], slot.parity ^ 1);
      storage.work[slot.stage] = item;
      storage.dropped[slot.stage] = 0;
      arrive(storage.work_full[slot.stage]);
      slot.advance();
      if (item.num_tiles == WorkItem::kNone) break;
      // Asked for before the copies, so that the answer is there when they are started.
      index = next_work(arguments, index);
      if (item.num_tiles > 0) load_item(item);
    }
  }
};

// Three warps.
template <class Element, int kConfigIndex>
struct Screener {
  using Storage = ForwardStorage<kConfigIndex>;

  Storage& storage;
  int thread;

  // Zeroes what is not finite in a tile of V. Returns whether there was any.
  __device__ __forceinline__ bool clean(typename Storage::KeyTile& tile) {
    constexpr int kChunks = sizeof(tile) / 16;
    const uint32_t address = cvta_generic_to_shared(&tile);
    NonfiniteProbe<Element> probe;
#pragma unroll 4
    for (int chunk = thread; chunk < kChunks; chunk += kScreenThreads) {
      probe.add(ld_shared_v4(address + chunk * 16));
    }
    if (!bar_red_or(kScreenBarrier, kScreenThreads, probe.found())) return false;
#pragma unroll 1
    for (int chunk = thread; chunk < kChunks; chunk += kScreenThreads) {
      const uint32_t place = address + chunk * 16;
      st_shared_v4(place, finite_part<Element>(ld_shared_v4(place)));
    }
    fence_proxy_async_shared();  // the tensor cores see the clean tile
    bar_sync(kScreenBarrier, kScreenThreads);
    return true;
  }

  __device__ __forceinline__ void run() {
    WorkReader<Storage> work = {storage};
    RingPosition<Storage::kStages> ring;
    uint32_t loaded_parity = 0;  // bit: stage
    WorkItem item;
#pragma unroll 1
    while (work.read(item)) {
#pragma unroll 1
      for (int tile = item.num_tiles; tile > item.num_full_tiles; --tile) {
        wait(storage.v_loaded[ring.stage], loaded_parity >> ring.stage & 1);
        loaded_parity ^= 1u << ring.stage;
        const bool dropped = clean(storage.value(ring.stage));
        if (thread == 0) {
          if (dropped) storage.dropped[work.slot.stage] = 1;
          arrive(storage.v_full[ring.stage]);
        }
        ring.advance();
      }
      ring.advance(min(item.num_tiles, item.num_full_tiles));
      work.release();
    }
  }
};

}  // namespace jaxflash::sm90
