// multi_block_step on the CPU: one decode step of a Llama-like transformer over the live query rows.
//
//   x = embedding; per layer: x += attention_out(attention(rope(qkv(norm(x))))), x += down(silu(gate(norm(x)))
//   up(norm(x))) predictions = head(norm(x)); acceptance; commit; redraft
//
// Activations are float32 whatever the weights are; keys and values are rounded to the type of the cache. Holes of the
// layout cost nothing: the rows are compacted first, and the cache slot of a row is its place among the live rows.
// One thread team walks through all of it (team.h): eight barriers a layer. Scratch comes from the caller's workspace
// (Arena); counting and running walk the same code, and every thread takes the same pieces from its own copy of the
// arena.
#pragma once

#include <math.h>

#include <new>

#include "common/redraft.h"
#include "cpu/append.h"
#include "cpu/attention_run.h"
#include "cpu/commit.h"
#include "cpu/phase_clock.h"
#include "cpu/step_model.h"
#include "cpu/team.h"

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
};

inline LiveRows take_live_rows(const Layout& from, Arena& arena) {
  LiveRows live;
  live.slot = arena.take<int32_t>(from.rows);
  live.token = arena.take<int32_t>(from.rows);
  live.position = arena.take<int32_t>(from.rows);
  int32_t* cu_seqlens_q = arena.take<int32_t>(from.batch + 1);
  Segment* segments = arena.take<Segment>(from.num_segments);
  live.layout = {cu_seqlens_q, segments, from.cu_segments, from.batch, from.rows, from.num_segments};
  return live;
}

inline void compact(const StepArgs& a, const LiveRows& live) {
  const Layout& from = a.layout;
  int32_t* cu_seqlens_q = const_cast<int32_t*>(live.layout.cu_seqlens_q);
  Segment* segments = const_cast<Segment*>(live.layout.segments);
  int32_t count = 0;
  cu_seqlens_q[0] = 0;
  for (int32_t b = 0; b < from.batch; ++b) {
    for (int32_t s = from.cu_segments[b]; s < from.cu_segments[b + 1]; ++s) {
      const Segment& segment = from.segments[s];
      const int32_t before = a.cache.seqlens[b] + path_length_before(from.segments, s);
      segments[s] = {count, segment.length, segment.parent, segment.visible};
      for (int32_t i = 0; i < segment.length; ++i) {
        live.slot[count] = segment.start + i;
        live.token[count] = a.tokens[segment.start + i];
        live.position[count++] = before + i;
      }
    }
    cu_seqlens_q[b + 1] = count;
  }
}

// Panels [begin, end) of y = x W^T + bias, or y +=; everything float but the weights.
struct Product {
  const float* x;
  int64_t rows, k;
  Matrix w;
  const float* bias;
  float* y;
  int64_t n;
  bool accumulate = false;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  void operator()(int64_t begin, int64_t end) const {
    kernels().linear({x, k, rows, k, n, w.data, w.type, bias, DType::f32, y, DType::f32, n, accumulate}, begin, end);
  }
};

// cos and sin of a row's angles. The angle is a float32 product, as in the models' own code.
inline void rotary_row(const StepModel& m, int32_t position, float* cosine, float* sine) {
  for (int64_t i = 0; i < m.rope_dim() / 2; ++i) {
    const float angle = static_cast<float>(position) * m.inv_freq()[i];
    cosine[i] = static_cast<float>(cos(static_cast<double>(angle))) * m.rope_scale();
    sine[i] = static_cast<float>(sin(static_cast<double>(angle))) * m.rope_scale();
  }
}

// Rotates one head in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), halves of the rotated dimensions.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + half] = second * cosine[i] + first * sine[i];
  }
}

// Norms of q and k per head, then rotation, in one row of qkv.
inline void prepare_heads(const StepModel& m, const StepLayer& layer, float* qkv, const float* cosine,
                          const float* sine) {
  for (int64_t h = 0; h < m.heads() + m.kv_heads(); ++h) {
    float* x = qkv + h * m.head_dim();
    const float* norm = h < m.heads() ? layer.q_norm : layer.k_norm;
    if (norm != nullptr) kernels().rms_norm(x, norm, DType::f32, m.norm_eps(), x, m.head_dim());
    if (layer.use_rope) rotate(x, cosine, sine, m.rope_dim() / 2);
  }
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

// product = silu(gate) * up. The columns of gate and up that belong together are made by one thread, some panels at a
// time while they are in its cache; where a panel holds both of gate's and up's, all of the product comes first.
inline void gated(const Product& gate_up, float* product, int64_t ffn, Team& team) {
  constexpr int64_t kChunk = 8;  // panels
  const auto multiply = [&](int64_t row, int64_t begin, int64_t end) {
    const float* gate = gate_up.y + row * 2 * ffn;
    kernels().silu_mul(gate + begin, gate + ffn + begin, product + row * ffn + begin, end - begin);
  };
  if (ffn % kPanel == 0) {
    const int64_t panels = ffn / kPanel;
    team.split(panels, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p += kChunk) {
        const int64_t stop = p + kChunk < end ? p + kChunk : end;
        gate_up(p, stop);
        gate_up(panels + p, panels + stop);
        for (int64_t r = 0; r < gate_up.rows; ++r) multiply(r, p * kPanel, stop * kPanel);
      }
    });
  } else {
    team.split(gate_up.panels(), gate_up);
    team.split(gate_up.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) multiply(r, 0, ffn);
    });
  }
}

// Final hidden states of the live rows into x [rows, hidden]. While counting, layout.rows is the number of slots.
inline void forward(const StepModel& m, const StepArgs& a, const LiveRows& live, float* x, Arena& arena, Team& team) {
  const int64_t most = a.layout.rows, hidden = m.hidden(), ffn = m.ffn(), half = m.rope_dim() / 2;
  float* normed = arena.take<float>(most * hidden);
  float* qkv = arena.take<float>(most * m.qkv_size());
  float* heads = arena.take<float>(most * m.q_size());
  float* gate_up = arena.take<float>(most * 2 * ffn);
  float* product = arena.take<float>(most * ffn);
  float* cosine = arena.take<float>(most * half);
  float* sine = arena.take<float>(most * half);
  AttentionRun* run = arena.take<AttentionRun>(1);
  Layout widest = live.layout;
  widest.rows = a.layout.rows;
  char* attention = arena.take<char>(
      attention_workspace(attention_args(m, StepLayer{}, 0, a, widest, nullptr, nullptr), team.most()));
  if (attention == nullptr) return;

  const int64_t rows = live.layout.rows;
  const auto norm = [&](const float* weight, float* y) {
    team.split(rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        kernels().rms_norm(x + r * hidden, weight, DType::f32, m.norm_eps(), y + r * hidden, hidden);
    });
  };
  const auto linear = [&](const Product& p) { team.split(p.panels(), p); };

  PhaseClock clock(team.rank() == 0);
  if (team.rank() == 0) new (run) AttentionRun;
  team.split(rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      m.embed(live.token[r], x + r * hidden);
      rotary_row(m, live.position[r], cosine + r * half, sine + r * half);
    }
  });
  for (int64_t i = 0; i < m.layers(); ++i) {
    const StepLayer layer = m.layer(i);
    norm(layer.attention_norm, normed);
    clock.charge(kNormRope);
    linear({normed, rows, hidden, layer.qkv, layer.qkv_bias, qkv, m.qkv_size()});
    clock.charge(kLinear);
    const AttentionArgs args = attention_args(m, layer, i, a, live.layout, qkv, heads);
    if (team.rank() == 0) plan_run(*run, args, team.size(), attention);
    team.split(rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        prepare_heads(m, layer, qkv + r * m.qkv_size(), cosine + r * half, sine + r * half);
      const float* k = qkv + m.q_size();
      append_kv(args, {k, k + m.kv_size(), DType::f32, m.qkv_size(), m.qkv_size()}, const_cast<void*>(args.k),
                const_cast<void*>(args.v), begin, end);
    });
    clock.charge(kNormRope);
    run_part(*run, team.rank());
    team.barrier();
    clock.charge(kAttention);
    linear({heads, rows, m.q_size(), layer.attention_out, layer.attention_out_bias, x, hidden, true});
    clock.charge(kLinear);
    norm(layer.ffn_norm, normed);
    clock.charge(kNormRope);
    gated({normed, rows, hidden, layer.gate_up, layer.gate_up_bias, gate_up, 2 * ffn}, product, ffn, team);
    linear({product, rows, ffn, layer.down, layer.down_bias, x, hidden, true});
    clock.charge(kLinear);
  }
  norm(m.final_norm(), x);
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

// Everything but redraft, by all of a team. With an arena that only counts, nothing is read or written.
inline StepResult evaluate(const StepModel& m, const StepArgs& a, Arena& arena, Team& team) {
  const int32_t slots = a.layout.rows, batch = a.layout.batch;
  const StepResult result{arena.take<int32_t>(slots), arena.take<int32_t>(slots), arena.take<int32_t>(batch),
                          arena.take<bool>(batch)};
  int32_t* predictions = arena.take<int32_t>(slots);
  int32_t* accepted_rows = arena.take<int32_t>(slots);
  int32_t* winner = arena.take<int32_t>(batch);
  LiveRows live = take_live_rows(a.layout, arena);
  float* x = arena.take<float>(slots * m.hidden());
  if (x != nullptr) {
    team.single([&] { compact(a, live); });
    live.layout.rows = live.layout.cu_seqlens_q[batch];
  }
  forward(m, a, live, x, arena, team);
  VerifyArgs args{x,
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
  PhaseClock clock(team.rank() == 0);
  verify(m.head(), args, arena, team);
  clock.charge(kVerify);
  if (x == nullptr) return result;
  team.single([&] {
    commit_all(m, a.cache, live, accepted_rows, result.num_accepted);
    for (int32_t r = 0; r < slots; ++r) result.predictions[r] = result.accepted_rows[r] = -1;
    for (int32_t r = 0; r < live.layout.rows; ++r) result.predictions[live.slot[r]] = predictions[r];
    for (int32_t b = 0; b < batch; ++b)
      for (int32_t i = 0; i < result.num_accepted[b]; ++i)
        result.accepted_rows[a.layout.cu_seqlens_q[b] + i] = live.slot[accepted_rows[live.layout.cu_seqlens_q[b] + i]];
  });
  clock.charge(kCommit);
  return result;
}

// Bytes of arena that evaluate() needs with the threads of now.
inline size_t evaluation_bytes(const StepModel& m, const StepArgs& a) {
  Arena counter(nullptr, 0);
  Team alone;
  evaluate(m, a, counter, alone);
  return counter.used();
}

}  // namespace jacobi::cpu
