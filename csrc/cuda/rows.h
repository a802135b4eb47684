// Phases over single rows: embedding, residual and norm, queries and keys of each head.
//
//   begin_rows     x = embedding[token]; cosines and sines of the row's position; zeros behind its product row
//   norm_rows      x += sum of the splits of the product before + bias; operand = x / sqrt(mean(x^2) + eps) * weight
//   prepare_heads  q, k, v = sum of splits + bias; norms of q and k; rotation; q * scale -> q, k and v -> cache
//
// A block takes a row (norm_rows) or 8 heads (prepare_heads) at a time. Reduction order of a norm: lane l takes
// elements l, l + lanes, ... by fma, then the tree of 16 lanes. 16 lanes in float32 and per head, as on the CPU; 256 in
// bfloat16, which become 16 in ascending order. Splits in ascending order, then the bias. Bytes per row: splits * width
// * 4 read, width * (4 + 4 + size) read and written; all of it in L2.
#pragma once

#include "cuda/math.h"
#include "cuda/program.h"

namespace jacobi::cuda {

// Splits of the last product in ascending order, then the bias.
struct SplitSum {
  const float* y;  // [splits, capacity, columns]
  int32_t splits, columns;
  int64_t stride;  // between splits
  const float* bias;

  JACOBI_GRID float operator()(int32_t row, int32_t column) const {
    const float* at = y + static_cast<int64_t>(row) * columns + column;
    float sum = at[0];
    for (int32_t s = 1; s < splits; ++s) sum += at[s * stride];
    return bias == nullptr ? sum : sum + bias[column];
  }
};

JACOBI_GRID SplitSum split_sum(const Program& p, int32_t splits, int32_t columns, const float* bias) {
  return {p.work.partial, splits, columns, static_cast<int64_t>(p.args.rows) * columns, bias};
}

// Element `column` of a token's embedding; tied: from the head's panels.
template <class T>
JACOBI_GRID float embedding_of(const Program& p, int32_t token, int32_t column) {
  if (p.embedding != nullptr)
    return widen(static_cast<const T*>(p.embedding)[static_cast<int64_t>(token) * p.hidden + column]);
  const int64_t panel = static_cast<int64_t>(token / 16) * p.hidden;
  return widen(static_cast<const T*>(p.lm_head)[(panel + column) * 16 + token % 16]);
}

template <class T, class Block>
JACOBI_PHASE void begin_rows(Block& block, const Program& p) {
  const Workspace& w = p.work;
  for (int32_t r = block.index; r < w.header[kLiveRows]; r += block.count)
    block.threads_without_barrier([&](int thread) {
      for (int32_t c = thread; c < p.hidden; c += kThreads)
        w.x[static_cast<int64_t>(r) * p.hidden + c] = embedding_of<T>(p, w.token[r], c);
      const int32_t half = p.rope_dim / 2;
      for (int32_t i = thread; i < half; i += kThreads) {
        const float angle = static_cast<float>(w.position[r]) * p.inv_freq[i];
        w.cosine[r * half + i] = static_cast<float>(cos(static_cast<double>(angle))) * p.rope_scale;
        w.sine[r * half + i] = static_cast<float>(sin(static_cast<double>(angle))) * p.rope_scale;
      }
      T* const product = static_cast<T*>(w.product) + static_cast<int64_t>(r) * p.ffn_pitch;
      for (int32_t c = p.ffn + thread; c < p.ffn_pitch; c += kThreads) product[c] = narrow<T>(0.0f);
    });
}

// Rows rows[0..count) of x, or the first `count`, normed into the first `count` operand rows. `add`: what the product
// before adds to x, null at the start.
template <class T, class Block>
JACOBI_PHASE void norm_rows(Block& block, const Program& p, const SplitSum* add, const float* weight,
                            const int32_t* rows, int32_t count) {
  constexpr int kLanes = kIsFloat<T> ? 16 : kThreads;
  float* const lanes = reinterpret_cast<float*>(block.shared);  // [kThreads], then [16] folded, then the row
  float* const folded = lanes + kThreads;
  float* const row = folded + 16;
  for (int32_t i = block.index; i < count; i += block.count) {
    const int32_t r = rows == nullptr ? i : rows[i];
    float* const x = p.work.x + static_cast<int64_t>(r) * p.hidden;
    block.threads([&](int thread) {
      for (int32_t c = thread; c < p.hidden; c += kThreads) {
        float value = x[c];
        if (add != nullptr) x[c] = value = value + (*add)(r, c);
        row[c] = value;
      }
    });
    block.threads([&](int thread) {
      if (thread >= kLanes) return;
      float sum = 0.0f;
      for (int32_t c = thread; c < p.hidden; c += kLanes) sum = fmaf(row[c], row[c], sum);
      lanes[thread] = sum;
    });
    block.threads([&](int thread) {
      if (thread >= 16) return;
      float sum = lanes[thread];
      for (int l = thread + 16; l < kLanes; l += 16) sum += lanes[l];
      folded[thread] = sum;
    });
    T* const to = static_cast<T*>(p.work.operand) + static_cast<int64_t>(i) * p.hidden_pitch;
    block.threads([&](int thread) {
      const float scale = 1.0f / sqrtf(reduce_lanes(folded) / static_cast<float>(p.hidden) + p.norm_eps);
      for (int32_t c = thread; c < p.hidden_pitch; c += kThreads)
        to[c] = narrow<T>(c < p.hidden ? row[c] * scale * weight[c] : 0.0f);
    });
  }
}

// Offset in elements of a cache row of sequence b, in a layer.
JACOBI_GRID int64_t cache_row(const StepArgs& a, int32_t b, int32_t row) {
  if (a.page_table == nullptr) return b * a.slab_stride + row * a.row_stride;
  const int32_t size = static_cast<int32_t>(a.slab_rows), page = row / size;
  return a.page_table[b * a.max_pages + page] * a.slab_stride + (row - page * size) * a.row_stride;
}

template <class T, class Block>
JACOBI_PHASE void prepare_heads(Block& block, const Program& p, int32_t layer_index) {
  constexpr int kGroup = 32, kHeads = kThreads / kGroup, kMostDim = 128;
  const Workspace& w = p.work;
  const StepLayer& layer = p.layer[layer_index];
  const SplitSum sum = split_sum(p, p.qkv_splits, p.qkv_size, layer.qkv_bias);
  float* const values = reinterpret_cast<float*>(block.shared);  // [kHeads][kMostDim]
  float* const squares = values + kHeads * kMostDim;             // [kHeads][16]
  const int32_t per_row = p.heads + 2 * p.kv_heads, items = w.header[kLiveRows] * per_row, half = p.rope_dim / 2;
  const int64_t layer_offset = layer_index * p.args.layer_stride;

  for (int32_t base = block.index * kHeads; base < items; base += block.count * kHeads) {
    block.threads([&](int thread) {
      const int32_t item = base + thread / kGroup;
      if (item >= items) return;
      const int32_t row = item / per_row, head = item % per_row;
      for (int32_t d = thread % kGroup; d < p.head_dim; d += kGroup)
        values[thread / kGroup * kMostDim + d] = sum(row, head * p.head_dim + d);
    });
    block.threads([&](int thread) {
      const float* value = values + thread / kGroup * kMostDim;
      const int lane = thread % kGroup;
      if (lane >= 16 || base + thread / kGroup >= items) return;
      float total = 0.0f;
      for (int32_t d = lane; d < p.head_dim; d += 16) total = fmaf(value[d], value[d], total);
      squares[thread / kGroup * 16 + lane] = total;
    });
    block.threads([&](int thread) {
      const int32_t item = base + thread / kGroup;
      if (item >= items) return;
      const int32_t head = item % per_row;
      const float* norm = head < p.heads ? layer.q_norm : head < p.heads + p.kv_heads ? layer.k_norm : nullptr;
      if (norm == nullptr) return;
      float* value = values + thread / kGroup * kMostDim;
      const float* lanes = squares + thread / kGroup * 16;
      const float scale = 1.0f / sqrtf(reduce_lanes(lanes) / static_cast<float>(p.head_dim) + p.norm_eps);
      for (int32_t d = thread % kGroup; d < p.head_dim; d += kGroup) value[d] = value[d] * scale * norm[d];
    });
    block.threads([&](int thread) {
      const int32_t item = base + thread / kGroup;
      if (item >= items) return;
      const int32_t row = item / per_row, head = item % per_row, b = w.sequence[row];
      const float* value = values + thread / kGroup * kMostDim;
      const float *cosine = w.cosine + row * half, *sine = w.sine + row * half;
      const bool rotated = layer.use_rope && head < p.heads + p.kv_heads;
      for (int32_t d = thread % kGroup; d < p.head_dim; d += kGroup) {
        float y = value[d];
        if (rotated && d < half) y = value[d] * cosine[d] - value[d + half] * sine[d];
        if (rotated && d >= half && d < 2 * half) y = value[d] * cosine[d - half] + value[d - half] * sine[d - half];
        if (head < p.heads) {
          static_cast<T*>(w.q)[(static_cast<int64_t>(row) * p.heads + head) * p.dim_pitch + d] =
              narrow<T>(y * p.softmax_scale);
          continue;
        }
        const bool key = head < p.heads + p.kv_heads;
        const int32_t kv_head = head - p.heads - (key ? 0 : p.kv_heads);
        const int64_t at = layer_offset + cache_row(p.args, b, w.length[b] + row - w.live_begin[b]) +
                           static_cast<int64_t>(kv_head) * p.head_dim + d;
        static_cast<T*>(key ? p.args.k_cache : p.args.v_cache)[at] = narrow<T>(y);
      }
    });
  }
}

}  // namespace jacobi::cuda
