// SPDX-License-Identifier: Apache-2.0
//
// How the work of a call is cut into blocks and tasks.
#ifndef JAXFLASH_CSRC_CPU_BLOCKS_H_
#define JAXFLASH_CSRC_CPU_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "api/validate.h"
#include "cpu/problem.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// Queries, or keys in the backward pass, that lie side by side in vectors.
constexpr int kPanelVectors = 3;
constexpr int kPanel = kPanelVectors * kLanes;

// Floats of scratch on the stack of a task: threads may have as little as 512 KB.
constexpr int kScratchFloats = 62 * 1024;

inline int vectors_for(int lanes) { return (lanes + kLanes - 1) / kLanes; }

inline int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Sizes of a forward task's blocks.
struct ForwardBlocks {
  static constexpr int kMaxKeys = 128;

  int keys;    // per block of K and V
  int panels;  // of queries, at most

  ForwardBlocks(const jaxflash_attention_params& p, int64_t heads, int64_t rows,
                int threads) {
    const int dims = static_cast<int>(p.head_dim + p.value_head_dim);
    keys = dims <= 128 ? kMaxKeys : dims <= 256 ? 64 : 32;
    const int fixed = keys * (2 * kPanel + dims + 32);
    const int per_panel = (dims + 4) * kPanel;
    panels = std::min(192 / kPanel, (kScratchFloats - fixed) / per_panel);
    // Enough tasks for every thread, and short ones at the end of the causal triangle.
    const int64_t wanted =
        std::max<int64_t>(int64_t{4} * threads / std::max<int64_t>(heads, 1), 1);
    const int64_t even = rows / (wanted * kPanel);
    panels = static_cast<int>(std::clamp<int64_t>(even, 1, panels));
  }
};

// Those of the backward pass. Everything follows from the shape, so that results do
// too.
struct BackwardBlocks {
  static constexpr int kMaxRows = 64;
  static constexpr int kMaxKeys = 96;
  static constexpr int kMaxPanels = kMaxKeys / kPanel;
  static constexpr int kMaxChunks = 64;

  int keys;  // per packed block: whole panels
  int rows;  // per packed block
  int chunks;
  int64_t chunk_keys;
  int64_t chunk_rows;

  explicit BackwardBlocks(const jaxflash_attention_params& p) {
    const int64_t dims = p.head_dim + p.value_head_dim;
    keys = (dims <= 128 ? kMaxKeys : kMaxKeys / 2) / kPanel * kPanel;
    rows = dims <= 256 ? kMaxRows : kMaxRows / 2;
    // Chunks cost a barrier each, and packing that is amortised over their rows.
    constexpr int64_t kMinKeys = 192;
    const int64_t heads = std::max<int64_t>(batch_size(p) * p.num_kv_heads, 1);
    const int64_t all_rows = p.q_len * group_size(p);
    const int64_t fitting = std::min(all_rows / rows, p.kv_len / kMinKeys);
    chunks = static_cast<int>(std::clamp<int64_t>(fitting, 1, int64_t{kMaxChunks}));
    chunks =
        static_cast<int>(std::clamp<int64_t>(int64_t{kMaxChunks} / heads, 1, chunks));
    chunk_keys = round_up(round_up(p.kv_len, chunks) / chunks, keys);
    chunk_rows = round_up(round_up(all_rows, chunks) / chunks, rows);
  }
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BLOCKS_H_
