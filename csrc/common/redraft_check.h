// Range check of everything that redraft_sequence indexes with, so that a wrong state is an error and no stray write.
#pragma once

#include <cstdint>

#include "common/redraft.h"

namespace jacobi {

enum class RedraftError : int32_t {
  kNone = 0,
  kSlots,    // value: query rows of the sequence
  kSegment,  // value: segment, counted from the main chain
  kTextLen,  // value of the column, as for the next ones
  kPromptLen,
  kMaxLen,
  kActive,
  kBlockFill,
  kPoolNext,
  kPoolStart,
  kDone,
  kNumFinal,
  kNumAccepted,  // value: num_accepted
  kAcceptedRow,  // value: index of the accepted row
  kPrediction,   // value: query row
  kCacheSeqlen,  // value: cache_seqlens
  kPoolLength,   // value: pool row
};

struct RedraftCheck {
  RedraftError error;
  int32_t value;
};

// The layout itself (check_layout) is checked before. O(query rows + pool rows).
inline JACOBI_HD RedraftCheck check_redraft(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  const int32_t* state = q.state;
  const int32_t stride = args.block_size - 1;
  const int64_t slots = q.row_end - q.row_begin;
  if (slots < static_cast<int64_t>(args.blocks) * args.block_size + static_cast<int64_t>(args.candidates) * stride)
    return {RedraftError::kSlots, q.row_end - q.row_begin};
  const int32_t candidate_row = q.row_end - args.candidates * stride;
  for (int32_t s = 0; s <= args.candidates; ++s) {
    const Segment& segment = q.segments[q.first_segment + s];
    const int32_t start = s == 0 ? q.row_begin : candidate_row + (s - 1) * stride;
    const int32_t capacity = s == 0 ? candidate_row - q.row_begin : stride;
    const int32_t parent = s == 0 ? -1 : q.first_segment;
    const bool linked = segment.parent == parent && (segment.length == 0 || segment.visible == (s == 0 ? 0 : 1));
    if (segment.start != start || segment.length > capacity || !linked) return {RedraftError::kSegment, s};
  }

  const int32_t text_len = state[kTextLen];
  const int32_t max_len = state[kMaxLen];
  if (text_len < 1 || text_len > q.text_capacity) return {RedraftError::kTextLen, text_len};
  if (state[kPromptLen] < 1 || state[kPromptLen] > text_len) return {RedraftError::kPromptLen, state[kPromptLen]};
  if (max_len < text_len || max_len > q.text_capacity) return {RedraftError::kMaxLen, max_len};
  if (state[kActive] < 1 || state[kActive] > args.blocks) return {RedraftError::kActive, state[kActive]};
  if (state[kBlockFill] < 0 || state[kBlockFill] >= args.block_size)
    return {RedraftError::kBlockFill, state[kBlockFill]};
  if (state[kPoolNext] < 0 || state[kPoolNext] >= (q.pool_rows > 0 ? q.pool_rows : 1))
    return {RedraftError::kPoolNext, state[kPoolNext]};
  if (state[kPoolStart] < 0 || state[kPoolStart] > text_len) return {RedraftError::kPoolStart, state[kPoolStart]};
  if (state[kDone] < kRunning || state[kDone] > kLength) return {RedraftError::kDone, state[kDone]};
  for (int32_t r = 0; r < q.pool_rows; ++r) {
    const int32_t length = q.pool[static_cast<int64_t>(r) * (1 + q.pool_width)];
    if (length < 0 || length > q.pool_width) return {RedraftError::kPoolLength, r};
  }

  const int32_t accepted = args.num_accepted;
  const int32_t cached = *q.cache_seqlen;
  if (accepted < 0 || accepted > slots) return {RedraftError::kNumAccepted, accepted};
  if (cached < accepted || static_cast<int64_t>(cached) > static_cast<int64_t>(text_len) + accepted)
    return {RedraftError::kCacheSeqlen, cached};
  if (state[kDone] != kRunning) return {RedraftError::kNone, 0};
  const bool prefill = text_len == state[kPromptLen];
  if (accepted == 0) {
    const bool left = prefill ? cached < text_len : cached == text_len - 1;
    return left || text_len >= max_len ? RedraftCheck{RedraftError::kNone, 0}
                                       : RedraftCheck{RedraftError::kCacheSeqlen, cached};
  }
  // What was cached before, with the final tokens of the chain, is a prefix of the text; all of it unless in prefill.
  const int32_t num_final = state[kNumFinal];
  if (num_final < 1 || num_final > accepted || (!prefill && num_final != 1))
    return {RedraftError::kNumFinal, num_final};
  const int32_t known = cached - accepted + num_final;
  if (known > text_len || (known < text_len && (!prefill || accepted != num_final)))
    return {RedraftError::kCacheSeqlen, cached};
  // A path: the first rows of the main chain, or its first one and the first rows of a candidate.
  const int32_t* rows = args.accepted_rows + q.row_begin;
  const int32_t winner = redraft::segment_of_row(args, rows[accepted - 1]);
  for (int32_t i = 0; i < accepted; ++i) {
    const Segment& segment = q.segments[q.first_segment + (i == 0 ? 0 : winner)];
    const int32_t place = i == 0 || winner == 0 ? i : i - 1;
    if (place >= segment.length || rows[i] != segment.start + place) return {RedraftError::kAcceptedRow, i};
  }
  for (int32_t s = 0; s <= args.candidates; ++s) {
    const Segment& segment = q.segments[q.first_segment + s];
    const int32_t from = s == 0 ? num_final - 1 : 0;
    for (int32_t i = from; i < segment.length; ++i)
      if (args.predictions[segment.start + i] < 0) return {RedraftError::kPrediction, segment.start + i};
  }
  return {RedraftError::kNone, 0};
}

}  // namespace jacobi
