// Acceptance of one sequence: which query tokens autoregressive decoding would have produced.
//
// y[r] is the model's prediction for the token after query row r. On a path, a token is accepted when
//   - it is among the first num_final tokens of a root segment (one with no query token before it; its first token
//     always is), or
//   - the token before it on the path is accepted and it equals that token's prediction.
// The longest accepted path wins; ties go to the lowest segment index, so to the main chain first. Acceptance of a path
// is a prefix of it, so one number per segment says everything: how many of its own leading tokens are accepted.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "common/layout.h"

namespace jacobi {

struct AcceptArgs {
  const Segment* segments;  // of all sequences; absolute rows and parents
  int32_t first_segment;    // segments of this sequence: [first_segment, end_segment)
  int32_t end_segment;
  int32_t row_begin;  // query rows of this sequence: [row_begin, row_end)
  int32_t row_end;
  const int32_t* tokens;         // [T]
  const int32_t* predictions;    // [T] y
  int32_t num_final;             // leading tokens of a root segment that are final, at least 1
  int32_t* accepted_of_segment;  // scratch [end_segment - first_segment]; on return own accepted tokens per segment
  int32_t* accepted_rows;        // [T] out: [row_begin, row_end) holds the winning path's rows in order, then -1
};

struct AcceptResult {
  int32_t num_accepted;  // tokens on the winning path, 0 when the sequence has no query token
  int32_t winner;        // segment of the last accepted row, counted from first_segment
  bool fixed_point;      // the whole first segment, not empty, is accepted
};

// Leading tokens of `segment` that are accepted, given that everything before them is: rows first .. are compared with
// the prediction of the row before; `before` is the row before the segment (unused for a root), num_final tokens are
// final without a comparison.
inline JACOBI_HD int32_t accepted_run(const Segment& segment, const int32_t* tokens, const int32_t* predictions,
                                      int32_t before, int32_t num_final) {
  int32_t count = num_final < segment.length ? num_final : segment.length;
  while (count < segment.length) {
    const int32_t row = segment.start + count;
    if (tokens[row] != predictions[count ? row - 1 : before]) break;
    ++count;
  }
  return count;
}

inline JACOBI_HD AcceptResult accept_sequence(const AcceptArgs& args) {
  AcceptResult result = {0, 0, false};
  for (int32_t s = args.first_segment; s < args.end_segment; ++s) {
    int32_t* const own = &args.accepted_of_segment[s - args.first_segment];
    int32_t visible;
    const int32_t before = predecessor_segment(args.segments, s, &visible);
    if (before < 0) {
      const int32_t final_tokens = args.num_final > 1 ? args.num_final : 1;
      *own = accepted_run(args.segments[s], args.tokens, args.predictions, -1, final_tokens);
    } else if (args.accepted_of_segment[before - args.first_segment] >= visible) {
      *own =
          accepted_run(args.segments[s], args.tokens, args.predictions, args.segments[before].start + visible - 1, 0);
    } else {
      *own = 0;
    }
    if (*own == 0) continue;  // its accepted path ends in an ancestor, which has been looked at
    const int32_t length = path_length_before(args.segments, s) + *own;
    if (length > result.num_accepted) {
      result.num_accepted = length;
      result.winner = s - args.first_segment;
    }
  }

  int32_t row = args.row_begin;
  if (result.num_accepted > 0) {
    const int32_t s = args.first_segment + result.winner;
    row += gather_path(args.segments, s, args.accepted_rows + row);
    for (int32_t i = 0; i < args.accepted_of_segment[result.winner]; ++i)
      args.accepted_rows[row++] = args.segments[s].start + i;
    const int32_t main_length = args.segments[args.first_segment].length;
    result.fixed_point = main_length > 0 && args.accepted_of_segment[0] == main_length;
  }
  for (; row < args.row_end; ++row) args.accepted_rows[row] = -1;
  return result;
}

}  // namespace jacobi
