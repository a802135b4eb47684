// multi_block_step on the CPU: one decode step of a Llama-like transformer over the live query rows.
//
//   x = embedding; per layer: x += attention_out(attention(rope(qkv(norm(x))))), x += down(silu(gate(norm(x)))
//   up(norm(x))) predictions = head(norm(x)); acceptance; commit; redraft
//
// Activations are float32 whatever the weights are; keys and values are rounded to the type of the cache. Holes of the
// layout cost nothing: the rows are compacted first, and the cache slot of a row is its place among the live rows.
// Scratch comes from the caller's workspace (Arena); counting and running walk the same code.
#pragma once

#include <math.h>

#include "common/redraft.h"
#include "cpu/append.h"
#include "cpu/attention_run.h"
#include "cpu/commit.h"
#include "cpu/phase_clock.h"
#include "cpu/step_model.h"

namespace jacobi::cpu {

// Key and value caches of all layers. Strides in elements; a page or a sequence is one slab.
struct StepCache {
  void *k, *v;
  DType type;
  int64_t layer_stride, slab_stride, row_stride;
  const int32_t* page_table;  // [batch, max_pages] or null
  int64_t max_pages, page_size;
  int32_t* seqlens;  // [batch]
};

struct StepArgs {
  Layout layout;             // fixed slots with holes
  const int32_t* tokens;     // [rows]
  const int32_t* num_final;  // first sequence's, stride kStateColumns
  StepCache cache;
  Sampling sampling;
  float* logits_scratch;
  int64_t scratch_rows;
};

// What redraft needs, in the fixed slots.
struct StepResult {
  int32_t *predictions, *accepted_rows;  // [rows]
  int32_t* num_accepted;                 // [batch]
  bool* fixed_point;                     // [batch]
};

// The live rows of a layout, renumbered without holes.
struct LiveRows {
  Layout layout;
  int32_t *slot, *token, *position;  // [live]: row of the fixed layout, token, position on its path
  int64_t count = 0;
};

inline LiveRows compact(const StepArgs& a, Arena& arena) {
  const Layout& from = a.layout;
  LiveRows live;
  live.slot = arena.take<int32_t>(from.rows);
  live.token = arena.take<int32_t>(from.rows);
  live.position = arena.take<int32_t>(from.rows);
  int32_t* cu_seqlens_q = arena.take<int32_t>(from.batch + 1);
  Segment* segments = arena.take<Segment>(from.num_segments);
  live.layout = {cu_seqlens_q, segments, from.cu_segments, from.batch, from.rows, from.num_segments};
  if (segments == nullptr) return live;
  cu_seqlens_q[0] = 0;
  for (int32_t b = 0; b < from.batch; ++b) {
    for (int32_t s = from.cu_segments[b]; s < from.cu_segments[b + 1]; ++s) {
      const Segment& segment = from.segments[s];
      const int32_t before = a.cache.seqlens[b] + path_length_before(from.segments, s);
      segments[s] = {static_cast<int32_t>(live.count), segment.length, segment.parent, segment.visible};
      for (int32_t i = 0; i < segment.length; ++i) {
        live.slot[live.count] = segment.start + i;
        live.token[live.count] = a.tokens[segment.start + i];
        live.position[live.count++] = before + i;
      }
    }
    cu_seqlens_q[b + 1] = static_cast<int32_t>(live.count);
  }
  live.layout.rows = static_cast<int32_t>(live.count);
  return live;
}

// y = x W^T + bias, everything float but the weights
inline void run_linear(const float* x, int64_t rows, int64_t k, const void* w, DType w_type, const float* bias,
                       float* y, int64_t n) {
  const LinearArgs args{x, k, rows, k, n, w, w_type, bias, DType::f32, y, DType::f32, n};
  parallel_for((n + 15) / 16, 1 + 8192 / k, [&](int64_t begin, int64_t end) { kernels().linear(args, begin, end); });
}

inline void run_norm(const float* x, const float* weight, float eps, float* y, int64_t rows, int64_t n) {
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernels().rms_norm(x + r * n, weight, DType::f32, eps, y + r * n, n);
  });
}

// cos and sin of every live row's angles. The angle is a float32 product, as in the models' own code.
inline void rotary_table(const StepModel& m, const LiveRows& live, float* cosine, float* sine) {
  const int64_t half = m.rope_dim() / 2;
  parallel_for(live.count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(live.position[r]) * m.inv_freq()[i];
        cosine[r * half + i] = static_cast<float>(cos(static_cast<double>(angle))) * m.rope_scale();
        sine[r * half + i] = static_cast<float>(sin(static_cast<double>(angle))) * m.rope_scale();
      }
  });
}

// Rotates one head in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves of the rotated dimensions.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + half] = second * cosine[i] + first * sine[i];
  }
}

// Norms of q and k per head, then rotation, in the rows of qkv.
inline void prepare_heads(const StepModel& m, const StepLayer& layer, float* qkv, int64_t rows, const float* cosine,
                          const float* sine) {
  const int64_t dim = m.head_dim(), half = m.rope_dim() / 2, heads = m.heads() + m.kv_heads();
  parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < heads; ++h) {
        float* x = qkv + r * m.qkv_size() + h * dim;
        const float* norm = h < m.heads() ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) kernels().rms_norm(x, norm, DType::f32, m.norm_eps(), x, dim);
        if (layer.use_rope) rotate(x, cosine + r * half, sine + r * half, half);
      }
  });
}

// The attention call of one layer, over its slice of the cache.
inline AttentionArgs attention_args(const StepModel& m, const StepLayer& layer, int64_t index, const StepArgs& a,
                                    const Layout& layout, const float* qkv, float* out) {
  const StepCache& c = a.cache;
  const int64_t offset = index * c.layer_stride * size_of(c.type);
  AttentionArgs args{};
  args.q = qkv;
  args.q_type = DType::f32;
  args.q_stride = m.qkv_size();
  args.out = out;
  args.out_type = DType::f32;
  args.out_stride = m.q_size();
  args.k = static_cast<char*>(c.k) + offset;
  args.v = static_cast<char*>(c.v) + offset;
  args.kv_type = c.type;
  args.kv_batch_stride = args.kv_page_stride = c.slab_stride;
  args.kv_row_stride = c.row_stride;
  args.kv_head_stride = m.head_dim();
  args.page_table = c.page_table;
  args.max_pages = c.max_pages;
  args.page_size = c.page_size;
  args.cache_seqlens = c.seqlens;
  args.cu_seqlens_q = layout.cu_seqlens_q;
  args.segments = layout.segments;
  args.cu_segments = layout.cu_segments;
  args.batch = layout.batch;
  args.heads = m.heads();
  args.kv_heads = m.kv_heads();
  args.head_dim = m.head_dim();
  args.rows = layout.rows;
  args.scale = m.softmax_scale();
  args.window = layer.window;
  args.leave_holes = true;
  return args;
}

inline void append_and_attend(const StepModel& m, const StepLayer& layer, int64_t index, const StepArgs& a,
                              const LiveRows& live, const float* qkv, float* out, void* workspace) {
  const AttentionArgs args = attention_args(m, layer, index, a, live.layout, qkv, out);
  const NewRows rows{qkv + m.q_size(), qkv + m.q_size() + m.kv_size(), DType::f32, m.qkv_size(), m.qkv_size()};
  append_kv(args, rows, const_cast<void*>(args.k), const_cast<void*>(args.v));
  run_attention(args, workspace);
}

// Final hidden states of the live rows into x [rows, hidden]. While counting, layout.rows is the number of slots.
inline void forward(const StepModel& m, const StepArgs& a, const LiveRows& live, float* x, Arena& arena) {
  const int64_t rows = live.layout.rows, hidden = m.hidden(), ffn = m.ffn();
  const DType type = m.weight_type();
  float* normed = arena.take<float>(rows * hidden);
  float* qkv = arena.take<float>(rows * m.qkv_size());
  float* heads = arena.take<float>(rows * m.q_size());
  float* gate_up = arena.take<float>(rows * 2 * ffn);
  float* product = arena.take<float>(rows * ffn);
  float* cosine = arena.take<float>(rows * m.rope_dim() / 2);
  float* sine = arena.take<float>(rows * m.rope_dim() / 2);
  char* attention = arena.take<char>(
      attention_workspace(attention_args(m, StepLayer{}, 0, a, live.layout, nullptr, nullptr), thread_count()));
  if (attention == nullptr) return;

  for (int64_t r = 0; r < rows; ++r) m.embed(live.token[r], x + r * hidden);
  rotary_table(m, live, cosine, sine);
  PhaseClock clock;
  for (int64_t i = 0; i < m.layers(); ++i) {
    const StepLayer layer = m.layer(i);
    run_norm(x, layer.attention_norm, m.norm_eps(), normed, rows, hidden);
    clock.charge(kNormRope);
    run_linear(normed, rows, hidden, layer.qkv, type, layer.qkv_bias, qkv, m.qkv_size());
    clock.charge(kLinear);
    prepare_heads(m, layer, qkv, rows, cosine, sine);
    clock.charge(kNormRope);
    append_and_attend(m, layer, i, a, live, qkv, heads, attention);
    clock.charge(kAttention);
    run_linear(heads, rows, m.q_size(), layer.attention_out, type, layer.attention_out_bias, normed, hidden);
    clock.charge(kLinear);
    kernels().add(normed, x, rows * hidden);
    run_norm(x, layer.ffn_norm, m.norm_eps(), normed, rows, hidden);
    clock.charge(kNormRope);
    run_linear(normed, rows, hidden, layer.gate_up, type, layer.gate_up_bias, gate_up, 2 * ffn);
    clock.charge(kLinear);
    parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        kernels().silu_mul(gate_up + r * 2 * ffn, gate_up + r * 2 * ffn + ffn, product + r * ffn, ffn);
    });
    clock.charge(kActivation);
    run_linear(product, rows, ffn, layer.down, type, layer.down_bias, normed, hidden);
    clock.charge(kLinear);
    kernels().add(normed, x, rows * hidden);
  }
  run_norm(x, m.final_norm(), m.norm_eps(), x, rows, hidden);
}

// Moves the accepted rows of every sequence and advances its length.
inline void commit_all(const StepModel& m, const StepCache& c, const LiveRows& live, const int32_t* accepted_rows,
                       const int32_t* num_accepted) {
  const int64_t width = size_of(c.type);
  const auto view = [&](void* data) {
    return CacheView{static_cast<char*>(data), c.layer_stride * width, c.slab_stride * width, c.row_stride * width};
  };
  for (int32_t b = 0; b < live.layout.batch; ++b) {
    const int32_t begin = live.layout.cu_seqlens_q[b];
    commit_sequence({view(c.k), view(c.v), static_cast<int32_t>(m.layers()), m.kv_size() * width, b,
                     c.page_table == nullptr ? nullptr : c.page_table + b * c.max_pages,
                     static_cast<int32_t>(c.page_size), c.seqlens[b], accepted_rows + begin, num_accepted[b], begin});
    c.seqlens[b] += num_accepted[b];
  }
}

// Everything but redraft. With an arena that only counts, nothing is read or written.
inline StepResult evaluate(const StepModel& m, const StepArgs& a, Arena& arena) {
  const int32_t slots = a.layout.rows, batch = a.layout.batch;
  const StepResult result{arena.take<int32_t>(slots), arena.take<int32_t>(slots), arena.take<int32_t>(batch),
                          arena.take<bool>(batch)};
  int32_t* predictions = arena.take<int32_t>(slots);
  int32_t* accepted_rows = arena.take<int32_t>(slots);
  int32_t* winner = arena.take<int32_t>(batch);
  const LiveRows live = compact(a, arena);
  float* x = arena.take<float>(live.layout.rows * m.hidden());
  forward(m, a, live, x, arena);
  const VerifyArgs args{x,
                        DType::f32,
                        live.layout,
                        live.token,
                        a.num_final,
                        kStateColumns,
                        a.cache.seqlens,
                        a.sampling,
                        a.logits_scratch,
                        a.scratch_rows,
                        predictions,
                        accepted_rows,
                        result.num_accepted,
                        winner,
                        result.fixed_point};
  PhaseClock clock;
  verify(m.head(), args, arena);
  clock.charge(kVerify);
  if (winner == nullptr || arena.overflowed()) return result;
  commit_all(m, a.cache, live, accepted_rows, result.num_accepted);

  clock.charge(kCommit);
  for (int32_t r = 0; r < slots; ++r) result.predictions[r] = result.accepted_rows[r] = -1;
  for (int64_t r = 0; r < live.count; ++r) result.predictions[live.slot[r]] = predictions[r];
  for (int32_t b = 0; b < batch; ++b)
    for (int32_t i = 0; i < result.num_accepted[b]; ++i)
      result.accepted_rows[a.layout.cu_seqlens_q[b] + i] = live.slot[accepted_rows[live.layout.cu_seqlens_q[b] + i]];
  return result;
}

}  // namespace jacobi::cpu
