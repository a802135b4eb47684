// Where guesses come from: continuations of the latest tokens, found in the sequence's own text and in its pool.
//
// The pool is a ring of rows, int32 [rows, 1 + width]: (length, tokens...). An entry is a run that the model once
// predicted: up to 8 final tokens as context, then a tail that was not accepted. No two rows are equal.
//
// A match is a place where the last k <= 8 tokens of the query occur with at least one token behind them. Recency order
// is: the text from its end; then pool rows newest first, a row's matches from its end. The text comes first because a
// pool row that repeats the context holds what was rejected behind it. A continuation of the text that reaches its end
// goes on at its own start, which extends the period of a text that repeats itself.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace jacobi {

constexpr int32_t kMatchTokens = 8;        // longest context that is compared, and context stored before a pool tail
constexpr int32_t kLookupTokens = 3;       // longest n-gram of prompt lookup
constexpr int32_t kMatchesPerLength = 16;  // latest matches kept for each length when candidates are ranked

// One sequence's final tokens and pool.
struct History {
  const int32_t* text;  // [text_length]
  int32_t text_begin;   // matches lie in text[text_begin:]
  int32_t text_length;
  const int32_t* pool;  // [pool_rows, 1 + pool_width]
  int32_t pool_rows;
  int32_t pool_width;
  int32_t pool_next;  // the row that the next entry will take; the newest is the one before
};

// The final text and the guesses behind it, read as one run.
struct Run {
  const int32_t* text;
  int32_t text_length;
  const int32_t* guesses;
  int32_t num_guesses;

  JACOBI_HD int32_t size() const { return text_length + num_guesses; }
  JACOBI_HD int32_t operator[](int32_t i) const { return i < text_length ? text[i] : guesses[i - text_length]; }
};

// The last tokens of a run, latest first.
struct Suffix {
  int32_t token[kMatchTokens];
  int32_t length;
};

struct Match {
  int32_t source;  // pool row, or -1 for the text
  int32_t end;     // index of the last matched token in the source
  int32_t length;  // matched tokens, 0: no match
};

inline JACOBI_HD Suffix last_tokens(const Run& run) {
  Suffix suffix;
  suffix.length = run.size() < kMatchTokens ? run.size() : kMatchTokens;
  for (int32_t k = 0; k < suffix.length; ++k) suffix.token[k] = run[run.size() - 1 - k];
  return suffix;
}

// Tokens that agree going back from tokens[end], not before tokens[begin].
inline JACOBI_HD int32_t match_length(const int32_t* tokens, int32_t begin, int32_t end, const Suffix& suffix) {
  int32_t k = 0;
  while (k < suffix.length && end - k >= begin && tokens[end - k] == suffix.token[k]) ++k;
  return k;
}

// Sixteen tokens are compared between two branches, so that one thread of a GPU does not wait for each.
constexpr int32_t kScan = 16;

// The last place of `token` in tokens[begin .. end], end included; begin - 1 or less when there is none.
inline JACOBI_HD int32_t last_place(const int32_t* tokens, int32_t begin, int32_t end, int32_t token) {
  for (; end - begin >= kScan; end -= kScan) {
    bool found = false;
    for (int32_t i = 0; i < kScan; ++i) found |= tokens[end - i] == token;
    if (found) break;
  }
  while (end >= begin && tokens[end] != token) --end;
  return end;
}

// The first place of `token` in tokens[begin .. end), or end or more.
inline JACOBI_HD int32_t first_place(const int32_t* tokens, int32_t begin, int32_t end, int32_t token) {
  for (; end - begin >= kScan; begin += kScan) {
    bool found = false;
    for (int32_t i = 0; i < kScan; ++i) found |= tokens[begin + i] == token;
    if (found) break;
  }
  while (begin < end && tokens[begin] != token) ++begin;
  return begin;
}

// Calls visit(match) for every match in recency order until it returns true. Matches in the text end at or before
// text_end.
template <class Visit>
inline JACOBI_HD void for_each_match(const History& history, const Suffix& suffix, int32_t text_end, Visit&& visit) {
  const int32_t last = suffix.token[0];
  for (int32_t end = text_end; (end = last_place(history.text, history.text_begin, end, last)) >= history.text_begin;
       --end)
    if (visit(Match{-1, end, match_length(history.text, history.text_begin, end, suffix)})) return;
  for (int32_t age = 1; age <= history.pool_rows; ++age) {
    const int32_t row = (history.pool_next - age + history.pool_rows) % history.pool_rows;
    const int32_t* entry = history.pool + static_cast<int64_t>(row) * (1 + history.pool_width);
    for (int32_t end = entry[0] - 2; end >= 0; --end)
      if (entry[1 + end] == last && visit(Match{row, end, match_length(entry + 1, 0, end, suffix)})) return;
  }
}

// The longest match, the latest of its length; length 0 when there is none.
inline JACOBI_HD Match best_match(const History& history, const Suffix& suffix, int32_t text_end) {
  Match best = {-1, -1, 0};
  for_each_match(history, suffix, text_end, [&](const Match& match) {
    if (match.length > best.length) best = match;
    return best.length == suffix.length;
  });
  return best;
}

// Prompt lookup's own choice: the first place in the text of its longest final n-gram (n <= 3) that occurs earlier.
inline JACOBI_HD Match prompt_lookup(const History& history, const Suffix& suffix) {
  const int32_t longest = suffix.length < kLookupTokens ? suffix.length : kLookupTokens;
  Match first = {-1, -1, 0};
  const int32_t stop = history.text_length - 1;
  for (int32_t end = history.text_begin; first.length < longest; ++end) {
    end = first_place(history.text, end, stop, suffix.token[0]);
    if (end >= stop) break;
    int32_t length = match_length(history.text, history.text_begin, end, suffix);
    if (length > longest) length = longest;
    if (length > first.length) first = {-1, end, length};
  }
  return first;
}

// Writes up to `limit` tokens that follow the match; returns their number, at least 1 when limit is. `run` is what the
// matched suffix ends; `out` may be the memory right behind run.guesses.
inline JACOBI_HD int32_t copy_continuation(const History& history, const Run& run, const Match& match, int32_t limit,
                                           int32_t* out) {
  if (match.source >= 0) {
    const int32_t* entry = history.pool + static_cast<int64_t>(match.source) * (1 + history.pool_width);
    const int32_t left = entry[0] - (match.end + 1);
    const int32_t count = left < limit ? left : limit;
    for (int32_t i = 0; i < count; ++i) out[i] = entry[1 + match.end + 1 + i];
    return count;
  }
  int32_t from = match.end + 1;
  for (int32_t i = 0; i < limit; ++i) {
    out[i] = run[from];
    if (++from == run.size()) from = match.end + 1;
  }
  return limit;
}

// The latest matches of every length, for ranking: longer first, then by recency.
struct RankedMatches {
  int32_t count[kMatchTokens + 1];
  Match match[kMatchTokens + 1][kMatchesPerLength];
};

inline JACOBI_HD void rank_matches(const History& history, const Suffix& suffix, RankedMatches* ranked) {
  for (int32_t k = 0; k <= kMatchTokens; ++k) ranked->count[k] = 0;
  for_each_match(history, suffix, history.text_length - 2, [&](const Match& match) {
    int32_t& count = ranked->count[match.length];
    if (count < kMatchesPerLength) ranked->match[match.length][count++] = match;
    return false;
  });
}

// Stores (context, tail) as the newest entry unless the tail is empty or an equal entry is there. The tail is cut to
// the row's width. *next is the ring index, advanced when something is stored.
inline JACOBI_HD void store_entry(int32_t* pool, int32_t rows, int32_t width, int32_t* next, const int32_t* context,
                                  int32_t context_length, const int32_t* tail, int32_t tail_length) {
  if (tail_length > width - context_length) tail_length = width - context_length;
  if (tail_length <= 0 || rows == 0) return;
  const int32_t length = context_length + tail_length;
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t* entry = pool + static_cast<int64_t>(r) * (1 + width);
    bool same = entry[0] == length;
    for (int32_t i = 0; same && i < length; ++i)
      same = entry[1 + i] == (i < context_length ? context[i] : tail[i - context_length]);
    if (same) return;
  }
  int32_t* entry = pool + static_cast<int64_t>(*next) * (1 + width);
  entry[0] = length;
  for (int32_t i = 0; i < context_length; ++i) entry[1 + i] = context[i];
  for (int32_t i = 0; i < tail_length; ++i) entry[1 + context_length + i] = tail[i];
  *next = (*next + 1) % rows;
}

}  // namespace jacobi
