// SPDX-License-Identifier: Apache-2.0
//
// The end of a work item of the forward kernel: O and the softmax of a consumer's 64
// rows become out, out_low and lse.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/hidden_values.cuh"
#include "../common/out_low.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "forward_storage.cuh"
#include "launch.h"
#include "online_softmax.cuh"
#include "quad.cuh"
#include "schedule.cuh"
#include "tile_config.h"

namespace jaxflash::sm90 {

template <class Element, int kConfigIndex>
struct ForwardOutput {
  using Storage = ForwardStorage<kConfigIndex>;
  static constexpr ForwardConfig kConfig = Storage::kConfig;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q();
  static constexpr int kBlockKV = kConfig.block_kv;
  using Softmax = OnlineSoftmax<kBlockKV, kConfig.lazy_rescale>;
  using Accumulators = float[kConfig.output_columns() / 2];

  Storage& storage;
  const ForwardArguments& arguments;
  ConsumerThread thread;

  // out = O / l in place, and lse.
  __device__ __forceinline__ void finish(const WorkItem& item, Accumulators& o,
                                         const Softmax& softmax, float scale) const {
    const jaxflash_attention_params& params = arguments.params;
    float* lse = batch_pointer<float>(params.lse, single_batch_axis(item.batch)) +
                 item.head * params.lse.strides[0];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax.row_sum[r]);
      const float rounded_sum = kConfig.sum_columns ? o[kHeadDim / 2 + 2 * r]
                                                    : quad_sum(softmax.rounded_sum[r]);
      const int row = item.first_row + thread.row() + 8 * r;
      const bool empty = sum == 0.f || row >= item.q_rows;
      const float inverse = 1.f / (params.out_low.data != nullptr ? rounded_sum : sum);
#pragma unroll
      for (int i = 2 * r; i < kHeadDim / 2; i += 4) {
        o[i] = empty ? 0.f : o[i] * inverse;
        o[i + 1] = empty ? 0.f : o[i + 1] * inverse;
      }
      if (thread.index % 4 == 0 && row < params.q_len) {
        lse[row * params.lse.strides[1]] =
            empty ? -INFINITY : softmax.log_sum_exp(r, sum, scale);
      }
    }
  }

  // Rounds O and starts its way through shared memory to out.
  __device__ __forceinline__ void store_out(const WorkItem& item,
                                            const Accumulators& o) const {
    const uint32_t rows =
        cvta_generic_to_shared(kConfig.own_out_tile ? &storage.out[0]
                                                    : &storage.q[0][0][0]) +
        thread.group * kGroupRows * kPanelRowBytes;
    constexpr int kPanelBytes = kBlockQ * kPanelRowBytes;
    if (kConfig.own_out_tile) {
      // The copy of the item before this one has left the tile.
      if (thread.leads()) cp_async_bulk_wait_group_read<0>();
      thread.group_sync();
    }
    const int row = thread.warp() * 16 + thread.index % 16;
    const int odd_chunk = thread.index % 32 / 16;
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const int chunk = (2 * (j % 4) + odd_chunk) ^ (row % 8);
      const float* x = &o[8 * j];
      stmatrix_x4(rows + j / 4 * kPanelBytes + row * kPanelRowBytes + chunk * 16,
                  pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]),
                  pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
    }
    fence_proxy_async_shared();  // the copy engine sees the tile
    thread.group_sync();
    if (!thread.leads()) return;
#pragma unroll
    for (int panel = 0; panel < Storage::kPanels; ++panel) {
      cp_async_bulk_tensor_4d_store(
          &arguments.out_map, rows + panel * kPanelBytes, panel * kPanelColumns,
          item.first_row + thread.group * kGroupRows, item.head, item.batch);
    }
    cp_async_bulk_commit_group();
    if (!kConfig.own_out_tile) {
      cp_async_bulk_wait_group_read<0>();  // the tile may take the next Q
      arrive(storage.q_empty);
    }
  }

  // The bits that rounding O takes. A thread has two of every 8 columns; in the quad,
  // each gets all 8 of one chunk in four.
  __device__ __forceinline__ void store_out_low(const WorkItem& item,
                                                const Accumulators& o) const {
    const jaxflash_attention_params& params = arguments.params;
    int8_t* out_low =
        batch_pointer<int8_t>(params.out_low, single_batch_axis(item.batch)) +
        item.head * params.out_low.strides[1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.first_row + thread.row() + 8 * r;
#pragma unroll
      for (int chunk = 0; chunk < kHeadDim / 8; chunk += 4) {
        uint32_t low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = low_bytes(&o[4 * (chunk + i) + 2 * r]);
        const uint2 bytes = quad_transpose(low, thread.index % 4);
        const int column = 8 * (chunk + thread.index % 4);
        if (row < params.q_len && column < params.head_dim) {
          *reinterpret_cast<uint2*>(out_low + row * params.out_low.strides[0] +
                                    column) = bytes;
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t low_bytes(const float* pair) {
    const auto low = [](float x) {
      return low_bits<Element>(x, to_float(from_float<Element>(x))) & 0xFF;
    };
    return static_cast<uint32_t>(low(pair[0]) | low(pair[1]) << 8);
  }

  // Gives the rows that see inf and NaN in V what the screener took out.
  __device__ __forceinline__ void restore_nonfinite(const WorkItem& item) const {
    const jaxflash_attention_params& params = arguments.params;
    if (thread.leads()) cp_async_bulk_wait_group<0>();  // out has been written
    thread.group_sync();
    const BatchIndex batch = single_batch_axis(item.batch);
    const int kv_head = item.head / arguments.heads_per_kv_head;
    const int first_row =
        item.first_row + thread.group * kGroupRows + thread.warp() * 16;
    restore_visible_nonfinite(
        batch_pointer<Element>(params.out, batch) + item.head * params.out.strides[1] +
            first_row * params.out.strides[0],
        params.out.strides[0],
        batch_pointer<const Element>(params.v, batch) + kv_head * params.v.strides[1],
        params.v.strides[0], Visible(params, batch), item.num_full_tiles * kBlockKV,
        first_row, min(first_row + 16, item.q_rows), static_cast<int>(params.head_dim),
        thread.index % 32);
  }

  // The rows of an item of which none sees a key: out and out_low 0, lse -inf.
  __device__ __forceinline__ void store_empty(const WorkItem& item) const {
    const jaxflash_attention_params& params = arguments.params;
    const BatchIndex batch = single_batch_axis(item.batch);
    Element* out =
        batch_pointer<Element>(params.out, batch) + item.head * params.out.strides[1];
    int8_t* out_low = batch_pointer<int8_t>(params.out_low, batch) +
                      item.head * params.out_low.strides[1];
    float* lse =
        batch_pointer<float>(params.lse, batch) + item.head * params.lse.strides[0];
    constexpr int kChunks = kHeadDim / 8;
#pragma unroll 1
    for (int index = thread.index; index < kGroupRows * kChunks; index += kWarpgroup) {
      const int row = item.first_row + thread.group * kGroupRows + index / kChunks;
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
};

}  // namespace jaxflash::sm90
