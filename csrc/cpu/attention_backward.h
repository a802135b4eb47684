// Gradients of multi_block_attention (attention.h), scores recomputed from the saved logarithms of their sums.
//
//   p_ij = exp(s_ij - lse_i)          s_ij = cap t_ij, t_ij = tanh(x_ij / cap), or x_ij without soft cap; x = scale q k
//   delta_i = dout_i . out_i - dlse_i
//   ds_ij = p_ij (dout_i . v_j - delta_i) (1 - t_ij^2)            the last factor only with soft cap
//   dv_j = sum_i p_ij dout_i      dk_j = sum_i ds_ij scale q_i      dq_i = scale sum_j ds_ij k_j
//
// (FlashAttention-2, Dao 2023, algorithm 2.) A unit of work is one sequence and one key/value head, so that every row
// of dk and dv has one owner. Its keys and values are brought into panels of 16 rows that begin anew with each segment:
// a path is then a list of whole panels and at most one cut one per ancestor. Up to 48 rows (query, head of the group)
// of one segment meet up to 64 keys of one ancestor; pieces that none of the rows sees are left out.
//
// Reduction order, for every thread count and instruction set:
//   q . k, dout . v    one chain of fma over d = 0, 1, ...; q times scale first, as in the forward
//   dq                 a chain of fma over the keys of a piece; pieces are added, those of the own segment ascending,
//                      then of its parent, ... up to the root
//   dk, dv             a chain of fma over the rows of a piece; pieces are added in ascending row
// Unseen keys of a piece weigh 0.
//
// Memory of a unit: five arrays of head_dim floats per panel row. Operations: 10 * head_dim per row and key seen.
#pragma once

#include "cpu/attention.h"
#include "cpu/gemm.h"

namespace JACOBI_ISA {
namespace backward {

using attending::between;
using jacobi::Segment;
using jacobi::cpu::AttentionBackwardArgs;

constexpr int kPieceRows = 48;
constexpr int kPieceKeys = 64;

// Scratch of one thread, and the unit at hand.
struct Work {
  int64_t dim, padded, group;  // head_dim, that rounded up to 16, query heads per key/value head
  int32_t* first_panel;        // [segments of the sequence]
  float *keys_t, *values_t;    // [panels][dim][16]
  float *keys, *dk, *dv;       // [panels * 16][padded]
  float *q, *dout, *dq;        // [kPieceRows][padded]; q times scale
  float *lse, *delta;          // [kPieceRows]
  int32_t* position;           // [kPieceRows] slot of the query
  float *p, *ds;               // [kPieceRows][kPieceKeys]; first the scores and dout . v
};

inline int64_t carve(const AttentionBackwardArgs& g, char* base, Work& w) {
  w.dim = g.forward.head_dim;
  w.padded = (w.dim + 15) / 16 * 16;
  w.group = g.forward.heads / g.forward.kv_heads;
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    char* block = base + used;
    used += (count * 4 + 63) / 64 * 64;
    return block;
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count)); };
  w.first_panel = reinterpret_cast<int32_t*>(take(g.max_segments));
  const int64_t rows = g.max_panels * 16;
  w.keys_t = floats(rows * w.padded), w.values_t = floats(rows * w.padded);
  w.keys = floats(rows * w.padded), w.dk = floats(rows * w.padded), w.dv = floats(rows * w.padded);
  w.q = floats(kPieceRows * w.padded), w.dout = floats(kPieceRows * w.padded), w.dq = floats(kPieceRows * w.padded);
  w.lse = floats(kPieceRows), w.delta = floats(kPieceRows);
  w.position = reinterpret_cast<int32_t*>(take(kPieceRows));
  w.p = floats(kPieceRows * kPieceKeys), w.ds = floats(kPieceRows * kPieceKeys);
  return used;
}

// ---- products -------------------------------------------------------------------------------------------------------

// out[r][c] += (sum over i of a[r * row + i * step] * b[i][c]); rows of b and out are `stride` apart.
struct Product {
  const float* a;
  int64_t row, step, count;
  const float* b;
  float* out;
  int64_t stride;
};

template <int R, int N>
[[gnu::always_inline]] inline void multiply_block(const Product& m, int64_t r0, int64_t c) {
  vec acc[R][N];
  float* out = m.out + r0 * m.stride + c;
  const float *a = m.a + r0 * m.row, *b = m.b + c;
  const int64_t row = m.row, step = m.step, stride = m.stride;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = zero();
  for (int64_t i = 0; i < m.count; ++i) {
    vec x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) x[n] = load(b + i * stride + 16 * n);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vec y = set1(a[r * row + i * step]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(y, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + r * stride + 16 * n, add(load(out + r * stride + 16 * n), acc[r][n]));
}

template <int R>
inline void multiply_rows(int rows, const Product& m, int64_t r0) {
  if (rows == R) {
    constexpr int N = panels_per_tile(R > 1 ? R : 2);
    int64_t c = 0;
    for (; c + 16 * N <= m.stride; c += 16 * N) multiply_block<R, N>(m, r0, c);
    for (; c < m.stride; c += 16) multiply_block<R, 1>(m, r0, c);
  } else if constexpr (R > 1) {
    multiply_rows<R - 1>(rows, m, r0);
  }
}

inline void multiply(const Product& m, int64_t rows) {
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
    multiply_rows<kMaxRows>(static_cast<int>(end - begin), m, begin);
  }
}

// Keeps products of gemm.h, panel `first` at column 0.
struct Scores {
  float* to;
  int64_t first;
  void operator()(int64_t row, int64_t panel, vec x) { store(to + row * kPieceKeys + (panel - first) * 16, x); }
};

// ---- one piece ------------------------------------------------------------------------------------------------------

// Turns p (scores) and ds (dout . v) of row r into what their names say. slot: of the first key; the piece has `keys`.
inline void weigh(const AttentionBackwardArgs& g, const Work& w, int64_t r, int32_t slot, int keys) {
  const vec lse = set1(w.lse[r]), delta = set1(w.delta[r]), cap = set1(g.forward.softcap);
  const int64_t seen_from = g.forward.window < 0 ? 0 : w.position[r] - g.forward.window - slot;
  const int lo = seen_from > 0 ? static_cast<int>(seen_from < keys ? seen_from : keys) : 0;
  const int hi = w.position[r] + 1 - slot < keys ? w.position[r] + 1 - slot : keys;
  for (int j = 0; j < keys; j += 16) {
    float *p = w.p + r * kPieceKeys + j, *ds = w.ds + r * kPieceKeys + j;
    if (hi <= j || lo >= j + 16) {
      store(p, zero());
      store(ds, zero());
      continue;
    }
    vec s = load(p), slope = set1(1.0f);
    if (g.forward.softcap > 0.0f) {
      const vec t = tanh(div(s, cap));
      s = mul(cap, t);
      slope = sub(slope, mul(t, t));
    }
    vec weight = exp(sub(s, lse)), change = mul(weight, sub(load(ds), delta));
    if (g.forward.softcap > 0.0f) change = mul(change, slope);
    if (lo > j || hi < j + 16) {
      const mask seen = between(j, lo, hi);
      weight = select(seen, weight, zero()), change = select(seen, change, zero());
    }
    store(p, weight);
    store(ds, change);
  }
}

// Rows [r0, r1) of the piece against `keys` keys from `panel` on, the first of which has slot `slot`.
inline void meet(const AttentionBackwardArgs& g, const Work& w, int64_t r0, int64_t r1, int64_t panel, int32_t slot,
                 int keys) {
  while (r0 < r1 && w.position[r0] < slot) ++r0;
  while (r0 < r1 && g.forward.window >= 0 && w.position[r1 - 1] - g.forward.window >= slot + keys) --r1;
  if (r0 == r1) return;
  const int seen = w.position[r1 - 1] + 1 - slot;  // positions ascend
  keys = seen < keys ? seen : keys;
  const int64_t rows = r1 - r0, end = panel + (keys + 15) / 16;
  float *p = w.p + r0 * kPieceKeys, *ds = w.ds + r0 * kPieceKeys;
  const float *q = w.q + r0 * w.padded, *dout = w.dout + r0 * w.padded;
  Scores scores{p, panel}, slopes{ds, panel};
  gemm(q, w.padded, rows, w.keys_t, w.dim, panel, end, scores);
  gemm(dout, w.padded, rows, w.values_t, w.dim, panel, end, slopes);
  for (int64_t r = r0; r < r1; ++r) weigh(g, w, r, slot, keys);
  const int64_t at = panel * 16 * w.padded;
  multiply({ds, kPieceKeys, 1, keys, w.keys + at, w.dq + r0 * w.padded, w.padded}, rows);
  multiply({p, 1, kPieceKeys, rows, dout, w.dv + at, w.padded}, keys);
  multiply({ds, 1, kPieceKeys, rows, q, w.dk + at, w.padded}, keys);
}

// Reads rows [begin, begin + count) of segment s; row = query * group + head of the group.
template <class T>
inline void begin_piece(const AttentionBackwardArgs& g, const Work& w, int64_t kv_head, int32_t s, int32_t slot,
                        int64_t begin, int64_t count) {
  const auto& a = g.forward;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t index = (begin + r) / w.group, head = kv_head * w.group + (begin + r) % w.group;
    const int64_t row = a.segments[s].start + index;
    const T* q = static_cast<const T*>(a.q) + row * a.q_stride + head * w.dim;
    const T* out = static_cast<const T*>(a.out) + row * a.out_stride + head * w.dim;
    const T* dout = static_cast<const T*>(g.grad_out) + row * g.grad_out_stride + head * w.dim;
    vec sum = zero();
    for (int64_t d = 0; d < w.padded; d += 16) {
      const vec change = load_up_to(dout + d, w.dim - d);
      store(w.q + r * w.padded + d, mul(load_up_to(q + d, w.dim - d), set1(a.scale)));
      store(w.dout + r * w.padded + d, change);
      store(w.dq + r * w.padded + d, zero());
      sum = fma(change, load_up_to(out + d, w.dim - d), sum);
    }
    w.position[r] = slot + static_cast<int32_t>(index);
    w.lse[r] = a.lse[head * a.rows + row];
    w.delta[r] = reduce_add(sum);
    if (g.grad_lse != nullptr) w.delta[r] -= g.grad_lse[head * a.rows + row];
  }
}

template <class T>
inline void end_piece(const AttentionBackwardArgs& g, const Work& w, int64_t kv_head, int32_t s, int64_t begin,
                      int64_t count) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = g.forward.segments[s].start + (begin + r) / w.group;
    T* dq = static_cast<T*>(g.dq) + (row * g.forward.heads + kv_head * w.group + (begin + r) % w.group) * w.dim;
    for (int64_t d = 0; d < w.dim; d += 16)
      store_up_to(dq + d, mul(load(w.dq + r * w.padded + d), set1(g.forward.scale)), w.dim - d);
  }
}

// All keys on the path of rows [0, count), which lie in segment s; `from`: slot of its first token.
inline void walk_path(const AttentionBackwardArgs& g, const Work& w, int32_t first_segment, int32_t s, int32_t from,
                      int64_t count) {
  const Segment* segments = g.forward.segments;
  int32_t length = segments[s].length;  // of the part of s that is on the path
  while (true) {
    for (int32_t i = 0; i < length; i += kPieceKeys) {
      const int keys = length - i < kPieceKeys ? length - i : kPieceKeys;
      meet(g, w, 0, count, w.first_panel[s - first_segment] + i / 16, from + i, keys);
    }
    if (segments[s].parent < 0 || (g.forward.window >= 0 && w.position[0] - g.forward.window >= from)) return;
    length = segments[s].visible;
    from -= length;
    s = segments[s].parent;
  }
}

// ---- one unit -------------------------------------------------------------------------------------------------------

// Up to 16 rows of keys and values of one head become a panel.
template <class T>
inline void pack_panel(const Work& w, const T* key, int64_t k_stride, const T* value, int64_t v_stride, int64_t panel,
                       int rows) {
  for (int64_t d = 0; d < w.padded; d += 16) {
    vec k[16], v[16];
    const int64_t left = w.dim - d;
    for (int i = 0; i < 16; ++i) {
      k[i] = i < rows ? load_up_to(key + i * k_stride + d, left) : zero();
      v[i] = i < rows ? load_up_to(value + i * v_stride + d, left) : zero();
      store(w.keys + (panel * 16 + i) * w.padded + d, k[i]);
    }
    transpose(k);
    transpose(v);
    for (int i = 0; i < 16 && i < left; ++i) {
      store(w.keys_t + (panel * w.dim + d + i) * 16, k[i]);
      store(w.values_t + (panel * w.dim + d + i) * 16, v[i]);
    }
  }
}

template <class T>
inline int64_t pack(const AttentionBackwardArgs& g, const Work& w, int64_t b, int64_t kv_head) {
  const auto& a = g.forward;
  int64_t panels = 0;
  for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) {
    w.first_panel[s - a.cu_segments[b]] = static_cast<int32_t>(panels);
    for (int32_t i = 0; i < a.segments[s].length; i += 16) {
      const int64_t row = a.segments[s].start + i;
      const T* key = static_cast<const T*>(a.k) + row * g.k_stride + kv_head * w.dim;
      const T* value = static_cast<const T*>(a.v) + row * g.v_stride + kv_head * w.dim;
      const int rows = a.segments[s].length - i < 16 ? a.segments[s].length - i : 16;
      pack_panel(w, key, g.k_stride, value, g.v_stride, panels++, rows);
    }
  }
  return panels;
}

template <class T>
inline void write_gradient(const Work& w, void* to, int64_t heads, int64_t head, int64_t row, const float* x) {
  T* out = static_cast<T*>(to) + (row * heads + head) * w.dim;
  for (int64_t d = 0; d < w.dim; d += 16) store_up_to(out + d, x == nullptr ? zero() : load(x + d), w.dim - d);
}

// dk and dv of the sequence's rows; and 0 in its holes, in dq too.
template <class T>
inline void end_unit(const AttentionBackwardArgs& g, const Work& w, int64_t b, int64_t kv_head) {
  const auto& a = g.forward;
  int32_t row = a.cu_seqlens_q[b];
  for (int32_t s = a.cu_segments[b]; s <= a.cu_segments[b + 1]; ++s) {
    const bool live = s < a.cu_segments[b + 1];
    for (const int32_t end = live ? a.segments[s].start : a.cu_seqlens_q[b + 1]; row < end; ++row) {
      write_gradient<T>(w, g.dk, a.kv_heads, kv_head, row, nullptr);
      write_gradient<T>(w, g.dv, a.kv_heads, kv_head, row, nullptr);
      for (int64_t h = 0; h < w.group; ++h) write_gradient<T>(w, g.dq, a.heads, kv_head * w.group + h, row, nullptr);
    }
    if (!live) return;
    int64_t at = w.first_panel[s - a.cu_segments[b]] * 16 * w.padded;
    for (int32_t i = 0; i < a.segments[s].length; ++i, ++row, at += w.padded) {
      write_gradient<T>(w, g.dk, a.kv_heads, kv_head, row, w.dk + at);
      write_gradient<T>(w, g.dv, a.kv_heads, kv_head, row, w.dv + at);
    }
  }
}

template <class T>
inline void run_unit(const AttentionBackwardArgs& g, const Work& w, int64_t b, int64_t kv_head) {
  const auto& a = g.forward;
  const int64_t floats = pack<T>(g, w, b, kv_head) * 16 * w.padded;
  for (int64_t i = 0; i < floats; i += 16) {
    store(w.dk + i, zero());
    store(w.dv + i, zero());
  }
  for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) {
    const int64_t rows = a.segments[s].length * w.group;
    const int32_t slot = attending::first_slot(a, b, s);
    for (int64_t begin = 0; begin < rows; begin += kPieceRows) {
      const int64_t count = rows - begin < kPieceRows ? rows - begin : kPieceRows;
      begin_piece<T>(g, w, kv_head, s, slot, begin, count);
      walk_path(g, w, a.cu_segments[b], s, slot, count);
      end_piece<T>(g, w, kv_head, s, begin, count);
    }
  }
  end_unit<T>(g, w, b, kv_head);
}

}  // namespace backward

// Bytes of scratch per thread.
inline int64_t attention_backward_scratch(const AttentionBackwardArgs& g) {
  backward::Work w;
  return backward::carve(g, nullptr, w);
}

// Units [begin, end): sequence * kv_heads + key/value head.
inline void attention_backward(const AttentionBackwardArgs& g, void* scratch, int64_t begin, int64_t end) {
  backward::Work w;
  backward::carve(g, static_cast<char*>(scratch), w);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t b = unit / g.forward.kv_heads, kv_head = unit % g.forward.kv_heads;
    g.forward.q_type == jacobi::cpu::DType::f32 ? backward::run_unit<float>(g, w, b, kv_head)
                                                : backward::run_unit<uint16_t>(g, w, b, kv_head);
  }
}

}  // namespace JACOBI_ISA
