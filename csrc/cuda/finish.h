// The last phases: predictions, acceptance, commit, redraft, by the rules of csrc/common.
//
//   accept_all   a block per sequence: the predictions of its slots, then the longest accepted path
//   finish_all   a block per sequence, layer and cache moves the accepted rows to their committed places (none to move
//                when the main chain won); a block per sequence advances the length and drafts the next layout
#pragma once

#include "common/redraft.h"
#include "cuda/head.h"
#include "cuda/plan.h"
#include "cuda/rows.h"

namespace jacobi::cuda {

constexpr int kLine = 32;  // int32 values of a cache line

template <class Block>
JACOBI_PHASE void accept_all(Block& block, const Program& p) {
  const StepArgs& a = p.args;
  const Workspace& w = p.work;
  for (int32_t b = block.index; b < a.batch; b += block.count) {
    int32_t* const state = a.state + static_cast<int64_t>(b) * kStateColumns;
    if (w.error[b] != kNoError) {
      block.threads([&](int thread) {
        if (thread == 0 && w.error[b] != kDoneBefore) state[kError] = w.error[b];
      });
      continue;
    }
    block.threads([&](int thread) {
      for (int32_t slot = a.cu_seqlens_q[b] + thread; slot < a.cu_seqlens_q[b + 1]; slot += kThreads)
        w.predictions[slot] = w.want_of_slot[slot] < 0 ? -1 : token_of(w.best[w.want_of_slot[slot]]);
    });
    block.threads([&](int thread) {
      if (thread != 0) return;
      const AcceptResult result = accept_sequence(
          {a.segments, a.cu_segments[b], a.cu_segments[b + 1], a.cu_seqlens_q[b], a.cu_seqlens_q[b + 1], a.tokens,
           w.predictions, state[kNumFinal], w.accepted_of_segment + a.cu_segments[b], w.accepted_rows});
      w.num_accepted[b] = result.num_accepted;
      w.fixed_point[b] = result.fixed_point;
    });
  }
}

// Moves the accepted rows of one sequence in one layer of one cache. Rows ascend along a path, so ascending copies are
// safe in place; each thread moves its own elements of all rows.
template <class T, class Block>
JACOBI_GRID void commit_rows(Block& block, const Program& p, int32_t b, int64_t layer_offset, T* cache) {
  const StepArgs& a = p.args;
  const Workspace& w = p.work;
  const int32_t* rows = w.accepted_rows + a.cu_seqlens_q[b];
  block.threads_without_barrier([&](int thread) {
    for (int32_t i = 0; i < w.num_accepted[b]; ++i) {
      const int32_t place = w.live_of_slot[rows[i]] - w.live_begin[b];
      if (place == i) continue;
      const T* const from = cache + layer_offset + cache_row(a, b, w.length[b] + place);
      T* const to = cache + layer_offset + cache_row(a, b, w.length[b] + i);
      for (int32_t c = thread; c < p.kv_size; c += kThreads) to[c] = from[c];
    }
  });
}

template <class T, class Block>
JACOBI_PHASE void finish_all(Block& block, const Program& p) {
  const StepArgs& a = p.args;
  const Workspace& w = p.work;
  const int32_t moves = a.batch * p.layers * 2;
  // Drafting takes longest: the first blocks begin with it.
  for (int32_t item = block.index; item < a.batch + moves; item += block.count) {
    const int32_t move = item - a.batch, b = move < 0 ? item : move / (2 * p.layers);
    if (w.error[b] != kNoError) continue;
    if (move >= 0) {
      void* const cache = move % 2 == 0 ? a.k_cache : a.v_cache;
      commit_rows(block, p, b, move / 2 % p.layers * a.layer_stride, static_cast<T*>(cache));
      continue;
    }
    block.threads_without_barrier([&](int thread) {
      RedraftArgs args = redraft_args(p, b);
      const SequenceState& q = args.sequence;
      const int64_t pool = static_cast<int64_t>(q.pool_rows) * (1 + q.pool_width);
      for (int64_t i = thread * kLine; i < q.state[kTextLen]; i += kThreads * kLine) block.prefetch(q.text + i);
      for (int64_t i = thread * kLine; i < pool; i += kThreads * kLine) block.prefetch(q.pool + i);
      if (thread != 0) return;
      args.num_accepted = w.num_accepted[b];
      args.fixed_point = w.fixed_point[b] != 0;
      a.cache_seqlens[b] += args.num_accepted;
      redraft_sequence(args);
    });
  }
}

}  // namespace jacobi::cuda
