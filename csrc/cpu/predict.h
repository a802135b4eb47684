// Predictions of one pass: which rows need one, the head over threads, the sampler of each row. Then acceptance.
// Memory: scratch from the caller's arena; the logits of a row exist only for top-k or top-p, in the caller's scratch
// rows.
#pragma once

#include "common/accept.h"
#include "cpu/arena.h"
#include "cpu/kernels.h"
#include "cpu/team.h"

namespace jacobi::cpu {

struct Head {
  const void* weight;  // packed [vocab, hidden]
  WeightType weight_type;
  const void* bias;  // [vocab] or null
  DType bias_type;
  int64_t vocab, hidden;
  float scale, softcap;
};

// One value per sequence; null: the default of Sampler for all.
struct Sampling {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const int64_t* seeds;

  Sampler of(int64_t sequence, int32_t position) const {
    Sampler s;
    if (temperature != nullptr) s.temperature = temperature[sequence];
    if (top_k != nullptr) s.top_k = top_k[sequence];
    if (top_p != nullptr) s.top_p = top_p[sequence];
    if (seeds != nullptr) s.seed = static_cast<uint64_t>(seeds[sequence]);
    s.position = position;
    return s;
  }
};

struct VerifyArgs {
  const void* hidden;  // [rows, hidden] of hidden_type
  DType hidden_type;
  Layout layout;
  const int32_t* tokens;     // [rows]
  const int32_t* num_final;  // stride between sequences, or null: 1 each
  int64_t num_final_stride;
  const int32_t* cache_seqlens;  // [batch]
  Sampling sampling;
  float* logits_scratch;  // [scratch_rows, vocab] or null
  int64_t scratch_rows;
  int32_t* predictions;    // [rows] out
  int32_t* accepted_rows;  // [rows] out
  int32_t* num_accepted;   // [batch] out
  int32_t* winner;         // [batch] out, counted from the sequence's first segment
  bool* fixed_point;       // [batch] out
};

// Logits of `rows` rows (float, contiguous) into scratch, then one filtered sample each.
inline void sample_filtered_rows(const Head& head, const float* x, int64_t rows, const Sampler* samplers, float* logits,
                                 int32_t* order, int32_t* tokens, Team& team) {
  const LinearArgs args{x,         head.hidden,    rows,   head.hidden, head.vocab, head.weight, head.weight_type,
                        head.bias, head.bias_type, logits, DType::f32,  head.vocab, false};
  team.split((head.vocab + 15) / 16, [&](int64_t begin, int64_t end) { kernels().linear(args, begin, end); });
  team.split(rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = logits + r * head.vocab;
      kernels().logit_transform(row, head.vocab, head.scale, head.softcap);
      tokens[r] = kernels().filtered_sample(samplers[r], row, order + r * head.vocab, head.vocab);
    }
  });
}

// Tokens of `rows` gathered rows. Rows with top-k or top-p must come last, from `plain` on.
// best: HeadBest [team.size(), plain].
inline void predict_rows(const Head& head, const float* x, int64_t rows, int64_t plain, const Sampler* samplers,
                         float* scratch, int64_t scratch_rows, HeadBest* best, int32_t* tokens, Team& team) {
  if (plain > 0) {
    const HeadArgs args{x,         plain,          head.hidden, head.vocab,   head.weight, head.weight_type,
                        head.bias, head.bias_type, head.scale,  head.softcap, samplers};
    head_init(best + team.rank() * plain, plain);
    team.split((head.vocab + 15) / 16,
               [&](int64_t begin, int64_t end) { kernels().head(args, best + team.rank() * plain, begin, end); });
    team.single([&] { kernels().head_finish(best, team.size(), plain, tokens); });
  }
  const int64_t batch = scratch_rows / 2;  // one scratch row for the logits, one for the order of tokens
  for (int64_t row = plain; row < rows; row += batch) {
    const int64_t count = rows - row < batch ? rows - row : batch;
    sample_filtered_rows(head, x + row * head.hidden, count, samplers + row, scratch,
                         reinterpret_cast<int32_t*>(scratch + batch * head.vocab), tokens + row, team);
  }
}

// True when the prediction after token `index` of `segment` is wanted: its successor is not known to be final.
inline bool needs_prediction(const Layout& layout, int32_t segment, int32_t index, int32_t num_final) {
  return index >= num_final - 1 || predecessor_row(layout.segments, segment) >= 0;
}

// The rows that need a prediction.
struct Wanted {
  int64_t rows, plain;  // those with top-k or top-p come last, from `plain` on
};

inline Wanted gather_wanted(const VerifyArgs& a, int32_t* row_of, Sampler* samplers) {
  const Layout& layout = a.layout;
  Wanted wanted{0, 0};
  for (int pass = 0; pass < 2; ++pass) {
    const bool filtered = pass == 1;
    for (int32_t b = 0; b < layout.batch; ++b) {
      const int32_t num_final = a.num_final != nullptr ? a.num_final[b * a.num_final_stride] : 1;
      if (a.sampling.of(b, 0).filtered() != filtered) continue;
      for (int32_t s = layout.cu_segments[b]; s < layout.cu_segments[b + 1]; ++s) {
        const Segment& segment = layout.segments[s];
        const int32_t before = a.cache_seqlens[b] + path_length_before(layout.segments, s);
        for (int32_t i = 0; i < segment.length; ++i) {
          if (!needs_prediction(layout, s, i, num_final)) continue;
          samplers[wanted.rows] = a.sampling.of(b, before + i + 1);
          row_of[wanted.rows++] = segment.start + i;
        }
      }
    }
    if (!filtered) wanted.plain = wanted.rows;
  }
  return wanted;
}

// Predictions of every live row that needs one, -1 elsewhere; then the longest accepted path of every sequence. Called
// by all of a team, each with its own copy of `arena`.
inline void verify(const Head& head, const VerifyArgs& a, Arena& arena, Team& team) {
  const Layout& layout = a.layout;
  int32_t* row_of = arena.take<int32_t>(layout.rows);
  int32_t* tokens = arena.take<int32_t>(layout.rows);
  int32_t* accepted_of_segment = arena.take<int32_t>(layout.num_segments);
  Sampler* samplers = arena.take<Sampler>(layout.rows);
  float* x = arena.take<float>(layout.rows * head.hidden);
  Wanted* wanted = arena.take<Wanted>(1);
  HeadBest* best = arena.take<HeadBest>(team.most() * layout.rows);
  if (best == nullptr) return;  // only counting, or too small
  team.single([&] {
    for (int32_t r = 0; r < layout.rows; ++r) a.predictions[r] = -1;
    *wanted = gather_wanted(a, row_of, samplers);
  });
  const int64_t width = head.hidden * size_of(a.hidden_type), rows = wanted->rows;
  team.split(rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels().widen(static_cast<const char*>(a.hidden) + row_of[i] * width, a.hidden_type, x + i * head.hidden,
                      head.hidden);
  });
  predict_rows(head, x, rows, wanted->plain, samplers, a.logits_scratch, a.scratch_rows, best, tokens, team);
  team.single([&] {
    for (int64_t i = 0; i < rows; ++i) a.predictions[row_of[i]] = tokens[i];
    for (int32_t b = 0; b < layout.batch; ++b) {
      const int32_t first = layout.cu_segments[b];
      const AcceptResult result = accept_sequence(
          {layout.segments, first, layout.cu_segments[b + 1], layout.cu_seqlens_q[b], layout.cu_seqlens_q[b + 1],
           a.tokens, a.predictions, a.num_final != nullptr ? a.num_final[b * a.num_final_stride] : 1,
           accepted_of_segment + first, a.accepted_rows});
      a.num_accepted[b] = result.num_accepted;
      a.winner[b] = result.winner;
      a.fixed_point[b] = result.fixed_point;
    }
  });
}

}  // namespace jacobi::cpu
