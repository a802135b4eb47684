// Checks of the decode state that redraft and multi_block_step share, and the words for what is wrong with it.
#pragma once

#include <cstdint>

#include "common/redraft.h"
#include "common/redraft_check.h"
#include "ops/checks.h"

namespace jacobi::ops {

struct DecodeStateView {
  int32_t* text;
  int32_t text_capacity;
  int32_t* pool;
  int32_t pool_rows;
  int32_t pool_width;
  int32_t* state;
  const int32_t* stop_tokens;
  int32_t num_stop_tokens;
};

inline DecodeStateView checked_decode_state(const char* op, int64_t batch, const Tensor& text, const Tensor& pool,
                                            const Tensor& state, const Tensor& stop_tokens) {
  check_int32(text, op, "text", "[B, text_capacity]", {batch, kAny});
  check_int32(pool, op, "pool", "[B, pool_rows, 1 + width]", {batch, kAny, kAny});
  if (pool.size(2) < 1) fail(op, "pool must have shape [B, pool_rows, 1 + width], got ", shape_string(pool));
  check_int32(state, op, "state", "[B, 16]", {batch, kStateColumns});
  check_int32(stop_tokens, op, "stop_tokens", "[B, stops]", {batch, kAny});
  return {mutable_int32_data(text),
          narrow_size(text.size(1), op, "text_capacity"),
          mutable_int32_data(pool),
          narrow_size(pool.size(1), op, "pool_rows"),
          narrow_size(pool.size(2) - 1, op, "pool width"),
          mutable_int32_data(state),
          int32_data(stop_tokens),
          narrow_size(stop_tokens.size(1), op, "number of stop tokens")};
}

inline void check_draft_options(const char* op, int64_t block_size, int64_t blocks, int64_t candidates,
                                double spawn_ratio) {
  constexpr int64_t kMost = 1 << 20;
  check_value(block_size >= 1 && block_size <= kMost, op, "block_size", block_size, "within 1..2^20");
  check_value(blocks >= 1 && blocks <= kMost, op, "blocks", blocks, "within 1..2^20");
  check_value(candidates >= 0 && candidates <= kMost, op, "candidates", candidates, "within 0..2^20");
  if (!(spawn_ratio >= 0.0 && spawn_ratio <= 1.0)) fail(op, "spawn_ratio must be within 0..1, got ", spawn_ratio);
}

inline SequenceState sequence_state(const DecodeStateView& view, const Layout& layout, int32_t b, int32_t* tokens,
                                    int32_t* cache_seqlens) {
  return {tokens,
          const_cast<Segment*>(layout.segments),  // the segments tensor is declared mutable by the ops that draft
          layout.cu_segments[b],
          layout.cu_seqlens_q[b],
          layout.cu_seqlens_q[b + 1],
          cache_seqlens + b,
          view.text + int64_t{b} * view.text_capacity,
          view.text_capacity,
          view.pool + int64_t{b} * view.pool_rows * (1 + view.pool_width),
          view.pool_rows,
          view.pool_width,
          view.state + int64_t{b} * kStateColumns,
          view.stop_tokens + int64_t{b} * view.num_stop_tokens,
          view.num_stop_tokens};
}

template <class... Parts>
[[noreturn]] void fail_column(const char* op, int32_t b, int32_t value, const char* column, const Parts&... expected) {
  fail(op, "state[", b, ", ", column, "] must be ", expected..., ", got ", value);
}

[[noreturn]] inline void fail_redraft(const char* op, int32_t b, const RedraftArgs& args, const RedraftCheck& check) {
  const SequenceState& q = args.sequence;
  switch (check.error) {
    case RedraftError::kSlots:
      fail(op, "cu_seqlens_q must give sequence ", b,
           " at least blocks * block_size + candidates * (block_size - 1) = ",
           int64_t{args.blocks} * args.block_size + int64_t{args.candidates} * (args.block_size - 1),
           " query rows, got ", check.value);
    case RedraftError::kSegment: {
      const Segment s = q.segments[q.first_segment + check.value];
      fail(op, "segments[", q.first_segment + check.value, "] = (start ", s.start, ", length ", s.length, ", parent ",
           s.parent, ", visible ", s.visible, ") is not ", check.value ? "candidate " : "the main chain",
           check.value ? std::to_string(check.value - 1) : "", " of sequence ", b, " as redraft lays it out");
    }
    case RedraftError::kTextLen:
      fail_column(op, b, check.value, "TEXT_LEN", "within 1..text_capacity = ", q.text_capacity);
    case RedraftError::kPromptLen:
      fail_column(op, b, check.value, "PROMPT_LEN", "within 1..TEXT_LEN = ", q.state[kTextLen]);
    case RedraftError::kMaxLen:
      fail_column(op, b, check.value, "MAX_LEN", "within TEXT_LEN..text_capacity = ", q.state[kTextLen], "..",
                  q.text_capacity);
    case RedraftError::kActive:
      fail_column(op, b, check.value, "ACTIVE", "within 1..blocks = ", args.blocks);
    case RedraftError::kBlockFill:
      fail_column(op, b, check.value, "BLOCK_FILL", "within 0..block_size - 1 = ", args.block_size - 1);
    case RedraftError::kPoolNext:
      fail_column(op, b, check.value, "POOL_NEXT", "a row of the pool (", q.pool_rows, " rows)");
    case RedraftError::kPoolStart:
      fail_column(op, b, check.value, "POOL_START", "within 0..TEXT_LEN = ", q.state[kTextLen]);
    case RedraftError::kDone:
      fail_column(op, b, check.value, "DONE", "0, 1 or 2");
    case RedraftError::kNumFinal:
      fail_column(op, b, check.value, "NUM_FINAL", "1 in decode and within 1..num_accepted = ", args.num_accepted,
                  " in prefill");
    case RedraftError::kNumAccepted:
      fail(op, "num_accepted[", b, "] must be within 0..", q.row_end - q.row_begin,
           " (the query rows of its sequence), got ", check.value);
    case RedraftError::kAcceptedRow:
      fail(op, "accepted_rows[", q.row_begin + check.value,
           "] must ascend along the main chain, or from its first row along one candidate, of sequence ", b, ", got ",
           args.accepted_rows[q.row_begin + check.value]);
    case RedraftError::kPrediction:
      fail(op, "predictions[", check.value, "] must be a token, got ", args.predictions[check.value]);
    case RedraftError::kPoolLength:
      fail(op, "pool[", b, ", ", check.value, ", 0] must be a length within 0..", q.pool_width, ", got ",
           q.pool[int64_t{check.value} * (1 + q.pool_width)]);
    default:
      fail(op, "cache_seqlens[", b, "] = ", check.value, " does not agree with num_accepted = ", args.num_accepted,
           ", NUM_FINAL = ", q.state[kNumFinal], " and TEXT_LEN = ", q.state[kTextLen],
           ": commit must have added num_accepted to it");
  }
}

}  // namespace jacobi::ops
