// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of the forward kernel that does not compute: the loader, which hands
// out work items and starts all copies from global memory, and the screener, which
// looks after hidden inf and NaN in V and after rows that see nothing.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "../common/hidden_values.cuh"
#include "../common/problem.cuh"
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
  RingPosition<Storage::kStages> key;
  RingPosition<Storage::kStages> value;
  RingPosition<Storage::kQuerySlots> query;
  RingPosition<Storage::kWorkSlots> slot;
  // The tile of V to be loaded next, if any, and the slot of its item. V comes one tile
  // behind K.
  int value_tile = -1;
  int value_slot;

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

  // Q of the consumers [begin, end).
  __device__ __forceinline__ void load_queries(const WorkItem& item, int begin,
                                               int end) {
#pragma unroll 1
    for (int group = begin; group < end; ++group) {
      wait(storage.q_empty[query.stage], query.parity ^ 1);
      load(storage.q[query.stage], arguments.q_map, storage.q_full[query.stage],
           item.first_row + group * kGroupRows, item.head,
           item.batch * arguments.q_batch_step);
      query.advance();
    }
  }

  __device__ __forceinline__ void load_key(const WorkItem& item, int tile) {
    const int head = item.kv_head;
    const int batch = item.batch * arguments.k_batch_step;
    wait(storage.k_empty[key.stage], key.parity ^ 1);
    load(storage.k[key.stage], arguments.k_map, storage.k_full[key.stage],
         tile * kConfig.block_kv, head, batch);
    key.advance();
  }

  __device__ __forceinline__ void load_value() {
    if (value_tile < 0) return;
    const WorkItem& item = storage.work[value_slot];
    const bool whole = value_tile < item.num_full_tiles;
    const int head = item.kv_head;
    const int batch = item.batch * arguments.v_batch_step;
    wait(storage.v_empty[value.stage], value.parity ^ 1);
    load(storage.value(value.stage), arguments.v_map,
         whole ? storage.v_full[value.stage] : storage.v_loaded[value.stage],
         value_tile * kConfig.block_kv, head, batch);
    value.advance();
    value_tile = -1;
  }

  // Tells the other warps of an item; returns its slot. It stays in shared memory:
  // registers are few here.
  __device__ __forceinline__ int announce(uint32_t index) {
    const int place = slot.stage;
    wait(storage.work_empty[place], slot.parity ^ 1);
    storage.work[place] =
        describe_work<kConfig.block_q(), kConfig.block_kv>(arguments, index);
    storage.dropped[place] = 0;
    arrive(storage.work_full[place]);
    slot.advance();
    return place;
  }

  // Loads in the order in which the consumers come to need things, and announces the
  // item `index` once the first copies of this one are on their way.
  __device__ __forceinline__ int load_item(int place, uint32_t index) {
    constexpr int kAhead =
        std::min(Storage::kQuerySlots - kConfig.num_consumers, kConfig.num_consumers);
    const WorkItem& item = storage.work[place];
    int tile = item.num_tiles - 1;
    if (tile < 0) {
      load_value();  // before waiting for consumers that wait for it
      return announce(index);
    }
    load_queries(item, 0, kAhead);
    int next = -1;
#pragma unroll 1
    for (; tile >= 0; --tile) {
      if (next >= 0) load_value();
      load_key(item, tile);
      if (next < 0) load_value();
      value_tile = tile;
      value_slot = place;
      if (next >= 0) continue;
      load_queries(item, kAhead, kConfig.num_consumers);
      next = announce(index);
    }
    return next;
  }

  __device__ __forceinline__ void run() {
    uint32_t index = blockIdx.x;
    int place = announce(index);
#pragma unroll 1
    while (storage.work[place].num_tiles != WorkItem::kNone) {
      // Asked for before the copies, so that the answer is there when it is announced.
      index = next_work(arguments, index);
      place = load_item(place, index);
    }
    load_value();
  }
};

// Three warps.
template <class Element, int kConfigIndex>
struct Screener {
  using Storage = ForwardStorage<kConfigIndex>;

  Storage& storage;
  const ForwardArguments& arguments;
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

  // The rows of an item of which none sees a key: out and out_low 0, lse -inf.
  __device__ __forceinline__ void store_empty(const WorkItem& item) {
    const jaxflash_attention_params& params = arguments.params;
    const BatchIndex batch = single_batch_axis(item.batch);
    Element* out =
        batch_pointer<Element>(params.out, batch) + item.head * params.out.strides[1];
    int8_t* out_low = batch_pointer<int8_t>(params.out_low, batch) +
                      item.head * params.out_low.strides[1];
    float* lse =
        batch_pointer<float>(params.lse, batch) + item.head * params.lse.strides[0];
    constexpr int kChunks = Storage::kConfig.head_dim / 8;
    constexpr int kRows = Storage::kConfig.block_q();
#pragma unroll 1
    for (int index = thread; index < kRows * kChunks; index += kScreenThreads) {
      const int row = item.first_row + index / kChunks;
      const int column = index % kChunks * 8;
      if (row >= params.q_len || column >= params.head_dim) continue;
      *reinterpret_cast<uint4*>(out + row * params.out.strides[0] + column) =
          make_uint4(0, 0, 0, 0);
      if (params.out_low.data != nullptr) {
        *reinterpret_cast<uint2*>(out_low + row * params.out_low.strides[0] + column) =
            make_uint2(0, 0);
      }
      if (column == 0) lse[row * params.lse.strides[1]] = -INFINITY;
    }
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
      if (item.num_tiles == 0) store_empty(item);
    }
  }
};

}  // namespace jaxflash::sm90
