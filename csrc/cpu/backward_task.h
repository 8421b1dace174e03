// SPDX-License-Identifier: Apache-2.0
//
// The products of one chunk of keys with one chunk of rows, block by block.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_TASK_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_TASK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/block_view.h"
#include "cpu/dbias_tile.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/packed_block.h"
#include "cpu/problem.h"
#include "cpu/simd.h"
#include "cpu/softmax_gradient.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
class BackwardTask {
 public:
  using Element = typename M::Element;
  using Dot = typename M::Dot;

  // dbias: where dS goes, or NULL.
  BackwardTask(const BackwardHead<M>& head, const BackwardBlocks& blocks,
               float* scratch, const DbiasTile* dbias = nullptr)
      : head_(head),
        blocks_(blocks),
        dbias_(dbias),
        is_plain_(head.sums_to_d_lse && !head.terms.any() && !head.kept.any() &&
                  !head.wants_distances && dbias == nullptr),
        arena_(scratch, kScratchFloats),
        view_(head, blocks.keys, arena_.take(blocks.rows * blocks.keys)),
        packed_(head, blocks, &arena_) {
    const int64_t keys = blocks.keys;
    const int64_t rows = blocks.rows;
    p_ = arena_.take(rows * kPanel);
    dp_ = arena_.take(rows * kPanel);
    kept_ = arena_.take(rows * kPanel);
    ds_rows_ = arena_.take(rows * words<M>(keys));
    ds_sums_ = arena_.take(rows * kLanes);
  }

  void run(int64_t first_key, int64_t last_key, int64_t first_row, int64_t last_row) {
    for_each_block(first_key, last_key, first_row, last_row,
                   [this](int64_t row, int rows) { add_rows(row, rows); });
  }

  // A score as large as a bias may be leaves no bits of the logarithm of a sum in lse:
  // for rows with a large lse, it is summed again and kept beside lse.
  void refine_lse(int64_t first_row, int64_t last_row) {
    constexpr float kLarge = 256.0f;
    const auto is_large = [this](int64_t row) {
      const float size = std::fabs(head_.lse[row]);
      return kLarge < size && size < kInfinity;
    };
    if (!head_.terms.adds()) return;
    last_row = std::min(last_row, row_limit());
    for (int64_t row = first_row; row < last_row; row += blocks_.rows) {
      const int64_t end = std::min(row + blocks_.rows, last_row);
      float totals[BackwardBlocks::kMaxRows];
      bool any = false;
      for (int64_t r = row; r < end; ++r) {
        any |= is_large(r);
        totals[r - row] = std::exp(head_.sink(r) - head_.lse[r]);
      }
      if (!any) continue;
      for_each_block(0, head_.visible.kv_rows, row, end, [&](int64_t first, int rows) {
        add_weights(first, rows, totals + (first - row));
      });
      for (int64_t r = row; r < end; ++r) {
        const float total = totals[r - row];
        if (is_large(r) && total > 0.0f) head_.lse_low[r] = std::log(total);
      }
    }
  }

 private:
  int64_t row_limit() const { return head_.visible.q_rows * head_.group; }

  // Calls add(row, rows) for the blocks of rows and keys of which some may be seen.
  template <class Add>
  void for_each_block(int64_t first_key, int64_t last_key, int64_t first_row,
                      int64_t last_row, Add add) {
    last_key = std::min(last_key, head_.visible.kv_rows);
    last_row = std::min(last_row, row_limit());
    for (int64_t j = first_key; j < last_key; j += blocks_.keys) {
      const int keys = static_cast<int>(std::min<int64_t>(blocks_.keys, last_key - j));
      // Rows before the first one that sees key j see no key of this block, nor do
      // those behind the last one that sees its last key.
      const int64_t skipped = head_.visible.first_row(j) * head_.group - first_row;
      int64_t row =
          first_row + std::max<int64_t>(skipped, 0) / blocks_.rows * blocks_.rows;
      const int64_t end =
          std::min(last_row, head_.visible.row_limit(j + keys - 1) * head_.group);
      view_.start(j, keys);
      is_packed_ = false;
      for (; row < end; row += blocks_.rows) {
        add(row, static_cast<int>(std::min<int64_t>(blocks_.rows, last_row - row)));
      }
    }
  }

  void pack_block(int64_t row, int rows) {
    if (!is_packed_) packed_.pack_keys(view_.first_key(), view_.keys());
    is_packed_ = true;
    packed_.pack_rows(row, rows);
  }

  // Rows [row, row + rows) with the block of keys.
  void add_rows(int64_t row, int rows) {
    if (!view_.look(row, rows)) return;
    pack_block(row, rows);
    std::fill_n(ds_sums_, rows * kLanes, 0.0f);
    bool hidden = view_.lane_limit() % M::kElements != 0;
    for (int lane = view_.first_lane(); lane < view_.lane_limit(); lane += kPanel) {
      const Seen seen = view_.seen(lane);
      hidden |= seen != Seen::kAll;
      if (seen == Seen::kNone) {
        clear_panel(rows, lane);
      } else {
        add_panel(row, rows, lane, seen == Seen::kSome);
      }
    }
    if (!head_.wants_dq) return;
    for (int i = 0; i < rows; ++i) {
      head_.ds_sum[row + i] += sum(load(ds_sums_ + i * kLanes));
    }
    const int padded_dim = head_.padded_dim;
    const int skipped = words<M>(view_.first_lane());
    const Operands dq = {ds_rows_ + skipped,
                         words<M>(blocks_.keys),
                         packed_.k() + static_cast<int64_t>(skipped) * padded_dim,
                         padded_dim,
                         head_.dq_row(row),
                         padded_dim,
                         nullptr};
    const int vectors = padded_dim / kLanes;
    const int depth = words<M>(view_.lane_limit()) - skipped;
    if (hidden && any_non_finite<M>(packed_.k(), words<M>(view_.keys()), padded_dim,
                                    padded_dim)) {
      view_.complete_terms(row, rows);
      masked_gemm<Dot, Contiguous::kK, Update::kAdd>(
          rows, vectors, depth, dq,
          [this](int m, int k, int) { return view_.seen_bits_of_row(m, k); });
    } else {
      gemm<Dot, Contiguous::kK, Update::kAdd>(rows, vectors, depth, dq);
    }
  }

  // dS of a panel that no row sees.
  void clear_panel(int rows, int lane) {
    for (int i = 0; i < rows; ++i) {
      float* ds = ds_rows_ + i * words<M>(blocks_.keys) + words<M>(lane);
      std::fill_n(ds, words<M>(kPanel), 0.0f);
    }
  }

  // The panel of keys that begins at `lane` of the block.
  void add_panel(int64_t row, int rows, int lane, bool hidden) {
    const int vectors = view_.vectors(lane);
    packed_.multiply_panel(rows, lane, vectors, p_, dp_);
    gradient_of_panel(row, rows, lane, vectors, hidden);

    const int64_t key = view_.first_key() + lane;
    // float32 dS lives in ds_rows_, where dQ reads it too; pairs along rows in dp_.
    const float* ds = M::kPairs ? dp_ : ds_rows_ + lane;
    const int ds_ld = M::kPairs ? kPanel : blocks_.keys;
    if (head_.wants_dv) {
      add_transposed(row, rows, head_.value_dim, vectors, lane, hidden,
                     {packed_.d_out_pairs(), head_.value_dim, p_, kPanel,
                      head_.dv_panel(key), kPanel, nullptr});
    }
    if (head_.wants_dk) {
      add_transposed(row, rows, head_.head_dim, vectors, lane, hidden,
                     {packed_.q_pairs(), head_.head_dim, ds, ds_ld, head_.dk_panel(key),
                      kPanel, nullptr});
    }
  }

  // dV^T += dO^T P, or dK^T += Q^T dS.
  void add_transposed(int64_t row, int rows, int columns, int vectors, int lane,
                      bool hidden, const Operands& o) {
    const int depth = words<M>(rows);
    if (hidden && any_non_finite<M>(o.a, depth, columns, columns)) {
      view_.complete_terms(row, rows);
      masked_gemm<Dot, Contiguous::kM, Update::kAdd>(
          columns, vectors, depth, o, [this, rows, lane](int, int k, int v) {
            return bits_of_word<M>(k, rows, [this, lane, v](int i) {
              return view_.sees(i, lane + v * kLanes);
            });
          });
    } else {
      gemm<Dot, Contiguous::kM, Update::kAdd>(columns, vectors, depth, o);
    }
  }

  // S and dP of a panel, in p_ and dp_, become the words of P and dS.
  void gradient_of_panel(int64_t row, int rows, int lane, int vectors, bool hidden) {
    if (!is_plain_) {
      full_gradient(row, rows, lane, vectors);
    } else if (head_.wants_totals) {
      hidden ? plain_gradient<true, true>(row, rows, lane, vectors)
             : plain_gradient<false, true>(row, rows, lane, vectors);
    } else {
      hidden ? plain_gradient<true, false>(row, rows, lane, vectors)
             : plain_gradient<false, false>(row, rows, lane, vectors);
    }
  }

  template <bool kHidden, bool kTotals>
  void plain_gradient(int64_t row, int rows, int lane, int vectors) {
    const PlainGradient<M, kHidden, kTotals> gradient = {head_};
    const auto of_vector = [&](int i, int v, RowSums* sums) {
      const int at = i * kPanel + v * kLanes;
      const Ints visible = kHidden ? view_.in_range(i, lane + v * kLanes) : Ints{};
      return gradient(row + i, load(p_ + at), load(dp_ + at), visible, sums);
    };
    softmax_gradient(row, rows, lane, vectors, gradient, of_vector);
  }

  void full_gradient(int64_t row, int rows, int lane, int vectors) {
    const FullGradient<M> gradient = {head_, dbias_};
    const int64_t key = view_.first_key() + lane;
    for (int i = 0; head_.kept.any() && i < rows; ++i) {
      head_.kept.fill_row(row + i, key, kPanel, kept_ + i * kPanel);
    }
    const auto of_vector = [&](int i, int v, RowSums* sums) {
      const int at = i * kPanel + v * kLanes;
      const bool has_terms = head_.terms.any();
      const int at_key = lane + v * kLanes;
      const Floats term = has_terms ? view_.terms(i, at_key) : Floats{};
      const Ints visible = has_terms ? term != -kInfinity : view_.in_range(i, at_key);
      return gradient(row + i, key + v * kLanes, load(p_ + at), load(dp_ + at), term,
                      visible, (Ints)load(kept_ + at), sums);
    };
    softmax_gradient(row, rows, lane, vectors, gradient, of_vector);
  }

  template <class Kind, class OfVector>
  void softmax_gradient(int64_t row, int rows, int lane, int vectors, const Kind& kind,
                        OfVector of_vector) {
    for (int i = 0; i < rows; i += M::kElements) {
      RowSums sums[M::kElements] = {};
      for (int v = 0; v < vectors; ++v) {
        Floats p[M::kElements], ds[M::kElements];
#pragma GCC unroll 2
        for (int e = 0; e < M::kElements; ++e) {
          if (i + e < rows) {
            const Weights weights = of_vector(i + e, v, &sums[e]);
            p[e] = weights.p;
            ds[e] = weights.ds;
          } else {
            p[e] = ds[e] = Floats{};
          }
        }
        store_words(i, lane, v, p, ds);
      }
      if constexpr (Kind::kSums) {
        for (int e = 0; e < M::kElements && i + e < rows; ++e) {
          kind.add(row + i + e, sums[e]);
        }
      }
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

  // Adds sum_j exp(score - lse) over the block of keys to the total of each row.
  void add_weights(int64_t row, int rows, float* totals) {
    if (!view_.look(row, rows)) return;
    pack_block(row, rows);
    for (int lane = view_.first_lane(); lane < view_.lane_limit(); lane += kPanel) {
      const int vectors = view_.vectors(lane);
      packed_.multiply_panel(rows, lane, vectors, p_, dp_);
      for (int i = 0; i < rows; ++i) {
        Floats total = {};
        for (int v = 0; v < vectors; ++v) {
          const Floats term = view_.terms(i, lane + v * kLanes);
          const Floats score = head_.scores.value(load(p_ + i * kPanel + v * kLanes));
          const Floats weight = exp2((score + term - head_.lse[row + i]) * kLog2E);
          total += bit_and(weight, term != -kInfinity);
        }
        totals[i] += sum(total);
      }
    }
  }

  const BackwardHead<M>& head_;
  const BackwardBlocks& blocks_;
  const DbiasTile* const dbias_;
  const bool is_plain_;  // PlainGradient has all that is wanted
  Arena arena_;
  BlockView<M> view_;
  PackedBlock<M> packed_;
  bool is_packed_ = false;  // the block of keys

  float* p_;        // [rows, kPanel]: S, then P
  float* dp_;       // [rows, kPanel]: dP, then pairs of dS
  float* kept_;     // [rows, kPanel]
  float* ds_rows_;  // [rows, words of keys]
  float* ds_sums_;  // [rows, kLanes]: dS summed over the vectors
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_TASK_H_
