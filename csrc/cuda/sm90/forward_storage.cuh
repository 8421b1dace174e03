// SPDX-License-Identifier: Apache-2.0
//
// What the warps of a block of the forward kernel share: tiles and barriers in shared
// memory, and the work items that the loader announces there.
#pragma once

#include <cstdint>

#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "schedule.cuh"
#include "tile_config.h"

namespace jaxflash::sm90 {

constexpr int kScreenThreads = 96;  // the loader's warpgroup but its first warp

// Named barriers; those of a consumer are numbered from here.
enum : int { kTurnBarrier = 1, kGroupBarrier = 5, kScreenBarrier = 9 };

template <int kConfigIndex>
struct ForwardStorage {
  static constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  static constexpr int kPanels = panels_of(kConfig.head_dim);
  static constexpr int kStages = kConfig.num_stages;
  static constexpr int kQuerySlots = kConfig.num_query_slots;
  static constexpr int kWorkSlots = 4;

  using QuerySlot = uint16_t[kPanels][kGroupRows][kPanelColumns];
  using Panel = uint16_t[kConfig.block_kv][kPanelColumns];
  using KeyTile = Panel[kPanels];
  // Of the last panel eight columns are used, which hold ones.
  using ValueTile = Panel[kPanels + (kConfig.sum_columns ? 1 : 0)];

  alignas(1024) QuerySlot q[kQuerySlots];
  alignas(1024) KeyTile k[kStages];
  alignas(1024) ValueTile v[kStages];

  uint64_t q_full[kQuerySlots];   // Q has landed
  uint64_t q_empty[kQuerySlots];  // its consumer is done with it
  uint64_t k_full[kStages];       // K has landed
  uint64_t k_empty[kStages];      // all consumers are done with it
  uint64_t v_loaded[kStages];     // V that needs screening has landed
  uint64_t v_full[kStages];       // V has landed or was screened
  uint64_t v_empty[kStages];      // all consumers are done with it
  uint64_t work_full[kWorkSlots];
  uint64_t work_empty[kWorkSlots];
  WorkItem work[kWorkSlots];
  int dropped[kWorkSlots];  // V of the item had inf or NaN that the screener took out

  // The part of a stage that V fills.
  __device__ __forceinline__ KeyTile& value(int stage) {
    return reinterpret_cast<KeyTile&>(v[stage]);
  }

  // Fills the columns of ones, by all threads.
  __device__ __forceinline__ void init_ones(uint32_t ones) {
    if constexpr (kConfig.sum_columns) {
      for (int stage = 0; stage < kStages; ++stage) {
        const uint32_t panel = cvta_generic_to_shared(&v[stage]) + sizeof(KeyTile);
        for (int row = threadIdx.x; row < kConfig.block_kv;
             row += kConfig.num_threads()) {
          st_shared_v4(panel + row * kPanelRowBytes + row % 8 * 16,
                       make_uint4(ones, ones, ones, ones));
        }
      }
      fence_proxy_async_shared();  // the tensor cores see them
    }
  }

  __device__ __forceinline__ void init_barriers() {
    const auto init = [](uint64_t& barrier, int arrivals) {
      mbarrier_init(cvta_generic_to_shared(&barrier), arrivals);
    };
    constexpr int kConsumers = kConfig.num_consumers;
    for (int slot = 0; slot < kQuerySlots; ++slot) {
      init(q_full[slot], 1);
      init(q_empty[slot], kConfig.out_through_query() ? kWarpgroup / 32 : 1);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      init(k_full[stage], 1);
      init(k_empty[stage], kConsumers);
      init(v_loaded[stage], 1);
      init(v_full[stage], 1);
      init(v_empty[stage], kConsumers);
    }
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      init(work_full[slot], 1);
      init(work_empty[slot], (kConsumers * kWarpgroup + kScreenThreads) / 32);
    }
  }
};

__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
  mbarrier_wait(cvta_generic_to_shared(&barrier), parity);
}
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  mbarrier_arrive(cvta_generic_to_shared(&barrier));
}

// The slots in which the loader describes work items, as the other warps read them.
template <class Storage>
struct WorkReader {
  Storage& storage;
  RingPosition<Storage::kWorkSlots> slot;

  // The next item, or false when there is none.
  __device__ __forceinline__ bool read(WorkItem& item) {
    wait(storage.work_full[slot.stage], slot.parity);
    item = storage.work[slot.stage];
    return item.num_tiles != WorkItem::kNone;
  }

  // The next item of which some row sees a key.
  __device__ __forceinline__ bool read_visible(WorkItem& item) {
    while (read(item)) {
      if (item.num_tiles > 0) return true;
      release();
    }
    return false;
  }

  __device__ __forceinline__ bool dropped() const {
    return storage.dropped[slot.stage] != 0;
  }

  // For the item that was read and not released.
  __device__ __forceinline__ void wait_again() const {
    wait(storage.work_full[slot.stage], slot.parity);
  }

  // This warp needs the slot no more.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(storage.work_empty[slot.stage]);
    slot.advance();
  }
};

// A thread of consumer `group`, number `index` of its warpgroup. Of the accumulators it
// has rows row() and row() + 8 of the tile of Q.
struct ConsumerThread {
  int group;
  int index;

  __device__ __forceinline__ bool leads() const { return index == 0; }
  __device__ __forceinline__ int warp() const { return index / 32; }
  __device__ __forceinline__ int row() const {
    return group * kGroupRows + warp() * kWarpRows + index % 32 / 4;
  }
  __device__ __forceinline__ void group_sync() const {
    bar_sync(kGroupBarrier + group, kWarpgroup);
  }
};

}  // namespace jaxflash::sm90
