// The first phase: every value that later phases index with is checked, and the live rows are laid out. One block.
//
// A GPU cannot raise: a sequence with something wrong takes no part in the step, is left unchanged, and gets its
// StepError in the ERROR column. Live rows are the rows of segments, compacted over holes; their cache rows are
// L + place among the live rows of their sequence, as on the CPU. Wanted rows are the live ones whose successor is not
// known to be final: they alone go through the head.
#pragma once

#include "common/redraft_check.h"
#include "cuda/program.h"

namespace jacobi::cuda {

JACOBI_GRID Layout layout_of(const StepArgs& a) {
  return {a.cu_seqlens_q, a.segments, a.cu_segments, a.batch, a.rows, a.num_segments};
}

JACOBI_GRID RedraftArgs redraft_args(const Program& p, int32_t b) {
  const StepArgs& a = p.args;
  RedraftArgs r{};
  r.sequence = {a.tokens,
                a.segments,
                a.cu_segments[b],
                a.cu_seqlens_q[b],
                a.cu_seqlens_q[b + 1],
                a.cache_seqlens + b,
                a.text + static_cast<int64_t>(b) * a.text_capacity,
                a.text_capacity,
                a.pool + static_cast<int64_t>(b) * a.pool_rows * (1 + a.pool_width),
                a.pool_rows,
                a.pool_width,
                a.state + static_cast<int64_t>(b) * kStateColumns,
                a.stop_tokens + static_cast<int64_t>(b) * a.num_stop_tokens,
                a.num_stop_tokens};
  r.predictions = p.work.predictions;
  r.accepted_rows = p.work.accepted_rows;
  r.block_size = a.block_size;
  r.blocks = a.blocks;
  r.candidates = a.candidates;
  r.spawn_ratio = a.spawn_ratio;
  return r;
}

JACOBI_GRID int32_t live_rows(const StepArgs& a, int32_t b) {
  int32_t live = 0;
  for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) live += a.segments[s].length;
  return live;
}

// What is wrong with sequence b, but for its tokens and pages; the offsets have been checked.
JACOBI_GRID int32_t error_of(const Program& p, int32_t b) {
  const StepArgs& a = p.args;
  const int32_t* state = a.state + static_cast<int64_t>(b) * kStateColumns;
  if (state[kError] != kNoError) return kDoneBefore;
  if (check_sequence(layout_of(a), b).error != LayoutError::kNone) return kLayoutError;
  if (a.cu_segments[b + 1] - a.cu_segments[b] != 1 + a.candidates) return kLayoutError;
  const int64_t capacity = a.page_table == nullptr ? a.slab_rows : a.max_pages * a.slab_rows;
  const int32_t used = a.cache_seqlens[b], chain = a.segments[a.cu_segments[b]].length;
  if (used < 0 || used + static_cast<int64_t>(live_rows(a, b)) > capacity) return kCacheLengthError;
  if (chain > 0 && (state[kNumFinal] < 1 || state[kNumFinal] > chain)) return kStateError;
  if (chain > 0 && static_cast<int64_t>(used) + state[kNumFinal] > state[kTextLen]) return kCacheLengthError;
  switch (check_redraft(redraft_args(p, b)).error) {
    case RedraftError::kNone:
      return kNoError;
    case RedraftError::kSlots:
    case RedraftError::kSegment:
      return kLayoutError;
    case RedraftError::kCacheSeqlen:
      return kCacheLengthError;
    default:
      return kStateError;
  }
}

// Where everything of each sequence begins. One thread.
JACOBI_GRID void lay_out_rows(const Program& p) {
  const StepArgs& a = p.args;
  const Workspace& w = p.work;
  int32_t live = 0, wanted = 0, units = 0, most_spans = 0;
  for (int32_t b = 0; b < a.batch; ++b) {
    const bool runs = w.error[b] == kNoError;
    w.live_begin[b] = live;
    w.first_unit[b] = units;
    w.length[b] = a.cache_seqlens[b];
    int32_t reach = 0;  // tokens on the longest path
    if (runs)
      for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) {
        const Segment segment = a.segments[s];
        const int32_t end = w.length[b] + path_length_before(a.segments, s) + segment.length;
        const int32_t num_final = a.state[static_cast<int64_t>(b) * kStateColumns + kNumFinal];
        int32_t from = predecessor_row(a.segments, s) >= 0 || num_final < 1 ? 0 : num_final - 1;
        from = from < segment.length ? from : segment.length;
        w.segments[s] = {live, segment.length, segment.parent, segment.visible};
        w.want_from[s] = from;
        w.want_begin[s] = wanted;
        live += segment.length;
        wanted += segment.length - from;
        if (segment.length > 0 && end > reach) reach = end;
      }
    w.spans[b] = (reach + kSpan - 1) / kSpan;
    most_spans = w.spans[b] > most_spans ? w.spans[b] : most_spans;
    units += ((live - w.live_begin[b]) * p.group + kTileRows - 1) / kTileRows * p.kv_heads;
  }
  w.live_begin[a.batch] = live;
  w.first_unit[a.batch] = units;
  w.header[kLiveRows] = live;
  w.header[kWantedRows] = wanted;
  w.header[kUnits] = units;
  w.header[kSpans] = most_spans;
}

template <class Block>
JACOBI_PHASE void plan(Block& block, const Program& p) {
  if (block.index != 0) return;
  const StepArgs& a = p.args;
  const Workspace& w = p.work;
  block.threads([&](int thread) {
    for (int32_t r = thread; r < a.rows; r += kThreads) w.best[r] = 0, w.live_of_slot[r] = w.want_of_slot[r] = -1;
    int32_t index;
    if (thread == 0)
      w.header[0] = partitions(a.cu_seqlens_q, a.batch, a.rows, &index) &&
                    partitions(a.cu_segments, a.batch, a.num_segments, &index);
  });
  block.threads([&](int thread) {
    for (int32_t b = thread; b < a.batch; b += kThreads) {
      const bool before = a.state[static_cast<int64_t>(b) * kStateColumns + kError] != kNoError;
      w.error[b] = w.header[0] != 0 ? error_of(p, b) : before ? kDoneBefore : static_cast<int32_t>(kLayoutError);
    }
  });
  block.threads([&](int thread) {
    for (int32_t b = 0; b < a.batch; ++b) {
      if (w.error[b] != kNoError && w.error[b] != kTokenError) continue;  // another thread may have found the same
      for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s)
        for (int32_t i = thread; i < a.segments[s].length; i += kThreads) {
          const int32_t token = a.tokens[a.segments[s].start + i];
          if (token < 0 || token >= p.vocab) w.error[b] = kTokenError;
        }
    }
  });
  block.threads([&](int thread) {
    if (a.page_table == nullptr) return;
    for (int32_t b = 0; b < a.batch; ++b) {
      if (w.error[b] != kNoError && w.error[b] != kPageTableError) continue;
      const int64_t rows = a.cache_seqlens[b] + static_cast<int64_t>(live_rows(a, b));
      for (int64_t i = thread; i < (rows + a.slab_rows - 1) / a.slab_rows; i += kThreads) {
        const int32_t page = a.page_table[b * a.max_pages + i];
        if (page < 0 || page >= a.slabs) w.error[b] = kPageTableError;
      }
    }
  });
  block.threads([&](int thread) {
    if (thread == 0) lay_out_rows(p);
  });
  block.threads([&](int thread) {
    for (int32_t b = 0; b < a.batch; ++b) {
      if (w.error[b] != kNoError) continue;
      for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) {
        const Segment &from = a.segments[s], &to = w.segments[s];
        const int32_t before = w.length[b] + path_length_before(a.segments, s);
        for (int32_t i = thread; i < from.length; i += kThreads) {
          const int32_t row = to.start + i, slot = from.start + i;
          w.slot[row] = slot;
          w.token[row] = a.tokens[slot];
          w.position[row] = before + i;
          w.segment[row] = s;
          w.sequence[row] = b;
          w.live_of_slot[slot] = row;
          if (i < w.want_from[s]) continue;
          const int32_t want = w.want_begin[s] + i - w.want_from[s];
          w.want_of_slot[slot] = want;
          w.wanted[want] = row;
        }
      }
    }
  });
}

}  // namespace jacobi::cuda
