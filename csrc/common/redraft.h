// Redraft of one sequence: what one forward pass made final is emitted, then the next query layout is written.
//
//  1 Emission. A text that has max_len tokens already is done and gets no more; with prompt left to prefill nothing is
//    emitted either. Else the newly accepted guesses and the prediction after the last accepted row are appended to the
//    text, up to and with the first stop token, or up to max_len. The cache of a sequence that is done then keeps no
//    token behind the text.
//  2 Pool (decode steps). What the main chain and the losing candidates predicted behind their own accepted part is
//    stored, with up to 8 final tokens in front.
//  3 Blocks (decode steps). Every block_size committed tokens close a block; one is opened, up to `blocks`, when a
//  share
//    of at least spawn_ratio of the last block_size chain tokens did not change.
//  4 Chain. The last final token, then guesses: the winner's predictions behind its accepted part, the main chain's for
//    later positions, the best continuations of text and guesses, and at last the last token again.
//  5 Candidates. Continuations of the final text: prompt lookup's choice, then by longer match and recency. One that is
//    a prefix of the chain or of another candidate is dropped; one that extends a chosen one takes its place.
//
// A sequence that is done gets empty segments; one still in prefill gets the next piece of its prompt as a final chain.
#pragma once

#include <cstdint>

#include "common/accept.h"
#include "common/hd.h"
#include "common/layout.h"
#include "common/pool.h"
#include "common/state.h"

namespace jacobi {

// One sequence of the caller's decode state. Segments: the main chain, then one for each candidate.
struct SequenceState {
  int32_t* tokens;        // [T] of all sequences
  Segment* segments;      // of all sequences
  int32_t first_segment;  // the main chain's
  int32_t row_begin;      // query rows of this sequence: [row_begin, row_end)
  int32_t row_end;
  int32_t* cache_seqlen;  // tokens in the KV cache; commit has advanced it
  int32_t* text;          // [text_capacity]
  int32_t text_capacity;
  int32_t* pool;  // [pool_rows, 1 + pool_width]
  int32_t pool_rows;
  int32_t pool_width;
  int32_t* state;              // [kStateColumns]
  const int32_t* stop_tokens;  // [num_stop_tokens], -1: none
  int32_t num_stop_tokens;
};

struct RedraftArgs {
  SequenceState sequence;
  const int32_t* predictions;    // [T]
  const int32_t* accepted_rows;  // [T]; this sequence's start at row_begin
  int32_t num_accepted;          // 0: only lay out
  bool fixed_point;
  int32_t block_size;
  int32_t blocks;
  int32_t candidates;
  double spawn_ratio;
};

constexpr int32_t kRefillSearches = 4;  // continuations joined to fill the chain before the last token is repeated

namespace redraft {

inline JACOBI_HD int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
inline JACOBI_HD int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

inline JACOBI_HD History history_of(const SequenceState& q) {
  return {q.text, q.state[kPoolStart], q.state[kTextLen], q.pool, q.pool_rows, q.pool_width, q.state[kPoolNext]};
}

// The segment, counted from the main chain, that holds `row`.
inline JACOBI_HD int32_t segment_of_row(const RedraftArgs& args, int32_t row) {
  for (int32_t s = 0; s <= args.candidates; ++s) {
    const Segment& segment = args.sequence.segments[args.sequence.first_segment + s];
    if (row >= segment.start && row - segment.start < segment.length) return s;
  }
  return 0;
}

inline JACOBI_HD void emit(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  const int32_t* rows = args.accepted_rows + q.row_begin;
  int32_t* const state = q.state;
  for (int32_t i = state[kNumFinal]; i <= args.num_accepted && state[kDone] == kRunning; ++i) {
    if (state[kTextLen] >= state[kMaxLen]) break;
    const int32_t token = i < args.num_accepted ? q.tokens[rows[i]] : args.predictions[rows[i - 1]];
    q.text[state[kTextLen]++] = token;
    ++state[kEmitted];
    if (state[kTextLen] == state[kMaxLen]) state[kDone] = kLength;
    for (int32_t j = 0; j < q.num_stop_tokens; ++j)
      if (q.stop_tokens[j] >= 0 && token == q.stop_tokens[j]) state[kDone] = kStopToken;
  }
}

inline JACOBI_HD void feed_pool(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  const int32_t old_length = *q.cache_seqlen - args.num_accepted;
  const Segment& chain = q.segments[q.first_segment];
  const int32_t chain_accepted = accepted_run(chain, q.tokens, args.predictions, -1, 1);
  for (int32_t s = 0; s <= args.candidates; ++s) {
    const Segment& segment = q.segments[q.first_segment + s];
    if (segment.length == 0 || (s > 0 && s == q.state[kWinner])) continue;
    const int32_t accepted =
        s == 0 ? chain_accepted : accepted_run(segment, q.tokens, args.predictions, chain.start, 0);
    // The token after the segment's accepted part is final: it ends the context of what was predicted behind it.
    // Not behind the text, which is shorter when the caller accepted fewer rows than tokens and predictions allow.
    const int32_t context_end = smaller(old_length + (s == 0 ? 0 : 1) + accepted + 1, q.state[kTextLen]);
    const int32_t context_length = smaller(kMatchTokens, context_end);
    store_entry(q.pool, q.pool_rows, q.pool_width, &q.state[kPoolNext], q.text + context_end - context_length,
                context_length, args.predictions + segment.start + accepted, segment.length - accepted);
  }
}

inline JACOBI_HD void update_blocks(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  int32_t* const state = q.state;
  const int32_t n = args.block_size;
  state[kBlockFill] += args.num_accepted;
  for (; state[kBlockFill] >= n; state[kBlockFill] -= n) state[kActive] = larger(1, state[kActive] - 1);

  const Segment& chain = q.segments[q.first_segment];
  if (chain.length < n || state[kActive] >= args.blocks) return;
  int32_t unchanged = 0;
  for (int32_t i = chain.length - n; i < chain.length; ++i)
    unchanged += i == 0 || args.predictions[chain.start + i - 1] == q.tokens[chain.start + i];
  if (static_cast<double>(unchanged) / n >= args.spawn_ratio) ++state[kActive];
}

// Writes the chain over the old one and returns its length.
inline JACOBI_HD int32_t draft_chain(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  const int32_t target = smaller(args.block_size * q.state[kActive], q.state[kMaxLen] - q.state[kTextLen]);
  int32_t* const chain = q.tokens + q.row_begin;
  int32_t count = 0;
  chain[count++] = q.text[q.state[kTextLen] - 1];
  if (args.num_accepted > 0) {
    const Segment& winner = q.segments[q.first_segment + q.state[kWinner]];
    int32_t row = args.accepted_rows[q.row_begin + args.num_accepted - 1] + 1;
    for (; row < winner.start + winner.length && count < target; ++row) chain[count++] = args.predictions[row];
    // Main row i predicts the position num_accepted - 1 before place i of the new chain.
    const Segment& main = q.segments[q.first_segment];
    for (int32_t i = args.num_accepted + count - 1; i < main.length && count < target; ++i)
      chain[count++] = args.predictions[main.start + i];
  }
  const History history = history_of(q);
  for (int32_t search = 0; search < kRefillSearches && count < target; ++search) {
    const Run run = {history.text, history.text_length, chain + 1, count - 1};
    const int32_t text_end = smaller(history.text_length - 1, run.size() - 2);
    const Match match = best_match(history, last_tokens(run), text_end);
    if (match.length == 0) break;
    count += copy_continuation(history, run, match, target - count, chain + count);
  }
  for (; count < target; ++count) chain[count] = chain[count - 1];
  return count;
}

inline JACOBI_HD bool is_prefix(const int32_t* prefix, int32_t length, const int32_t* of, int32_t of_length) {
  if (length > of_length) return false;
  for (int32_t i = 0; i < length; ++i)
    if (prefix[i] != of[i]) return false;
  return true;
}

// The candidates chosen so far, in their query rows.
struct Chosen {
  const SequenceState* sequence;
  int32_t first_row;  // of candidate 0
  int32_t stride;     // rows of one candidate
  int32_t limit;      // most tokens of one
  int32_t count;
  int32_t chain_length;

  JACOBI_HD Segment& segment(int32_t c) const { return sequence->segments[sequence->first_segment + 1 + c]; }
  JACOBI_HD int32_t* tokens(int32_t c) const { return sequence->tokens + first_row + c * stride; }
};

// Adds the continuation of `match` unless it says nothing new.
inline JACOBI_HD void choose(const History& history, const Match& match, Chosen* chosen) {
  const int32_t slot = chosen->count;
  int32_t* const tokens = chosen->tokens(slot);
  const Run run = {history.text, history.text_length, nullptr, 0};
  const int32_t length = copy_continuation(history, run, match, chosen->limit, tokens);
  const int32_t* chain = chosen->sequence->tokens + chosen->sequence->row_begin;
  if (is_prefix(tokens, length, chain + 1, chosen->chain_length - 1)) return;
  for (int32_t c = 0; c < slot; ++c) {
    Segment& other = chosen->segment(c);
    if (is_prefix(tokens, length, chosen->tokens(c), other.length)) return;
    if (is_prefix(chosen->tokens(c), other.length, tokens, length)) {
      for (int32_t i = other.length; i < length; ++i) chosen->tokens(c)[i] = tokens[i];
      other.length = length;
      return;
    }
  }
  chosen->segment(slot).length = length;
  ++chosen->count;
}

inline JACOBI_HD void draft_candidates(const RedraftArgs& args, Chosen* chosen) {
  const SequenceState& q = args.sequence;
  if (args.candidates == 0 || chosen->limit <= 0) return;
  const History history = history_of(q);
  const Suffix suffix = last_tokens({history.text, history.text_length, nullptr, 0});
  if (history.text_begin == 0) {
    const Match match = prompt_lookup(history, suffix);
    if (match.length > 0) choose(history, match, chosen);
  }
  if (chosen->count == args.candidates) return;
  RankedMatches ranked;
  rank_matches(history, suffix, &ranked);
  for (int32_t k = kMatchTokens; k > 0; --k)
    for (int32_t i = 0; i < ranked.count[k] && chosen->count < args.candidates; ++i)
      choose(history, ranked.match[k][i], chosen);
}

// Segments of fixed starts: the chain of the given length and empty candidates.
inline JACOBI_HD void lay_out(const RedraftArgs& args, int32_t chain_length, int32_t first_candidate_row) {
  const SequenceState& q = args.sequence;
  q.segments[q.first_segment] = {q.row_begin, chain_length, -1, 0};
  for (int32_t c = 0; c < args.candidates; ++c)
    q.segments[q.first_segment + 1 + c] = {first_candidate_row + c * (args.block_size - 1), 0, q.first_segment,
                                           chain_length > 0 ? 1 : 0};
}

}  // namespace redraft

inline JACOBI_HD void redraft_sequence(const RedraftArgs& args) {
  const SequenceState& q = args.sequence;
  int32_t* const state = q.state;
  const int32_t stride = args.block_size - 1;
  const int32_t first_candidate_row = q.row_end - args.candidates * stride;

  state[kAccepted] = args.num_accepted;
  state[kFixedPoint] = args.fixed_point;
  state[kEmitted] = 0;
  state[kWinner] = 0;
  if (state[kDone] == kRunning && state[kTextLen] >= state[kMaxLen]) state[kDone] = kLength;
  if (state[kDone] == kRunning && args.num_accepted > 0) {
    state[kWinner] = redraft::segment_of_row(args, args.accepted_rows[q.row_begin + args.num_accepted - 1]);
    const bool decode = state[kTextLen] > state[kPromptLen];
    if (*q.cache_seqlen >= state[kTextLen]) redraft::emit(args);
    if (decode && state[kDone] == kRunning) {
      redraft::feed_pool(args);
      redraft::update_blocks(args);
    }
  }

  if (state[kDone] != kRunning) {
    *q.cache_seqlen = redraft::smaller(*q.cache_seqlen, state[kTextLen]);
    state[kNumFinal] = 1;
    redraft::lay_out(args, 0, first_candidate_row);
    return;
  }
  if (*q.cache_seqlen < state[kTextLen] && state[kTextLen] == state[kPromptLen]) {
    const int32_t left = state[kTextLen] - *q.cache_seqlen;
    const int32_t length = redraft::smaller(first_candidate_row - q.row_begin, left);
    for (int32_t i = 0; i < length; ++i) q.tokens[q.row_begin + i] = q.text[*q.cache_seqlen + i];
    state[kNumFinal] = length;
    redraft::lay_out(args, length, first_candidate_row);
    return;
  }
  state[kNumFinal] = 1;
  const int32_t chain_length = redraft::draft_chain(args);
  redraft::lay_out(args, chain_length, first_candidate_row);
  const int32_t limit = redraft::smaller(stride, state[kMaxLen] - state[kTextLen] - 1);
  redraft::Chosen chosen = {&q, first_candidate_row, stride, limit, 0, chain_length};
  redraft::draft_candidates(args, &chosen);
}

}  // namespace jacobi
