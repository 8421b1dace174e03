// SPDX-License-Identifier: Apache-2.0
//
// Backward pass: FlashAttention-2, algorithm 2, with the keys in the lanes.
//
//   S[i, j]   = sum_h Q[i, h] K^T[h, j]          P = exp(scale S - lse)
//   dP[i, j]  = sum_h dO[i, h] V^T[h, j]        dS = P o (dP - delta + d_lse)
//   dV^T[h, j] += sum_i dO[i, h] P[i, j]
//   dK^T[h, j] += sum_i Q[i, h] dS[i, j]         dK = scale dK^T^T
//   dQ[i, h]  += sum_j dS[i, j] K[j, h]          dQ = scale dQ
//
// with delta = rowsum(dO o O). Each product is computed once: K, K^T and V^T are packed
// per block of keys, which walks over the blocks of rows below it. delta is summed in
// the order of dP, so that dP - delta vanishes where one key holds all the mass.
//
// Keys and rows of a key/value head are cut into the same number of chunks. In step s
// the task of key chunk c works on row chunk c + s (modulo the chunks), so that no two
// tasks of a step touch the same rows: dK, dV and dQ are plain float32 sums in the
// workspace, in an order that depends on the shape alone and not on the threads.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_H_

#include <algorithm>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/forward.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/problem.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// The products of one chunk of keys with one chunk of rows.
template <class M>
class BackwardTask {
 public:
  using Element = typename M::Element;
  using Dot = typename M::Dot;

  BackwardTask(const BackwardHead<M>& head, const BackwardBlocks& blocks,
               float* scratch)
      : head_(head),
        blocks_(blocks),
        head_dim_(head.head_dim),
        padded_dim_(head.padded_dim),
        depth_(words<M>(head.head_dim)) {
    Arena arena(scratch, kScratchFloats);
    const int64_t keys = blocks.keys;
    const int64_t rows = blocks.rows;
    k_transposed_ = arena.take(keys * depth_);
    v_transposed_ = arena.take(keys * depth_);
    k_ = arena.take(words<M>(keys) * padded_dim_);
    q_ = arena.take(rows * depth_);
    d_out_ = arena.take(rows * depth_);
    q_pairs_ = M::kPairs ? arena.take(words<M>(rows) * head_dim_) : q_;
    d_out_pairs_ = M::kPairs ? arena.take(words<M>(rows) * head_dim_) : d_out_;
    p_ = arena.take(rows * kPanel);
    dp_ = arena.take(rows * kPanel);
    ds_rows_ = arena.take(rows * words<M>(keys));
    ds_sums_ = arena.take(rows * kLanes);
    std::fill_n(k_, words<M>(keys) * padded_dim_, 0.0f);
  }

  void run(int64_t first_key, int64_t last_key, int64_t first_row, int64_t last_row) {
    last_key = std::min(last_key, head_.visible.kv_rows);
    last_row = std::min(last_row, head_.visible.q_rows * head_.group);
    for (int64_t j = first_key; j < last_key; j += blocks_.keys) {
      const int keys = static_cast<int>(std::min<int64_t>(blocks_.keys, last_key - j));
      // Rows before the first one that sees key j see no key of this block, nor do
      // those behind the last one that sees its last key.
      const int64_t skipped = head_.visible.first_row(j) * head_.group - first_row;
      int64_t row =
          first_row + std::max<int64_t>(skipped, 0) / blocks_.rows * blocks_.rows;
      const int64_t end =
          std::min(last_row, head_.visible.row_limit(j + keys - 1) * head_.group);
      if (row >= end) continue;
      pack_keys(j, keys);
      for (; row < end; row += blocks_.rows) {
        add_rows(row,
                 static_cast<int>(std::min<int64_t>(blocks_.rows, last_row - row)));
      }
    }
  }

 private:
  void pack_keys(int64_t first, int count) {
    first_key_ = first;
    keys_ = count;
    for (int lane = 0; lane < count; lane += kPanel) {
      const int width = std::min(count - lane, kPanel);
      const int64_t at = static_cast<int64_t>(lane) * depth_;
      pack_transposed<M>(head_.k, first + lane, width, head_dim_, kPanel,
                         k_transposed_ + at, kPanel);
      pack_transposed<M>(head_.v, first + lane, width, head_dim_, kPanel,
                         v_transposed_ + at, kPanel);
    }
    pack_along_rows<M>(head_.k, first, count, head_dim_, k_, padded_dim_);
  }

  // Rows [row, row + rows) with the packed block of keys.
  void add_rows(int64_t row, int rows) {
    pack_rows<M>(head_.q, row, rows, head_dim_, q_, depth_);
    pack_rows<M>(head_.d_out, row, rows, head_dim_, d_out_, depth_);
    if constexpr (M::kPairs) {
      pack_along_rows<M>(head_.q, row, rows, head_dim_, q_pairs_, head_dim_);
      pack_along_rows<M>(head_.d_out, row, rows, head_dim_, d_out_pairs_, head_dim_);
    }
    const auto within = [this](int64_t key) {
      return static_cast<int32_t>(std::clamp<int64_t>(key - first_key_, 0, keys_));
    };
    for (int i = 0; i < rows; ++i) {
      begin_[i] = within(head_.key_begin(row + i));
      limit_[i] = within(head_.key_limit(row + i));
    }
    // Of the block, what some row sees, from a whole panel on.
    const int first = begin_[0] / kPanel * kPanel;
    const int seen = limit_[rows - 1];
    if (seen <= begin_[0]) return;

    std::fill_n(ds_sums_, rows * kLanes, 0.0f);
    for (int lane = first; lane < seen; lane += kPanel) {
      add_panel(row, rows, lane, std::min(seen - lane, kPanel));
    }
    if (!head_.wants_dq) return;
    for (int i = 0; i < rows; ++i) {
      head_.ds_sum[row + i] += sum(load(ds_sums_ + i * kLanes));
    }
    const int skipped = words<M>(first);
    const Operands dq = {ds_rows_ + skipped,
                         words<M>(blocks_.keys),
                         k_ + static_cast<int64_t>(skipped) * padded_dim_,
                         padded_dim_,
                         head_.dq_row(row),
                         padded_dim_,
                         nullptr};
    const int vectors = padded_dim_ / kLanes;
    const int depth = words<M>(seen) - skipped;
    const bool hidden =
        limit_[0] < seen || begin_[rows - 1] > first || seen % M::kElements != 0;
    if (hidden && any_non_finite<M>(k_, words<M>(keys_), padded_dim_, padded_dim_)) {
      masked_gemm<Dot, Contiguous::kK, Update::kAdd>(
          rows, vectors, depth, dq, [this, skipped](int m, int k, int) {
            return bits_between<M>(broadcast(begin_[m]), broadcast(limit_[m]),
                                   skipped + k);
          });
    } else {
      gemm<Dot, Contiguous::kK, Update::kAdd>(rows, vectors, depth, dq);
    }
  }

  // The panel of keys that begins at `lane` of the block.
  void add_panel(int64_t row, int rows, int lane, int count) {
    const int vectors = vectors_for(count);
    const int64_t at = static_cast<int64_t>(lane) * depth_;
    gemm_scores<Dot>(rows, vectors, depth_,
                     {q_, depth_, k_transposed_ + at, kPanel, p_, kPanel, nullptr});
    gemm_scores<Dot>(
        rows, vectors, depth_,
        {d_out_, depth_, v_transposed_ + at, kPanel, dp_, kPanel, nullptr});

    const bool hidden = limit_[0] < lane + vectors * kLanes || begin_[rows - 1] > lane;
    if (head_.wants_dscale) {
      hidden ? softmax_gradient<true, true>(row, rows, lane, vectors)
             : softmax_gradient<false, true>(row, rows, lane, vectors);
    } else {
      hidden ? softmax_gradient<true, false>(row, rows, lane, vectors)
             : softmax_gradient<false, false>(row, rows, lane, vectors);
    }

    const int64_t key = first_key_ + lane;
    // float32 dS lives in ds_rows_, where dQ reads it too; pairs along rows in dp_.
    const float* ds = M::kPairs ? dp_ : ds_rows_ + lane;
    const int ds_ld = M::kPairs ? kPanel : blocks_.keys;
    if (head_.wants_dv) {
      add_transposed(
          rows, vectors, lane, hidden,
          {d_out_pairs_, head_dim_, p_, kPanel, head_.dv_panel(key), kPanel, nullptr});
    }
    if (head_.wants_dk) {
      add_transposed(
          rows, vectors, lane, hidden,
          {q_pairs_, head_dim_, ds, ds_ld, head_.dk_panel(key), kPanel, nullptr});
    }
  }

  // Whether row i of the block sees these keys of it.
  Ints sees(int i, Ints key) const { return (begin_[i] <= key) & (key < limit_[i]); }

  // dV^T += dO^T P, or dK^T += Q^T dS.
  void add_transposed(int rows, int vectors, int lane, bool hidden, const Operands& o) {
    const int depth = words<M>(rows);
    if (hidden && any_non_finite<M>(o.a, depth, head_dim_, head_dim_)) {
      masked_gemm<Dot, Contiguous::kM, Update::kAdd>(
          head_dim_, vectors, depth, o, [&](int, int k, int v) {
            const Ints key = iota() + (lane + v * kLanes);
            if constexpr (M::kPairs) {
              const Ints high = 2 * k + 1 < rows ? sees(2 * k + 1, key) : Ints{};
              return (sees(2 * k, key) & 0xffff) | (high & ~0xffff);
            } else {
              return sees(k, key);
            }
          });
    } else {
      gemm<Dot, Contiguous::kM, Update::kAdd>(head_dim_, vectors, depth, o);
    }
  }

  // S and dP of a panel, in p_ and dp_, become the words of P and dS.
  template <bool kHidden, bool kDscale>
  void softmax_gradient(int64_t row, int rows, int lane, int vectors) {
    for (int i = 0; i < rows; i += M::kElements) {
      ScaleSums sums[M::kElements] = {};
      for (int v = 0; v < vectors; ++v) {
        Floats p[M::kElements], ds[M::kElements];
#pragma GCC unroll 2
        for (int e = 0; e < M::kElements; ++e) {
          if (i + e < rows) {
            gradient_of_vector<kHidden, kDscale>(row + i + e, i + e, lane, v, &p[e],
                                                 &ds[e], &sums[e]);
          } else {
            p[e] = ds[e] = Floats{};
          }
        }
        store_words(i, lane, v, p, ds);
      }
      if constexpr (kDscale) {
        for (int e = 0; e < M::kElements && i + e < rows; ++e) {
          head_.add_scale_sums(row + i + e, sums[e]);
        }
      }
    }
  }

  template <bool kHidden, bool kDscale>
  void gradient_of_vector(int64_t row, int i, int lane, int v, Floats* p, Floats* ds,
                          ScaleSums* sums) {
    const int at = i * kPanel + v * kLanes;
    Floats s = load(p_ + at);
    // The product is rounded as it was in lse: where one key holds all the mass, the
    // two must cancel, however large they are.
    *p = exp2((s * head_.scale - head_.lse[row]) * kLog2E);
    *ds = *p * (load(dp_ + at) - head_.delta[row] + head_.d_lse[row]);
    if constexpr (kHidden) {
      const Ints visible = sees(i, iota() + (lane + v * kLanes));
      *p = bit_and(*p, visible);
      *ds = bit_and(*ds, visible);
      s = bit_and(s, visible);
    }
    if constexpr (kDscale) {
      sums->ds_s = fma(*ds, s, sums->ds_s);
      sums->ds += *ds;
      sums->p_s = fma(*p, s, sums->p_s);
    }
  }

  void store_words(int i, int lane, int v, const Floats* p, const Floats* ds) {
    if constexpr (M::kPairs) {
      const int at = i / 2 * kPanel + v * kLanes;
      const Floats ds_words = Dot::pair(ds[0], ds[1]);
      store(p_ + at, Dot::pair(p[0], p[1]));
      store(dp_ + at, ds_words);
      for (int e = 0; e < 2; ++e) {
        float* total = ds_sums_ + (i + e) * kLanes;
        store(total, load(total) + Dot::half(ds_words, e));
        Dot::store_halves(
            ds_rows_ + (i + e) * (blocks_.keys / 2) + (lane + v * kLanes) / 2, ds[e]);
      }
    } else {
      store(p_ + i * kPanel + v * kLanes, round_to<Element>(p[0]));
      store(ds_rows_ + i * blocks_.keys + lane + v * kLanes, ds[0]);
      store(ds_sums_ + i * kLanes, load(ds_sums_ + i * kLanes) + ds[0]);
    }
  }

  const BackwardHead<M>& head_;
  const BackwardBlocks& blocks_;
  const int head_dim_, padded_dim_;
  const int depth_;  // words of a row of Q, K, V, dO
  int64_t first_key_ = 0;
  int keys_ = 0;                             // of the packed block
  int32_t begin_[BackwardBlocks::kMaxRows];  // row i sees of them begin_[i] to
  int32_t limit_[BackwardBlocks::kMaxRows];  // limit_[i]

  float *k_transposed_, *v_transposed_;  // [panels, depth, kPanel]
  float* k_;                             // [words of keys, padded_dim]
  float *q_, *d_out_;                    // [rows, depth]
  float *q_pairs_, *d_out_pairs_;        // [words of rows, head_dim]
  float* p_;                             // [rows, kPanel]: S, then P
  float* dp_;                            // [rows, kPanel]: dP, then pairs of dS
  float* ds_rows_;                       // [rows, words of keys]
  float* ds_sums_;                       // [rows, kLanes]: dS summed over the vectors
};

template <class M>
void backward(const jaxflash_attention_backward_params& b, void* workspace,
              const jaxflash_executor* executor) {
  const jaxflash_attention_params& p = b.forward;
  const BackwardBlocks blocks(p);
  const int64_t heads = batch_size(p) * p.num_kv_heads;
  for (int step = 0; step < blocks.chunks; ++step) {
    parallel_for(executor, heads * blocks.chunks, [&](int64_t index) {
      alignas(64) float scratch[kScratchFloats];
      const BackwardHead<M> head(b, index % heads, static_cast<float*>(workspace));
      const int64_t key_chunk = index / heads;
      const int64_t row_chunk = (key_chunk + step) % blocks.chunks;
      const int64_t key = key_chunk * blocks.chunk_keys;
      const int64_t row = row_chunk * blocks.chunk_rows;
      if (step == 0) {
        head.start_keys(key_chunk, blocks.chunk_keys);
        head.start_rows(row, row + blocks.chunk_rows, scratch);
      }
      BackwardTask<M>(head, blocks, scratch)
          .run(key, key + blocks.chunk_keys, row, row + blocks.chunk_rows);
      if (step == blocks.chunks - 1) {
        head.store_keys(key, key + blocks.chunk_keys);
        head.store_rows(row, row + blocks.chunk_rows, blocks.chunk_keys);
      }
    });
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_H_
