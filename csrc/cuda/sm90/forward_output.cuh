// SPDX-License-Identifier: Apache-2.0
//
// The end of a work item of the forward kernel: O and the softmax of a consumer's 64
// rows become out, out_low and lse.
#pragma once

#include <cstdint>
#include <type_traits>

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
  static constexpr int kBlockKV = kConfig.block_kv;
  using Softmax = OnlineSoftmax<kBlockKV>;
  using Accumulators = float[kConfig.output_columns() / 2];

  Storage& storage;
  const ForwardArguments& arguments;
  ConsumerThread thread;

  // out = O / l in place, and lse.
  __device__ __forceinline__ void finish(const WorkItem& item, Accumulators& o,
                                         const Softmax& softmax) const {
    const jaxflash_attention_params& params = arguments.params;
    bool empty[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.first_row + thread.row() + 8 * r;
      const float sum = quad_sum(softmax.row_sum[r]);
      empty[r] = sum == 0.f || row >= item.q_rows || item.key_limit(row) == 0;
      if (thread.index % 4 == 0 && row < params.q_len) {
        float* lse = batch_pointer<float>(params.lse, single_batch_axis(item.batch)) +
                     item.head * params.lse.strides[0];
        lse[row * params.lse.strides[1]] =
            empty[r] ? -INFINITY : softmax.log_sum_exp(r, sum, item.scale);
      }
      float divisor = sum;
      if (params.out_low.data != nullptr) {
        divisor = kConfig.sum_columns ? o[kHeadDim / 2 + 2 * r]
                                      : quad_sum(softmax.rounded_sum[r]);
      }
      const float inverse = __fdividef(1.f, divisor);
#pragma unroll
      for (int i = 2 * r; i < kHeadDim / 2; i += 4) {
        o[i] *= inverse;
        o[i + 1] *= inverse;
      }
    }
    if (!__any_sync(~0u, empty[0] || empty[1])) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      if (empty[i / 2 % 2]) o[i] = 0.f;
    }
  }

  // Rounds O and starts its way to out, through the consumer's slot of Q: each warp
  // copies its own rows. The slot is free when all of its copies have read it.
  __device__ __forceinline__ void start_copies(const WorkItem& item,
                                               const Accumulators& o, int slot) const {
    constexpr int kPanelBytes = kGroupRows * kPanelRowBytes;
    const int lane = thread.index % 32;
    const int row = lane % 16;
    const uint32_t rows = cvta_generic_to_shared(&storage.q[slot]) +
                          thread.warp() * kWarpRows * kPanelRowBytes;
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const int chunk = (2 * (j % 4) + lane / 16) ^ (row % 8);
      const float* x = &o[8 * j];
      stmatrix_x4(rows + j / 4 * kPanelBytes + row * kPanelRowBytes + chunk * 16,
                  pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]),
                  pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7]));
    }
    fence_proxy_async_shared();  // the copy engine sees the rows
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int panel = 0; panel < Storage::kPanels; ++panel) {
      cp_async_bulk_tensor_4d_store(
          &arguments.out_map, rows + panel * kPanelBytes, panel * kPanelColumns,
          item.first_row + thread.group * kGroupRows + thread.warp() * kWarpRows,
          item.head, item.batch);
    }
    cp_async_bulk_commit_group();
  }

  // Stores a tensor chunk by chunk. A thread has two of every 8 columns of O; in the
  // quad, each gets all 8 of one chunk in four, from exchange(r, chunk) of its rows r.
  template <class T, class Exchange>
  __device__ __forceinline__ void store_chunks(const WorkItem& item,
                                               const jaxflash_tensor& tensor,
                                               const Exchange& exchange) const {
    T* data = batch_pointer<T>(tensor, single_batch_axis(item.batch)) +
              item.head * tensor.strides[1];
    const int first_column = 8 * (thread.index % 4);
    const int columns_left = static_cast<int>(arguments.params.head_dim) - first_column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.first_row + thread.row() + 8 * r;
      T* target = data + row * tensor.strides[0] + first_column;
#pragma unroll
      for (int chunk = 0; chunk < kHeadDim / 8; chunk += 4) {
        const auto elements = exchange(r, chunk);
        if (row < arguments.params.q_len && 8 * chunk < columns_left) {
          *reinterpret_cast<std::remove_const_t<decltype(elements)>*>(
              target + 8 * chunk) = elements;
        }
      }
    }
  }

  // Rounds and stores O where its slot of Q has the next tile by now.
  __device__ __forceinline__ void store_out(const WorkItem& item,
                                            const Accumulators& o) const {
    store_chunks<Element>(item, arguments.params.out, [&](int r, int chunk) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &o[4 * (chunk + i) + 2 * r];
        pairs[i] = pack<Element>(x[0], x[1]);
      }
      return quad_transpose_32(pairs, thread.index % 4);
    });
  }

  // The bits that rounding O takes.
  __device__ __forceinline__ void store_out_low(const WorkItem& item,
                                                const Accumulators& o) const {
    store_chunks<int8_t>(item, arguments.params.out_low, [&](int r, int chunk) {
      uint32_t pairs[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* x = &o[4 * (chunk + 2 * i) + 2 * r];
        pairs[i] = low_bytes<Element>(x[0], x[1], low_bytes<Element>(x[4], x[5], 0));
      }
      return quad_transpose_16(pairs, thread.index % 4);
    });
  }

  // Gives the rows that see inf and NaN in V what the screener took out.
  __device__ __forceinline__ void restore_nonfinite(const WorkItem& item) const {
    const jaxflash_attention_params& params = arguments.params;
    // Out has been written.
    if (thread.index % 32 == 0) cp_async_bulk_wait_group<0>();
    __syncwarp();
    const BatchIndex batch = single_batch_axis(item.batch);
    const int first_row =
        item.first_row + thread.group * kGroupRows + thread.warp() * kWarpRows;
    restore_visible_nonfinite(
        batch_pointer<Element>(params.out, batch) + item.head * params.out.strides[1] +
            first_row * params.out.strides[0],
        params.out.strides[0],
        batch_pointer<const Element>(params.v, batch) +
            item.kv_head * params.v.strides[1],
        params.v.strides[0], Visible(params, batch), item.num_full_tiles * kBlockKV,
        first_row, min(first_row + kWarpRows, item.q_rows),
        static_cast<int>(params.head_dim), thread.index % 32);
  }
};

}  // namespace jaxflash::sm90
